"""The end of a run, foreseen from the number of epochs or steps in its arguments or its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_cli.runs.beats import Beat

__all__ = ["Goal", "compute_run_eta", "find_goal", "is_resume"]

_EPOCHS = re.compile(r"(num|n|max|total)?_?(train|training)?_?epochs")
_STEPS = re.compile(
    r"(num|n|max|total)_?(train|training)?_?(steps|iters|iterations)|(train|training)_steps|iterations"
)
_MAX_GOAL = 1e12
"""Larger numbers stand for a run without an end."""
_RESUME = re.compile(r"--?resume|--?(start|initial)[-_]epoch")


@dataclass(frozen=True)
class Goal:
    """The number of epochs or optimizer steps after which a run ends."""

    number: float
    counts_steps: bool
    source: str
    """The option or the key that has it, as in `--epochs 20`."""


def find_goal(arguments: Sequence[str], configuration: Mapping[str, Any]) -> Goal | None:
    """Return the goal of a run: of steps rather than of epochs, of the command line rather than of the configuration."""
    goals: list[Goal] = []
    for name, value, source in [*_list_options(arguments), *_list_keys(configuration)]:
        key = re.split(r"[./]", name)[-1].replace("-", "_").lower()
        kind = _STEPS if _STEPS.fullmatch(key) else _EPOCHS if _EPOCHS.fullmatch(key) else None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if kind is not None and 0 < number < _MAX_GOAL:
            goals.append(Goal(number, kind is _STEPS, source))
    return next((goal for goal in goals if goal.counts_steps), goals[0] if goals else None)


def _list_options(arguments: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, value and text of the options `--epochs 20`, `--epochs=20` and `train.epochs=20`."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if equals:
            yield name.lstrip("-+"), value, argument
        elif argument.startswith("-") and index + 1 < len(arguments):
            yield argument.lstrip("-"), arguments[index + 1], f"{argument} {arguments[index + 1]}"


def _list_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _list_keys(value, f"{prefix}{name}.")
        elif not isinstance(value, bool):
            yield f"{prefix}{name}", value, f"{prefix}{name}: {value}"


def compute_run_eta(goal: Goal, beat: Beat, now: float, *, is_resumed: bool) -> float | None:
    """Return the seconds until the end of a run, at its mean speed; None if they are unknown.

    Of a run that is resumed, the steps before are unknown, and the speed is that of the current epoch.

    Args:
        goal: The end of the run.
        beat: The heartbeat of a rank.
        now: The time, on the clock of the heartbeat.
        is_resumed: True if the run continues another one, or has restarted.
    """
    elapsed = now - beat.started
    if goal.counts_steps:
        if is_resumed or beat.steps <= 0:
            return None
        return elapsed * max(0.0, goal.number - beat.steps) / beat.steps
    if not beat.epoch_length:
        return None
    part = beat.epoch_batches / beat.epoch_length
    remaining = max(0.0, goal.number - beat.epoch - part)
    if beat.epoch >= 1 and not is_resumed:  # the time of evaluations and checkpoints too
        return elapsed * remaining / (beat.epoch + part)
    returned = beat.epoch_batches - beat.epoch_first
    if returned <= 0:
        return None
    return remaining * beat.epoch_length * max(0.0, now - beat.epoch_started) / returned


def is_resume(arguments: Sequence[str]) -> bool:
    """Return True if the command line of a script seems to continue an earlier run."""
    return any(_RESUME.match(argument) for argument in arguments)
