"""The part of the schema of JobSets that the launcher relies on, written from JobSet's API v1alpha2.

The published schema is the CustomResourceDefinition of JobSet, which kubernetes-validate does not contain. This one has the fields
that accel sets, and allows no others. It was compared once with the models of kubeflow-trainer-api 2.3.0. The Job inside
is checked by the published schemas of Kubernetes.
"""

import jsonschema
import kubernetes_validate


def _object(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


_COUNT = {"type": "integer", "minimum": 0}
_REASONS = {"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]}  # fmt: skip
_RULE = _object(
    name={"type": "string", "pattern": r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons={"type": "array", "items": _REASONS, "uniqueItems": True},
)
_REPLICATED = _object(name={"type": "string"}, replicas=_COUNT, template=_object(spec={"type": "object"}))
_SPEC = _object(
    failurePolicy=_object(maxRestarts=_COUNT, rules={"type": "array", "items": _RULE}),
    ttlSecondsAfterFinished=_COUNT,
    replicatedJobs={"type": "array", "items": _REPLICATED},
)
_SPEC["properties"] |= {"suspend": {"type": "boolean"}, "managedBy": {"type": "string"}}  # not required
_SCHEMA = _object(
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata={"type": "object"},
    spec=_SPEC,
)


def find_problem(item):
    """Return why a JobSet is rejected; empty if it is not."""
    for error in jsonschema.Draft202012Validator(_SCHEMA).iter_errors(item):
        return f"{error.json_path}: {error.message}"
    for job in item["spec"]["replicatedJobs"]:
        name = f"{item['metadata']['name']}-{job['name']}-{job['replicas'] - 1}"
        if len(f"{name}-{job['template']['spec']['completions'] - 1}-abcde") > 63:
            return "JobSet name is too long, pod names generated for this JobSet will exceed 63 characters"
        manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **job["template"]}
        try:
            kubernetes_validate.validate(manifest, "1.31", strict=True)
        except kubernetes_validate.ValidationError as error:
            return str(error.message)
    return ""
