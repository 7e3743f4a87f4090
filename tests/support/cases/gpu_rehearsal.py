"""Rehearsal of the tests marked `gpu` on the CPU."""

from __future__ import annotations

import os

REHEARSAL = os.environ.get("REHEARSE_GPU_TESTS") == "1"
"""Whether to run the GPU tests that do not depend on CUDA on the CPU, to find mistakes in tests without a GPU."""
