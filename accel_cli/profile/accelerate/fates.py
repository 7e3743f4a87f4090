"""Fates: what becomes of each key at the top of an Accelerate config file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_cli.profile.accelerate.asked import Asked

__all__ = ["FATES", "NOT_SET", "OFF", "Fate", "left"]


@dataclass(frozen=True)
class Fate:
    """What becomes of a key."""

    text: str
    taken: bool = True
    """Whether it took effect, or asks for what accel does anyway."""


OFF = Fate("off in accel too")
NOT_SET = Fate("not set")


def left(text: str) -> Fate:
    """The fate of a key that has no place in the profile."""
    return Fate(text, taken=False)


def _type(asked: Asked, _: str) -> Fate:
    way = asked.way
    if way.engine:
        return left(
            f"{way.engine} is not in this version of accel: launcher.kind is {way.kind}, and every process keeps "
            "the whole model (DDP)"
        )
    device = "" if way.device == "auto" else f", device: {way.device}"
    return Fate(f"launcher.kind: {way.kind}{device}")


def _processes(asked: Asked, number: int) -> Fate:
    return Fate(f"launcher.nproc_per_node: {asked.per_node}") if asked.way.several else _alone(asked, number)


def _machines(asked: Asked, number: int) -> Fate:
    return Fate(f"launcher.nnodes: {number}") if asked.way.several else _alone(asked, number)


def _alone(asked: Asked, number: int) -> Fate:
    text = f"distributed_type: {asked.distributed_type} is one process"
    return left(f"{text}, in Accelerate too") if number > 1 else Fate(text)


def _rank(asked: Asked, rank: int) -> Fate:
    if asked.spread:
        return left("not needed: the same command runs on every machine")
    return left("not needed on one machine") if rank else Fate("there is one machine")


def _ip(asked: Asked, _: str) -> Fate:
    return _meeting(asked) if asked.spread else left("not needed on one machine")


def _port(asked: Asked, port: int) -> Fate:
    if asked.spread:
        return _meeting(asked)
    return left("not needed on one machine") if port else Fate("accel takes a free port too")


def _meeting(asked: Asked) -> Fate:
    return Fate(f"launcher.rdzv_endpoint: {asked.endpoint}")


def _network(asked: Asked, _: bool) -> Fate:
    same = "the machines meet at launcher.rdzv_endpoint, on one network or not"
    return Fate(same if asked.spread else "there is one machine")


def _rdzv(asked: Asked, backend: str) -> Fate:
    always = "accel always uses c10d" if asked.way.several else "one process has nothing to meet"
    return Fate(always) if backend in {"static", "c10d", ""} or not asked.way.several else left(always)


def _fp16(asked: Asked, fp16: bool) -> Fate:
    if not fp16:
        return OFF
    if asked.precision == "fp16":
        return Fate("mixed_precision: fp16")
    return left("mixed_precision is in the file too, and Accelerate takes that")


def _cpu(asked: Asked, use_cpu: bool) -> Fate:
    if use_cpu:
        return Fate("device: cpu")
    return Fate(f"device: {asked.device}" if asked.device != "cpu" else "device: cpu, by distributed_type")


def _ids(asked: Asked, ids: str) -> Fate:
    if asked.visible:
        return Fate("".join(f"env.{name}: {value}" for name, value in asked.visible.items()))
    if ids.lower() == "all":
        return Fate("accel uses all there are")
    return left(f"there is nothing to choose on device: {asked.device}")


FATES: Mapping[str, Callable[[Asked, Any], Fate]] = {
    "compute_environment": lambda *_: Fate("accel runs on this machine"),
    "distributed_type": _type,
    "num_processes": _processes,
    "num_machines": _machines,
    "machine_rank": _rank,
    "main_process_ip": _ip,
    "main_process_port": _port,
    "same_network": _network,
    "rdzv_backend": _rdzv,
    "mixed_precision": lambda asked, _: Fate(f"mixed_precision: {asked.precision}"),
    "fp16": _fp16,
    "use_cpu": _cpu,
    "gpu_ids": _ids,
}
"""What becomes of a key that can have a place in the profile, from all that is asked and the key's value."""
