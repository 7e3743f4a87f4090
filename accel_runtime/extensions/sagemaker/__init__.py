"""Libraries in the images of Amazon SageMaker that a rank uses."""
