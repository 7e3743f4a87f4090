"""The wizard of `accel config`."""
