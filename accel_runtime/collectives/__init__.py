"""Collectives of accel: a handshake first, then as few messages as possible."""
