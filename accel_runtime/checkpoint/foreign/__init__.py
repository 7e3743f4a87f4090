"""Checkpoints that Accelerate wrote."""
