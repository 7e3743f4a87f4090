"""Views of a run: what its folder records, on a terminal and as a file."""
