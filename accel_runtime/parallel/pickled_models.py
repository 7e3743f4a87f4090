"""Warn if `torch.save` writes a prepared model as an object."""

from __future__ import annotations

import logging
import sys
from functools import cache

from accel_runtime.foundation.torch_internals import TORCH
from accel_runtime.observe.call_sites import call_site

__all__ = ["warn_of_saved_model"]

_LOG = logging.getLogger("accel_runtime.export")


def warn_of_saved_model() -> None:
    """Warn if the method that calls this one, a `__reduce_ex__`, is called by `torch.save`; copies are no files."""
    if sys._getframe(2).f_globals.get("__name__") == "torch.serialization":  # noqa: SLF001
        _warn_once(call_site(TORCH))


@cache
def _warn_once(site: str) -> None:
    _LOG.warning(
        "torch.save() at %s writes a prepared model as an object: reading the file needs accel, this code, and for a model of "
        "several processes a process group. Save its parameters: accelerator.save_model(model, folder), or "
        "accelerator.save(accelerator.get_state_dict(model), file).",
        site,
    )
