"""Models that are larger than one device: divided over a mesh of processes."""
