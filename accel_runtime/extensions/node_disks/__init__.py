"""Checkpoints on the disk of each node, beside the store that all of them reach."""
