"""Numerical comparisons of the tests."""

from __future__ import annotations

import torch


def relative_error(actual, expected):
    """Return the norm of the difference of tensors, or of lists of tensors, relative to the expected norm."""
    actual, expected = _flatten(actual), _flatten(expected)
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))


def _flatten(values):
    return values.flatten() if isinstance(values, torch.Tensor) else torch.cat([v.flatten() for v in values])
