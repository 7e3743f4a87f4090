"""Trackers of services: one module for each package."""
