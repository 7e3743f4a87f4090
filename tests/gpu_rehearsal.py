"""Whether tests marked `gpu` are tried on the CPU."""

from __future__ import annotations

import os

REHEARSAL = os.environ.get("REHEARSE_GPU_TESTS") == "1"
"""Then those that need nothing of CUDA itself run, so that a mistake in a test is found without a GPU."""
