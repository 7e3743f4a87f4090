"""A job of Amazon SageMaker: what is sent, and how it is followed."""
