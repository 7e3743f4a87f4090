"""Profiles: their model, files, layers and validation errors."""
