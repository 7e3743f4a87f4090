"""Checkpoints on disk: their manifest, their directory and their files of tensors. No torch at module level."""
