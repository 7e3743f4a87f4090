"""Fields of the pods of a job that follow from single keys of the profile: the security context, and volumes."""

from __future__ import annotations

from typing import Any

from accel_cli.extensions.kubernetes.section import KubernetesSection

__all__ = ["build_container_security", "build_pod_security", "parse_volume"]


def build_pod_security(section: KubernetesSection) -> dict[str, Any]:
    """Return the security context of the pods; empty if the profile asks for none."""
    user, group = section.user_and_group
    context: dict[str, Any] = {"runAsNonRoot": True} if section.is_restricted else {}
    if user is not None:
        context["runAsUser"] = user
    if group is not None:
        context["fsGroup"] = group
        # A volume with millions of files would take hours otherwise.
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    if section.is_restricted:
        context["seccompProfile"] = {"type": "RuntimeDefault"}
    return {"securityContext": context} if context else {}


def build_container_security(section: KubernetesSection) -> dict[str, Any]:
    """Return the security context of the container that runs accel; empty if it needs none."""
    context: dict[str, Any] = {"allowPrivilegeEscalation": False} if section.is_restricted else {}
    capabilities = {
        **({"drop": ["ALL"]} if section.is_restricted else {}),
        # Cards for RDMA read and write memory that must not be swapped.
        **({"add": ["IPC_LOCK"]} if section.has_rdma else {}),
    }
    if capabilities:
        context["capabilities"] = capabilities
    return {"securityContext": context} if context else {}


def parse_volume(text: str) -> dict[str, Any]:
    """Return the source of a volume, from its form in the profile without `:ro`."""
    if text.startswith("nfs://"):
        server, _, path = text.removeprefix("nfs://").partition("/")
        return {"nfs": {"server": server, "path": f"/{path}"}}
    if text.startswith("csi/"):
        driver, _, query = text.removeprefix("csi/").partition("?")
        attributes = dict(pair.split("=", 1) for pair in query.split("&") if pair)
        return {"csi": {"driver": driver, **({"volumeAttributes": attributes} if attributes else {})}}
    kind, _, value = text.partition(":" if text.startswith("host:") else "/")
    contents: dict[str, dict[str, Any]] = {
        "pvc": {"persistentVolumeClaim": {"claimName": value}},
        "configmap": {"configMap": {"name": value}},
        "secret": {"secret": {"secretName": value}},
        "host": {"hostPath": {"path": value}},
        "emptydir": {"emptyDir": {}},
    }
    return contents[kind]
