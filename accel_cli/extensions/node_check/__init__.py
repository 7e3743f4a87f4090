"""The check of nodes before a launch."""
