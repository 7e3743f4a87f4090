"""Prepared data loaders: sharding and padding of batches, sources, and resumable iteration."""
