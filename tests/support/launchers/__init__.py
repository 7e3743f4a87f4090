"""Launches, and answers of the services of launchers."""
