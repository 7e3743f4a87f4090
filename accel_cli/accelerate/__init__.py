"""Accelerate's configuration files and options, as profiles and settings of a launch."""
