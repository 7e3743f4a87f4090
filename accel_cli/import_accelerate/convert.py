"""Making a profile of an Accelerate config file, or every reason why there can be none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from accel_cli.errors import Problem, ProfileError
from accel_cli.import_accelerate.asked import LOCAL, SAGEMAKER, Asked
from accel_cli.import_accelerate.deepspeed import FILE_KEY
from accel_cli.import_accelerate.fates import NOT_SET, Fate
from accel_cli.import_accelerate.jobs import AskedJob
from accel_cli.import_accelerate.keys import CLUSTER, DIVIDING, JOB, Key
from accel_cli.import_accelerate.sections import SECTIONS
from accel_cli.import_accelerate.values import Refused, shown, without_secrets
from accel_cli.planning.network import Endpoint
from accel_cli.profile.schema import Profile
from accel_cli.profile.store import is_accelerate_config
from accel_cli.profile.validation_errors import did_you_mean, explain
from accel_runtime.env import Parallel, SettingsError, find_nearest

__all__ = ["Imported", "convert", "is_accelerate_config"]

Path = tuple[str, ...]
"""The keys that lead to a value."""


@dataclass(frozen=True)
class Imported:
    """A profile made of an Accelerate config file; every key of the file is in `mapped` or in `left`."""

    data: dict[str, Any]
    """The whole profile, its version first."""
    mapped: tuple[tuple[str, str], ...]
    """The keys that took effect, or ask for what accel does anyway: `num_processes: 8`, and what it became."""
    left: tuple[tuple[str, str], ...]
    """The other keys: `fsdp_config.fsdp_version: 2`, and the reason."""


def convert(data: Mapping[str, Any], where: str, deepspeed_file: Mapping[str, Any] | None = None) -> Imported:
    """The profile that says what an Accelerate config file says, as far as this version of accel can.

    Args:
        data: The file, parsed.
        where: What to call it in errors.
        deepspeed_file: What the JSON file says that it names for DeepSpeed, where there is one.

    Raises:
        ProfileError: Everything in it that cannot be understood, or that no profile may say.
    """
    values, problems = _read(data, where)
    form = AskedJob if data.get("compute_environment") == SAGEMAKER else Asked
    values["deepspeed_file"] = deepspeed_file
    asked = form(**{f.name: values[f.name] for f in fields(form) if f.name in values})
    for key, expected, came in _conflicts(asked, data):
        problems.setdefault(key, Problem(where, key, expected, came))
    if problems:
        raise ProfileError(list(problems.values()))
    fates = [(_line(path, value), _fate(asked, path, value)) for path, value in _leaves(data)]
    fates += [(_line((FILE_KEY, *path), value), fate) for path, value, fate in asked.division.of_file()]
    return Imported(
        data=_keep_asked(_checked(asked, where).data(), asked.as_profile()),
        mapped=tuple((line, fate.text) for line, fate in fates if fate.taken),
        left=tuple((line, fate.text) for line, fate in fates if not fate.taken),
    )


def _read(data: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Problem]]:
    """The values that can be understood, and what is wrong with the others."""
    form, other = _forms(data.get("compute_environment"))
    values: dict[str, Any] = {}
    problems: dict[str, Problem] = {}
    for key, raw in data.items():
        if key not in form:
            problems[key] = Problem(
                where, key, "Accelerate does not know this key", hint=_meant(key, form, other)
            )
        elif raw is not None:
            values[key] = form[key].read(raw)
            if isinstance(values[key], Refused):
                refused = values.pop(key)
                problems[key] = Problem(where, key, refused.expected, _came(key, raw), refused.hint)
    return values, problems


def _forms(environment: object) -> tuple[Mapping[str, Key], Mapping[str, Key]]:
    """The keys that a file of this `compute_environment` may have, and those of the other kind of file."""
    return (JOB, CLUSTER) if environment == SAGEMAKER else (CLUSTER, JOB)


def _meant(key: str, form: Mapping[str, Key], other: Mapping[str, Key]) -> str:
    if key in other:
        return f"it belongs to compute_environment: {SAGEMAKER if other is JOB else LOCAL}"
    return did_you_mean(find_nearest(key, list(form)))


def _came(key: str, value: object) -> str:
    return repr(without_secrets(key, value)) if isinstance(value, str) else shown(key, value)


def _conflicts(asked: Asked, data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Keys whose values do not go together: key, what was expected, what came."""
    yield from asked.misread()
    if data.get("distributed_type") is None:
        yield "distributed_type", "every Accelerate config file says one", "nothing"
    if asked.way.tpu and asked.precision == "fp16":
        key = "mixed_precision" if asked.mixed_precision else "fp16"
        yield key, "fp16 is for GPUs, and Accelerate refuses it on a TPU too; use bf16", "fp16"
    if asked.unnamed:
        yield "tpu_env", "expected a list of NAME=VALUE", shown("tpu_env", asked.unnamed[0])
    if asked.use_cpu and asked.way.device not in {"auto", "cpu"}:
        yield "use_cpu", f"this contradicts distributed_type: {asked.distributed_type}", "true"
    yield from _unfit(asked)
    if not asked.spread:
        return
    if asked.main_process_ip is None:
        reason = f"{asked.num_machines} machines (num_machines) need the address of one of them"
        yield "main_process_ip", reason, "nothing"
    elif Endpoint.parse(asked.endpoint).loopback:
        reason = f"expected an address that all of {asked.num_machines} machines (num_machines) reach"
        yield "main_process_ip", reason, asked.main_process_ip
    if asked.main_process_port == 0:
        yield "main_process_port", "several machines need one port that all of them know", "0"
    if asked.num_processes != -1 and asked.num_processes % asked.num_machines:
        reason = f"expected a multiple of num_machines, {asked.num_machines}: accel starts as many on each"
        yield "num_processes", reason, str(asked.num_processes)


def _unfit(asked: Asked) -> Iterator[tuple[str, str, str]]:
    """Sizes that the processes are not as many as."""
    if asked.num_processes == -1 or any(asked.misread()):
        return
    try:
        Parallel(**asked.division.parallel).sizes(asked.num_processes)
    except SettingsError as error:
        yield "parallelism_config", str(error), ""


def _checked(asked: Asked, where: str) -> Profile:
    """The profile, whose values may still be none that a launcher takes."""
    try:
        return Profile.model_validate(asked.as_profile())
    except ValidationError as error:
        places = {key: f"{where}: {said}" for key, said in asked.places.items()}
        raise ProfileError(explain(error, {"": where, **places})) from None


def _keep_asked(data: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile's data without the defaults that the file does not ask for."""
    kept = {key: value for key, value in data.items() if key in {"schema_version", *asked}}
    kept["launcher"] = {key: value for key, value in data["launcher"].items() if key in asked["launcher"]}
    return kept


def _fate(asked: Asked, path: Path, value: Any) -> Fate:
    if len(path) > 1 and path[0] in SECTIONS:
        return SECTIONS[path[0]].fate(path[1], value)
    if len(path) > 1 and path[0] in DIVIDING:
        return asked.division.fate(path, value)
    if value is None:
        return NOT_SET
    if isinstance(asked, AskedJob) and len(path) > 1:
        return asked.argument(path[1:], value)
    key = _forms(asked.compute_environment)[0][path[0]]
    return key.fate(asked, key.read(value))


def _leaves(data: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _line(path: Path, value: object) -> str:
    key = ".".join(path)
    return f"{key}: {shown(key, value)}"
