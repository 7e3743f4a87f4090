"""Gradient accumulation, loss weights, precision, compilation, and checks of training scripts."""
