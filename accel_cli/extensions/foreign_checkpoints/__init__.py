"""Commands that convert checkpoints from and to the formats of other programs."""
