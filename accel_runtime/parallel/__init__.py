"""Models larger than one device: how parameters, computation and sequences are divided among processes."""
