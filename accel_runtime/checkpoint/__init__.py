"""Save and load training states: complete or absent, verified, on any number of processes."""
