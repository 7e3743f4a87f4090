"""What keeps a host from starting: said once, in words, without anything that a container may lack."""

from __future__ import annotations

__all__ = ["ContainerError"]


class ContainerError(Exception):
    """Something about the job, its image or its permissions that a person should read."""
