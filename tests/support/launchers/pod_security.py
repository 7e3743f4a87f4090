"""The standard `restricted` of Kubernetes, written from https://kubernetes.io/docs/concepts/security/pod-security-standards."""

_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def find_violations(spec):
    """Return what the standard does not allow in the spec of a pod, sorted."""
    pod = spec.get("securityContext", {})
    found = {name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)}
    found |= {f"volume {kind}" for volume in spec["volumes"] for kind in volume.keys() - {"name"} - _VOLUMES}
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        own = container.get("securityContext", {})
        both = {**pod, **own}
        capabilities = own.get("capabilities", {})
        rules = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") in {"RuntimeDefault", "Localhost"},
            "drop ALL": "ALL" in capabilities.get("drop", ()),
            "capabilities": set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", ())),
        }
        found |= {name for name, holds in rules.items() if not holds}
    return sorted(found)
