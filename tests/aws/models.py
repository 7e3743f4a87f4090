"""Cache of the service models of botocore, which parses megabytes of JSON for every session."""

from __future__ import annotations

import functools

from botocore.loaders import JSONFileLoader

__all__ = ["keep_models"]


def keep_models():
    """Let botocore keep each parsed model file for all sessions of this process."""
    if not hasattr(JSONFileLoader.load_file, "cache_info"):
        read = JSONFileLoader().load_file
        JSONFileLoader.load_file = staticmethod(functools.cache(read))
