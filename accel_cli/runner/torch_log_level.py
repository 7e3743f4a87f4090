"""Keeps torch's sockets from writing stack frames of what the agent says itself; imported before torch."""

from __future__ import annotations

import os

__all__ = ["LOG_LEVEL", "WORKER_LOG_LEVEL"]

LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Read by torch once, while it is imported."""
WORKER_LOG_LEVEL = os.environ.get(LOG_LEVEL, "WARNING")
"""What the processes are told, whatever the agent leaves out; `WARNING` is torch's own default."""
os.environ.setdefault(LOG_LEVEL, "ERROR")
