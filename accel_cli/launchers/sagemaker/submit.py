"""Carries a plan for SageMaker out: asks what AWS has, sends the folder, starts the job and follows it."""

from __future__ import annotations

from accel_cli.plan import Plan

__all__ = ["look", "submit"]


def look(plan: Plan, *, offline: bool) -> str:
    """What would be asked and sent."""
    raise NotImplementedError


def submit(plan: Plan) -> int:
    """Submit the job."""
    raise NotImplementedError
