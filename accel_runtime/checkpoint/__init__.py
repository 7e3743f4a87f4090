"""Checkpoints: what a run's state is, how it is written whole or not at all, and how it comes back."""
