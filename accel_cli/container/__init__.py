"""What runs in the container of a training job on SageMaker, from its first process to the launcher of its host."""
