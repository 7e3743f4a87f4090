"""Profiles and plans of launch requests."""

from __future__ import annotations

from accel_cli.profile import planner


def prepare(request, environ, machine=None):
    """Return the resolved profile and the plan of a request, for this machine unless another one is given."""
    resolved = planner.resolve(request, environ, machine)
    return resolved, planner.plan(resolved)
