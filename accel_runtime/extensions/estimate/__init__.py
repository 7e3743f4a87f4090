"""Estimate the memory of training on each device without allocating it, for `accel estimate`."""
