"""Training jobs of Amazon SageMaker, from this machine."""
