"""What the images of Amazon SageMaker have, on a rank."""
