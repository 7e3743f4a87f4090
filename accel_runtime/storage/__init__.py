"""Checkpoints in their stores: manifest, directory, objects, and files of tensors. No torch at module level."""
