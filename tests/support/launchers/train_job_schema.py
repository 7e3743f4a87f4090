"""The part of the schema of TrainJobs that the launcher relies on, written from Kubeflow Trainer's API v1alpha1.

The published schema is the CustomResourceDefinition of Trainer, which kubernetes-validate does not contain. This one has the
fields that accel sets, by the names and types of Trainer 2.1 (`podTemplateOverrides`) and of 2.2 and 2.3 (`runtimePatches`),
and allows no others: a real one has more fields. It was compared once with the models of kubeflow-trainer-api 2.1.0 and
2.3.0. Pods, volumes and variables are checked by the published schemas of Kubernetes, as parts of a Job.
"""

import jsonschema
import kubernetes_validate


def _object(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items, most=100):
    return {"type": "array", "items": items, "maxItems": most}


_TEXT, _COUNT, _ANY = {"type": "string"}, {"type": "integer", "minimum": 1}, {"type": "object"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_WORDS = _list({"type": "string", "maxLength": 65536}, 128)


def _pod(**security):
    """Return the parts of a template of pods; `security` is the security context, which 2.1 does not have."""
    container = _object(["name"], name=_TEXT, volumeMounts=_list(_ANY, 128), **security)
    spec = _object(
        serviceAccountName=_TEXT,
        nodeSelector=_TEXTS,
        tolerations=_list(_ANY, 128),
        imagePullSecrets=_list(_ANY, 64),
        volumes=_list(_ANY, 128),
        affinity=_ANY,
        containers=_list(container, 64),
        **security,
    )
    return {"metadata": _object(labels=_TEXTS, annotations=_TEXTS), "spec": spec}


_OVERRIDE = _object(["targetJobs"], targetJobs=_list(_object(["name"], name=_TEXT)), **_pod())
_POD_PATCH = _object(**_pod(securityContext=_ANY))
_REPLICATED = _object(["name"], name=_TEXT, template=_object(spec=_object(template=_POD_PATCH)))
_PATCH = _object(
    ["manager"],
    manager={"type": "string", "pattern": r"^[a-z0-9.-]+/[\w.-]+$"},
    trainingRuntimeSpec=_object(template=_object(spec=_object(replicatedJobs=_list(_REPLICATED)))),
)
_TRAINER = _object(
    image={"type": "string", "maxLength": 500},
    command=_WORDS,
    args=_WORDS,
    env=_list(_ANY, 128),
    numNodes={"type": "integer"},
    numProcPerNode={"type": "integer"},
    resourcesPerNode=_ANY,
)
_VERSIONS = {
    "2.1": {"podTemplateOverrides": _list(_OVERRIDE)},
    "2.2": {"runtimePatches": _list(_PATCH, 16), "activeDeadlineSeconds": _COUNT},
}
_RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}


def _build_schema(version):
    spec = _object(
        ["runtimeRef"],
        runtimeRef=_object(
            ["name"],
            name=_TEXT,
            apiGroup={"const": "trainer.kubeflow.org"},
            kind={"enum": ["ClusterTrainingRuntime", "TrainingRuntime"]},
        ),
        trainer=_TRAINER,
        suspend={"type": "boolean"},
        managedBy={"enum": ["trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue"]},
        **_VERSIONS[version],
    )
    name = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
        kind={"const": "TrainJob"},
        metadata=_object(["name"], name=name, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS),
        spec=spec,
    )


def find_unknown_field(item, version):
    """Return the path of a field that the version does not have; empty if there is none."""
    return next(list_unknown_fields(item, version), "")


def list_unknown_fields(item, version):
    """Yield the paths of fields that the version does not have, one of each object."""
    for error in jsonschema.Draft202012Validator(_build_schema(version)).iter_errors(item):
        if error.validator == "additionalProperties":
            (name, *_) = sorted(error.instance.keys() - error.schema["properties"].keys())
            yield ".".join(map(str, [*error.absolute_path, name]))


def find_problem(item, version):
    """Return why a TrainJob is rejected; empty if it is not."""
    for error in jsonschema.Draft202012Validator(_build_schema(version)).iter_errors(item):
        return f"{error.json_path}: {error.message}"
    name, spec = item["metadata"]["name"], item["spec"]
    if len(f"{name}-node-0-{spec['trainer']['numNodes'] - 1}-abcde") > 63:
        return "JobSet name is too long, pod names generated for this JobSet will exceed 63 characters"
    if reserved := sorted(_RESERVED & {item["name"] for item in spec["trainer"]["env"]}):
        return f"must not have reserved envs, invalid envs configured: {reserved}"
    try:
        kubernetes_validate.validate(_build_job(name, spec), "1.31", strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


def list_pod_patches(spec):
    """Return the changes to the pods of the runtime, in either form."""
    if "podTemplateOverrides" in spec:
        return spec["podTemplateOverrides"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]]


def _build_job(name, spec):
    """Return a Job with what the TrainJob says of pods."""
    (patch,) = list_pod_patches(spec)
    trainer, pod = spec["trainer"], patch["spec"]
    container = {**pod["containers"][0], **{key: trainer[key] for key in ("image", "command", "args", "env")}}
    container["resources"] = trainer.get("resourcesPerNode", {})
    template = {
        "metadata": patch["metadata"],
        "spec": {**pod, "containers": [container], "restartPolicy": "Never"},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template},
    }
