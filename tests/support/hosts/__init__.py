"""Machines and clusters on this machine."""
