"""The wizard: asks a model's own questions, and shows what it will write."""
