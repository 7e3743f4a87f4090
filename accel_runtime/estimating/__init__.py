"""How much memory training takes on each device, computed without allocating it; run by `accel estimate`."""
