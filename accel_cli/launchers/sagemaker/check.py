"""Whether SageMaker would take a request: found out here, from botocore's own data, before anything is sent."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from accel_cli.console import is_secret, mask_secrets
from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker.instances import known, nearby
from accel_cli.launchers.sagemaker.service import model
from accel_runtime.env import find_nearest

__all__ = ["check", "problems"]

_KEYS: Mapping[str, str] = {
    "AlgorithmSpecification.MetricDefinitions": "metrics",
    "AlgorithmSpecification.TrainingImage": "image_uri",
    "CheckpointConfig": "checkpoint_uri",
    "EnableInterContainerTrafficEncryption": "encrypt_traffic",
    "EnableManagedSpotTraining": "spot",
    "EnableNetworkIsolation": "network_isolation",
    "HyperParameters": "model_parallel",
    "InputDataConfig": "inputs",
    "OutputDataConfig.KmsKeyId": "output_kms_key",
    "OutputDataConfig.S3OutputPath": "bucket",
    "ResourceConfig.InstanceCount": "instance_count",
    "ResourceConfig.InstanceType": "instance_type",
    "ResourceConfig.KeepAlivePeriodInSeconds": "keep_alive",
    "ResourceConfig.VolumeKmsKeyId": "volume_kms_key",
    "ResourceConfig.VolumeSizeInGB": "volume_size",
    "RoleArn": "role",
    "StoppingCondition.MaxRuntimeInSeconds": "max_run",
    "StoppingCondition.MaxWaitTimeInSeconds": "max_wait",
    "Tags": "tags",
    "TrainingJobName": "job_name",
    "VpcConfig.SecurityGroupIds": "security_group_ids",
    "VpcConfig.Subnets": "subnets",
}
"""Which key of the launcher's section fills a place of the request, and all places below it."""
_NAMED_BY = ("ChannelName", "Key", "Name")
_TYPES: Mapping[str, tuple[str, Any]] = {
    "string": ("text", str), "integer": ("a whole number", int), "long": ("a whole number", int),
    "boolean": ("true or false", bool), "float": ("a number", (int, float)), "double": ("a number", (int, float)),
    "list": ("a list", (list, tuple)), "map": ("keys and values", dict), "structure": ("keys and values", dict),
}  # fmt: skip
_TYPE = "ResourceConfig.InstanceType"
_LONGEST = 80


@dataclass(frozen=True)
class _Place:
    """Where in the request something is."""

    path: str = ""
    key: str = ""
    """The profile's, with the name of a channel, metric or tag."""

    def member(self, name: str) -> _Place:
        path = f"{self.path}.{name}" if self.path else name
        if path == "Environment":
            return _Place(path, "env")
        return _Place(path, f"launcher.{_KEYS[path]}") if path in _KEYS else replace(self, path=path)

    def item(self, at: object, value: object) -> _Place:
        named = (
            next((value[name] for name in _NAMED_BY if name in value), None)
            if isinstance(value, Mapping)
            else at
        )
        deeper = self.key and isinstance(named, str) and named.isprintable()
        path = f"{self.path}[{at}]" if isinstance(at, int) else f"{self.path}.{at}"
        return replace(self, path=path, key=f"{self.key}.{named}" if deeper else self.key)

    def __str__(self) -> str:
        return f"{self.key} ({self.path})" if self.key else self.path


def check(request: Mapping[str, Any], *, allow_unknown_instance: bool = False) -> None:
    """Refuses a request that SageMaker would refuse.

    Args:
        request: The arguments of CreateTrainingJob.
        allow_unknown_instance: Whether an instance type may be newer than the installed botocore.

    Raises:
        UsageError: Everything that is wrong with it, at once.
    """
    found = problems(request, allow_unknown_instance=allow_unknown_instance)
    if found:
        raise UsageError("\n".join(["SageMaker would refuse this job; nothing was sent:", *found]))


def problems(request: Mapping[str, Any], *, allow_unknown_instance: bool = False) -> list[str]:
    """Everything that SageMaker would refuse in a request: the profile's key, the place, what was expected and came.

    Args:
        request: The arguments of CreateTrainingJob.
        allow_unknown_instance: Whether an instance type may be newer than the installed botocore.

    Raises:
        UsageError: boto3 is not installed.
    """
    shape = model().operation_model("CreateTrainingJob").input_shape
    types = () if allow_unknown_instance else _known(request)
    found = (*_of(shape, request, _Place()), *types, *_together(request))
    return list(dict.fromkeys(f"{place}: {said}" for place, said in found))


def _of(shape: Any, value: Any, place: _Place) -> Iterator[tuple[_Place, str]]:
    """What is wrong with a value and all that is in it; of a kind that is not here, nothing is known."""
    words, kind = _TYPES.get(shape.type_name, ("anything", object))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in {bool, object}):
        yield place, f"expected {words}, got {_shown(place, value)}"
    elif shape.type_name == "structure":
        yield from _structure(shape, value, place)
    elif shape.type_name == "map":
        yield from _size(shape, len(value), place, "entries")
        for key, each in value.items():
            yield from _of(shape.key, key, place.item(key, key))
            yield from _of(shape.value, each, place.item(key, key))
    elif shape.type_name == "list":
        yield from _size(shape, len(value), place, "entries")
        for index, each in enumerate(value):
            yield from _of(shape.member, each, place.item(index, each))
    elif shape.type_name == "string":
        yield from _text(shape, value, place)
    elif kind not in {bool, object}:
        yield from _size(shape, value, place, "")


def _structure(shape: Any, value: Mapping[str, Any], place: _Place) -> Iterator[tuple[_Place, str]]:
    for name in shape.required_members:
        if name not in value:
            yield place.member(name), "this is needed, and nothing says it"
    for name, each in value.items():
        if name in shape.members:
            yield from _of(shape.members[name], each, place.member(name))
        else:
            meant = find_nearest(str(name), list(shape.members))
            hint = f" (did you mean {meant}?)" if meant else ""
            yield place.member(str(name)), f"SageMaker has no such member{hint}"


def _text(shape: Any, value: str, place: _Place) -> Iterator[tuple[_Place, str]]:
    yield from _size(shape, len(value), place, "characters")
    pattern = shape.metadata.get("pattern")
    if shape.enum and value not in shape.enum and place.path != _TYPE:
        meant = find_nearest(value, list(shape.enum))
        hint = f" (did you mean {meant}?)" if meant else ""
        yield place, f"expected {_listed(shape.enum)}, got {_shown(place, value)}{hint}"
    elif pattern and not _compiled(pattern).fullmatch(_classed(value)):
        yield place, f"expected text that matches {pattern}, got {_shown(place, value)}"


def _size(shape: Any, size: float, place: _Place, unit: str) -> Iterator[tuple[_Place, str]]:
    """What is wrong with a number, or with how many there are of something."""
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    what = f"{unit} " if unit else ""
    if least is not None and size < least:
        yield place, f"expected at least {least:,} {what}".rstrip() + f", got {size:,}"
    if most is not None and size > most:
        yield place, f"expected at most {most:,} {what}".rstrip() + f", got {size:,}"


def _together(request: Mapping[str, Any]) -> Iterator[tuple[_Place, str]]:
    """What SageMaker wants beside what its data say."""
    spot = bool(request.get("EnableManagedSpotTraining"))
    stopping, resources = (_mapping(request.get(name)) for name in ("StoppingCondition", "ResourceConfig"))
    run, wait = (stopping.get(f"Max{name}InSeconds") for name in ("Runtime", "WaitTime"))
    place = _Place("StoppingCondition").member("MaxWaitTimeInSeconds")
    if spot and wait is None:
        yield place, "a spot job needs it: seconds for waiting and running together"
    if wait is not None and not spot:
        yield place, "only spot jobs wait; set launcher.spot: true, or leave it out"
    if isinstance(run, int) and isinstance(wait, int) and wait < run:
        yield place, f"expected at least launcher.max_run, {run:,}, since it counts the run too, got {wait:,}"
    if spot and resources.get("KeepAlivePeriodInSeconds"):
        said = "instances of spot jobs cannot be kept; leave out launcher.spot or this"
        yield _Place("ResourceConfig").member("KeepAlivePeriodInSeconds"), said
    yield from _names(request)


def _known(request: Mapping[str, Any]) -> Iterator[tuple[_Place, str]]:
    """What is wrong with the instance type, which may be newer than the data."""
    value, types = _mapping(request.get("ResourceConfig")).get("InstanceType"), known()
    if isinstance(value, str) and value not in types:
        meant = nearby(value, types)
        hint = f" (did you mean {_listed(meant)}?)" if meant else ""
        place = _Place("ResourceConfig").member("InstanceType")
        yield place, f"the installed boto3 knows no such type, got {_shown(place, value)}{hint}"


def _names(request: Mapping[str, Any]) -> Iterator[tuple[_Place, str]]:
    for list_of, named_by in (("InputDataConfig", "ChannelName"), ("Tags", "Key")):
        entries = request.get(list_of)
        seen: set[str] = set()
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            name = str(_mapping(entry).get(named_by))
            place = _Place().member(list_of).item(index, entry)
            if name in seen:
                yield place, "there are two of this name"
            if list_of == "Tags" and name.lower().startswith("aws:"):
                yield place, "names that begin with aws: are AWS's own"
            seen.add(name)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(names: Any) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else str(last)


def _shown(place: _Place, value: object) -> str:
    """A value in a message, which holds no secret."""
    name = re.split(r"[.\[]", place.path)[-1]
    if isinstance(value, Mapping) or is_secret(name):
        return "keys and values" if isinstance(value, Mapping) else "***"
    text = repr(mask_secrets(name, value) if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


# A pattern is Java's, where \p{L} is a letter of any script; Python's has no such class. So any letter that is not
# ASCII becomes one stand-in, which the pattern then names, and the same for separators and digits.
_STAND_INS = {"L": "\ue000", "Z": "\ue001", "N": "\ue002"}
_CLASSES = {r"\p{L}": "a-zA-Z\ue000", r"\p{Z}": " \ue001", r"\p{N}": "0-9\ue002", r"\p{Alnum}": "a-zA-Z0-9"}


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    try:
        return re.compile(pattern, re.ASCII)
    except re.error:
        # A newer botocore may have a class that is not here; SageMaker itself then has the say.
        return re.compile(r"[\s\S]*")


def _classed(value: str) -> str:
    return value if value.isascii() else "".join(map(_stand_in, value))


def _stand_in(letter: str) -> str:
    return letter if letter.isascii() else _STAND_INS.get(unicodedata.category(letter)[0], "\ue003")
