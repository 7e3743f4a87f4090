"""Weights and objects in files of their own: written for other programs, and read from them."""
