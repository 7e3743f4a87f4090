"""Fates: what becomes of each key at the top of an Accelerate config file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_cli.import_accelerate.asked import Asked

__all__ = ["FATES", "NOT_SET", "OFF", "Fate", "left", "tpu_only"]


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
    if way.divides:
        divided = asked.division.said
        return Fate(
            f"launcher.kind: {way.kind}, {divided or 'and every process keeps the whole model (DDP)'}"
        )
    device = "" if way.device == "auto" else f", device: {way.device}"
    return Fate(f"launcher.kind: {way.kind}{device}")


def _processes(asked: Asked, number: int) -> Fate:
    if asked.way.tpu:
        # Accelerate starts one on every core too, whatever the number.
        counted = "" if asked.replicas == 1 or number == -1 else ", which are as many as the TPU has"
        return Fate(f"launcher.replicas: {asked.replicas}{counted}")
    return Fate(f"launcher.nproc_per_node: {asked.per_node}") if asked.way.several else _alone(asked, number)


def _machines(asked: Asked, number: int) -> Fate:
    if asked.way.tpu:
        return left(_KNOWN) if number > 1 else Fate("the hosts of a TPU say themselves how many they are")
    return Fate(f"launcher.nnodes: {number}") if asked.way.several else _alone(asked, number)


def _alone(asked: Asked, number: int) -> Fate:
    text = f"distributed_type: {asked.distributed_type} is one process"
    return left(f"{text}, in Accelerate too") if number > 1 else Fate(text)


_KNOWN = "the hosts of a TPU pod know each other: start the same on all, accel launch --tpu-pod NAME"


def _rank(asked: Asked, rank: int) -> Fate:
    if asked.way.tpu and rank:
        return left(_KNOWN)
    if asked.spread:
        return left("not needed: the same command runs on every machine")
    return left("not needed on one machine") if rank else Fate("there is one machine")


def _ip(asked: Asked, _: str) -> Fate:
    if asked.way.tpu and asked.num_machines > 1:
        return left(_KNOWN)
    return _meeting(asked) if asked.spread else left("not needed on one machine")


def _port(asked: Asked, port: int) -> Fate:
    if asked.way.tpu and asked.num_machines > 1:
        return left(_KNOWN)
    if asked.spread:
        return _meeting(asked)
    return left("not needed on one machine") if port else Fate("accel takes a free port too")


def _meeting(asked: Asked) -> Fate:
    return Fate(f"launcher.rdzv_endpoint: {asked.endpoint}")


def _network(asked: Asked, _: bool) -> Fate:
    if asked.way.tpu:
        return Fate("the hosts of a TPU are on one network")
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
    if asked.chosen_gpus:
        return Fate(f"launcher.gpu_ids: {ids}")
    if asked.visible:
        return Fate("".join(f"env.{name}: {value}" for name, value in asked.visible.items()))
    if ids.lower() == "all":
        return Fate("accel uses all there are")
    return left(f"there is nothing to choose on device: {asked.device}")


def tpu_only(fate: Callable[[Asked, Any], Fate]) -> Callable[[Asked, Any], Fate]:
    """What becomes of a key for TPUs: nothing is lost where it is off."""

    def found(asked: Asked, value: Any) -> Fate:
        if not value:
            return OFF
        return fate(asked, value) if asked.way.tpu else left("it is for TPUs, and this does not run on one")

    return found


def _function(asked: Asked, name: str) -> Fate:
    if asked.way.tpu and name:
        return Fate(f"launcher.main_training_function: {name}")
    return left("accel runs the script itself, no function of it") if name not in {"", "main"} else OFF


def _variables(asked: Asked, _: list[str]) -> Fate:
    return Fate(", ".join(f"env.{name}" for name in asked.variables))


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
    "main_training_function": _function,
    "tpu_env": tpu_only(_variables),
}
"""What becomes of a key that can have a place in the profile, from all that is asked and the key's value."""
