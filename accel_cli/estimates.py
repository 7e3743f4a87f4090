"""What a layout takes, asked of a child process: neither the runtime nor torch is ever imported here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

from accel_cli.errors import AccelError, UsageError
from accel_runtime.env import FullyShard

__all__ = ["ask", "how", "left_out", "none_fits", "said", "sections"]

_BYTES = ("parameters", "gradients", "optimizer", "activations", "working", "total")


def ask(**options: Any) -> dict[str, Any]:
    """Every layout, whether it fits, and which to take.

    Args:
        **options: Those of `accel estimate`, and its `target`.

    Raises:
        UsageError: Nothing can be estimated; the message says why.
        AccelError: The child ended without an answer.
    """
    # What a factory prints goes where a person sees it. In a session of its own, Ctrl-C ends it without a traceback.
    done = subprocess.run(
        [sys.executable, "-m", "accel_runtime.estimate", json.dumps(options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        check=False,
    )
    if not done.stdout:
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise AccelError(
            f"{options['target']} could not be estimated: the process that did it ended with {ended}"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise UsageError(answer["error"])
    found: dict[str, Any] = answer["result"]
    return found


def said(layout: dict[str, Any]) -> str:
    """A layout in the words of a profile."""
    parts = [f"{name} {layout[name]}" for name in ("dp_replicate", "dp_shard", "tp") if layout[name] > 1]
    if layout["sharded"] and layout["devices"] == 1:
        parts = ["dp_shard auto"]
    return " x ".join(parts or ["one whole model"]) + (f", {how(layout)}" if how(layout) else "")


def how(layout: dict[str, Any]) -> str:
    """What saves memory beside the division, in few words."""
    again = ["checkpointing"] if layout["activation_checkpointing"] else []
    reshard = ["reshard" if layout["reshard_after_forward"] else "no reshard"] if layout["wrapped"] else []
    return ", ".join([*again, *reshard])


def none_fits(found: dict[str, Any], size: Any) -> str:
    """That nothing fits, how far it is from it, and what helps.

    Args:
        found: The answer.
        size: Says a number of bytes.
    """
    leanest = found["layouts"][found["leanest"]]
    return (
        f"no layout on {found['devices']} device(s) fits: the leanest ({said(leanest)}) takes "
        f"{size(leanest['bytes']['total'])} on each, and {size(found['usable'])} of {size(found['memory'])} may be used. "
        f"Most of it is {_most(leanest, wrapped=bool(found['wrapped']))}"
    )


def sections(layout: dict[str, Any], wrap: str) -> dict[str, Any]:
    """What a profile says of a layout, by dotted key; None takes a key out.

    Args:
        layout: The one to be used.
        wrap: What is gathered as a whole.
    """
    alone = layout["sharded"] and layout["devices"] == 1
    # An option that has nothing to say it of is refused.
    updates: dict[str, Any] = (
        {} if layout["wrapped"] else {f"fully_shard.{f.name}": None for f in fields(FullyShard)}
    )
    updates |= {
        "parallel.dp_replicate": layout["dp_replicate"],
        "parallel.dp_shard": "auto" if alone else layout["dp_shard"],
        "parallel.tp": layout["tp"],
        "parallel.cp": None,
    }
    if layout["tp"] == 1:
        updates["parallel.tp_plan"] = None
    if layout["wrapped"] or layout["activation_checkpointing"]:
        updates["fully_shard.wrap"] = int(wrap) if wrap.isdecimal() else wrap
        updates["fully_shard.activation_checkpointing"] = layout["activation_checkpointing"]
    if layout["wrapped"]:
        updates["fully_shard.reshard_after_forward"] = layout["reshard_after_forward"]
    return updates


def left_out(found: dict[str, Any]) -> list[str]:
    """Why there are no layouts that divide layers among some numbers of devices; a reason is said once."""
    reasons: dict[str, list[int]] = {}
    for one in found["left_out"]:
        reasons.setdefault(one["why"].replace(f"parallel.tp={one['tp']} ", "this "), []).append(one["tp"])
    return [f"no layout with tp {', '.join(map(str, sizes))}: {why}" for why, sizes in reasons.items()]


def _most(layout: dict[str, Any], *, wrapped: bool) -> str:
    """The largest part, and what makes it smaller."""
    sizes = layout["bytes"]
    largest = max(_BYTES[:-1], key=lambda name: sizes[name] or 0)
    if largest == "working" and layout["sharded"] and not wrapped:
        return "working: the model has no list of layers, so all of it is gathered at once; --wrap CLASS says what is"
    if largest in {"activations", "working"}:
        return f"{largest}: a smaller --batch-size or --seq-length, or --mixed-precision bf16, takes less"
    return f"{largest}: more devices, or an optimizer with less state, take less"
