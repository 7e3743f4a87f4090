"""The patch `launcher.pod`: merged into the pods of a job, and checked against the models of the official client."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from accel_cli import console
from accel_cli.console import is_secret
from accel_cli.errors import UsageError
from accel_cli.extensions.kubernetes.section import INSTANCE, MANAGED_BY, OWNER, KubernetesSection
from accel_cli.launchers.patch import PatchRules, merge_patch
from accel_runtime.environment.settings import find_nearest

__all__ = ["SOURCE_VOLUME", "patch_pod"]

SOURCE_VOLUME = "source"
"""The name of the volume with the files of the working folder."""
_ITEM_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    # A volume may be mounted at several paths.
    "volumeMounts": "mountPath",
}
_METADATA = ("labels", "annotations")
"""The metadata of a pod that a template can set."""
_TRAIN_JOB_POD = frozenset({
    "affinity", "containers", "imagePullSecrets", "initContainers", "nodeSelector", "schedulingGates", "securityContext",
    "serviceAccountName", "terminationGracePeriodSeconds", "tolerations", "volumes",
})  # fmt: skip
"""Fields of a pod that a TrainJob of Kubeflow Trainer 2.3 can change; older versions have fewer, as the cluster reports."""
_TRAIN_JOB_CONTAINER = frozenset({"name", "securityContext", "volumeMounts"})
"""The same of the container that runs accel."""
_QUANTITIES = frozenset({"limits", "requests", "sizeLimit", "overhead", "divisor"})
"""Fields whose amounts may be numbers, although the models of the client have text."""
_SCALARS: Mapping[str, tuple[Any, str]] = {"str": (str, "text in quotes"), "int": (int, "a whole number"), "bool": (bool, "true or false"), "float": ((int, float), "a number")}  # fmt: skip
_COLLECTION = re.compile(r"(list|dict)[\[(](?:str, )?(\w+)[\])]", re.IGNORECASE)


def patch_pod(
    section: KubernetesSection, template: Mapping[str, Any], container: str, variables: Iterable[str]
) -> dict[str, Any]:
    """Return the template of the pods with the patch of the profile.

    Args:
        section: The launcher's section.
        template: The metadata and the spec of the pods.
        container: The name of the container that runs accel.
        variables: The names of the variables that the launcher sets in it.

    Raises:
        UsageError: The patch sets what accel sets, or is not valid.
    """
    if not (section.pod or section.affinity):
        return dict(template)
    rules = PatchRules(
        "launcher.pod",
        _ITEM_KEYS,
        frozenset({"tolerations"}),
        _list_reserved(section, container, variables),
    )
    merged: dict[str, Any] = merge_patch(template, section.pod, rules)
    problems = [
        *_find_misplaced(section, merged, container),
        *_find_secrets(merged["spec"]),
        *_find_model_problems(merged),
    ]
    if problems:
        lines = [f"{_name_key(section, path)}: {problem}" for path, problem in problems]
        raise UsageError("\n".join(["The manifest of the pods is not valid; nothing was sent:", *lines]))
    return merged


def _name_key(section: KubernetesSection, path: str) -> str:
    """Return the key of the profile that a member of a pod comes from."""
    if section.affinity and path.startswith(".spec.affinity"):
        return f"launcher{path.removeprefix('.spec')}"
    return f"launcher.pod{path}"


def _list_reserved(section: KubernetesSection, container: str, variables: Iterable[str]) -> dict[str, str]:
    """Return what to do instead of setting a member that the launcher sets, by the path of the member."""
    main = f"spec.containers[{container}]"
    cures = {
        **{f"metadata.labels.{label}": "Use launcher.labels for other labels." for label in (INSTANCE, MANAGED_BY, OWNER)},
        "spec.restartPolicy": "Set launcher.max_restarts.",
        "spec.subdomain": "Remove it.",
        "spec.hostname": "Remove it.",
        "spec.terminationGracePeriodSeconds": "Set launcher.shutdown_timeout.",
        f"spec.volumes[{SOURCE_VOLUME}]": "Set launcher.source: image to send no files.",
        f"{main}.image": "Set launcher.image.",
        f"{main}.command": "Pass another script to accel launch, or use an init container for preparations.",
        f"{main}.args": "Pass the arguments of the script to accel launch.",
        f"{main}.workingDir": "Set launcher.working_dir.",
        f"{main}.terminationMessagePath": "Remove it.",
        **{f"{main}.env[{name}]": "Set env, or the key of the setting, in the profile." for name in variables},
    }  # fmt: skip
    for amounts in ("requests", "limits"):
        for name in {section.gpu_resource, "nvidia.com/gpu", "amd.com/gpu"}:
            cures[f"{main}.resources.{amounts}.{name}"] = "Set launcher.gpus_per_node."
    if section.kubeflow:
        cures.pop("spec.terminationGracePeriodSeconds")  # of the runtime
    return cures


def _find_misplaced(
    section: KubernetesSection, pod: Mapping[str, Any], container: str
) -> Iterator[tuple[str, str]]:
    """Yield the members that a template of pods does not have, or that a TrainJob cannot change."""
    for name in pod:
        if name not in {"metadata", "spec"}:
            yield f".{name}", "unknown member of a pod; expected metadata or spec"
    for name in pod["metadata"]:
        if name not in _METADATA:
            yield f".metadata.{name}", "the pods of a job can have labels and annotations only"
    if not section.kubeflow:
        return
    reason = "a TrainJob cannot set it; set it in its runtime"
    yield from ((f".spec.{name}", reason) for name in pod["spec"] if name not in _TRAIN_JOB_POD)
    for item in pod["spec"]["containers"]:
        for name in item:
            if item["name"] == container and name not in _TRAIN_JOB_CONTAINER:
                yield f".spec.containers[{container}].{name}", reason


def _find_secrets(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the variables of containers that look like secrets and have their value in the manifest."""
    for name in ("containers", "initContainers"):
        for item in spec.get(name) or ():
            for variable in item.get("env") or ():
                if "value" in variable and is_secret(str(variable["name"])):
                    yield (
                        f".spec.{name}[{item['name']}].env[{variable['name']}]",
                        "looks like a secret, and everyone who may read the job would see it; set launcher.secrets, or valueFrom",
                    )


def _find_model_problems(pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield unknown members and values of a wrong type, if the official client is installed."""
    try:
        from kubernetes.client import models  # noqa: PLC0415 - takes a second
    except ImportError:
        console.note(
            "launcher.pod and launcher.affinity were not checked: the package kubernetes is not installed. The cluster checks it."
        )
        return
    yield from _compare(models, pod, "V1PodTemplateSpec", "")


def _compare(models: Any, value: Any, type_name: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield the differences between a value and a type of the client."""
    if collection := _COLLECTION.fullmatch(type_name):
        yield from _compare_items(models, value, collection[1].lower() == "list", collection[2], path)
    elif type_name in _SCALARS:
        expected, kind = _SCALARS[type_name]
        if not isinstance(value, expected) or (type_name == "int" and isinstance(value, bool)):
            yield path, f"expected {kind}, got {value!r}"
    elif model := getattr(models, type_name, None):  # else `object`: a number or text
        yield from _compare_members(models, value, model, path)


def _compare_items(
    models: Any, value: Any, is_list: bool, type_name: str, path: str
) -> Iterator[tuple[str, str]]:
    """Yield the differences of the items of a list or a mapping."""
    if not isinstance(value, list if is_list else Mapping):
        yield path, f"expected {'a list' if is_list else 'keys and values'}, got {value!r}"
        return
    items: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list) else value.items()
    for key, item in items:
        if not _is_amount(path, item):
            yield from _compare(
                models, item, type_name, _index(path, key, item) if is_list else f"{path}.{key}"
            )


def _compare_members(models: Any, value: Any, model: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the differences of the members of an object."""
    if not isinstance(value, Mapping):
        yield path, f"expected keys and values, got {value!r}"
        return
    types = {model.attribute_map[name]: each for name, each in model.openapi_types.items()}
    for name, item in value.items():
        inner = f"{path}.{name}"
        if name not in types:
            nearest = find_nearest(str(name), list(types))
            yield inner, f"unknown member{f'; did you mean {nearest}?' if nearest else ''}"
        elif not _is_amount(inner, item):
            yield from _compare(models, item, types[name], inner)


def _is_amount(path: str, value: Any) -> bool:
    """Return True for a number where the models of the client have text, and Kubernetes takes both."""
    return isinstance(value, (int, float)) and path.rpartition(".")[2] in _QUANTITIES


def _index(path: str, number: int, item: Any) -> str:
    """Return the path of an item of a list: by its name if that identifies it."""
    key = _ITEM_KEYS.get(path.rpartition(".")[2])
    return f"{path}[{item[key] if key and isinstance(item, Mapping) and key in item else number}]"
