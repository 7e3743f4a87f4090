"""Validation of CreateTrainingJob requests, with the error messages of SageMaker."""

from __future__ import annotations

import functools
import re

import botocore.session

__all__ = ["RefusedError", "check"]

ASSUMED_BY = "sagemaker.amazonaws.com"
_CLASSES = {r"\p{L}": "a-zA-Z\u00aa-\uffff", r"\p{Z}": r"\s", r"\p{N}": r"\d"}


class RefusedError(Exception):
    """An error code and message of SageMaker."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code, self.message = code, message


def check(request, world):
    """Refuse what SageMaker refuses.

    Args:
        said: The request.
        world: What is there: `names`, `role(arn)` -> trust policy or None, `objects(uri)` -> whether there are any,
            `quota(type, spot)` -> instances or None, `used(type)` -> instances.
    """
    problems = list(_problems(_model().operation_model("CreateTrainingJob").input_shape, request, ""))
    if problems:
        count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''} detected: "
        raise RefusedError("ValidationException", count + "; ".join(problems))
    _check_together(request)
    _check_world(request, world)


@functools.cache
def _model():
    return botocore.session.get_session().get_service_model("sagemaker")


def _problems(shape, value, path):  # noqa: C901 - one branch a kind of shape
    if shape.type_name == "structure":
        for name in shape.required_members:
            if value.get(name) is None:
                yield f"Value null at '{_below(path, name)}' failed to satisfy constraint: Member must not be null"
        for name, inner in value.items():
            if name in shape.members and inner is not None:
                yield from _problems(shape.members[name], inner, _below(path, name))
        return
    if shape.type_name == "list":
        for index, inner in enumerate(value, 1):
            yield from _problems(shape.member, inner, f"{path}.{index}.member")
    if shape.type_name == "map":
        for inner, which in [
            *((key, shape.key) for key in value),
            *((text, shape.value) for text in value.values()),
        ]:
            for why in _broken(which, inner):
                word = "keys" if which is shape.key else "value"
                yield f"Value '{_shown(value)}' at '{path}' failed to satisfy constraint: Map {word} must satisfy constraint: [{why}]"
    for why in _broken(shape, value):
        yield f"Value '{_shown(value)}' at '{path}' failed to satisfy constraint: {why}"


def _below(path, name):
    name = name[0].lower() + name[1:]
    return f"{path}.{name}" if path else name


def _shown(value):
    return value if isinstance(value, str) else str(value).replace("'", "")


def _broken(shape, value):
    """Yield the constraints of a shape that a value violates."""
    rules, kind = shape.metadata, shape.type_name
    if kind in {"integer", "long", "float", "double"}:
        if value < rules.get("min", value):
            yield f"Member must have value greater than or equal to {rules['min']}"
        if value > rules.get("max", value):
            yield f"Member must have value less than or equal to {rules['max']}"
        return
    if kind in {"string", "list", "map"}:
        if len(value) < rules.get("min", 0):
            yield f"Member must have length greater than or equal to {rules['min']}"
        if len(value) > rules.get("max", len(value)):
            yield f"Member must have length less than or equal to {rules['max']}"
    if kind != "string":
        return
    if rules.get("enum") and value not in rules["enum"]:
        yield f"Member must satisfy enum value set: [{', '.join(rules['enum'])}]"
    if "pattern" in rules and not _pattern(rules["pattern"]).fullmatch(value):
        yield f"Member must satisfy regular expression pattern: {rules['pattern']}"


@functools.cache
def _pattern(text):
    for java, python in _CLASSES.items():
        text = text.replace(java, python)
    return re.compile(text, re.DOTALL)


def _refuse(message, code="ValidationException"):
    raise RefusedError(code, message)


def _check_together(request):
    algorithm, machines, end = (
        request["AlgorithmSpecification"],
        request.get("ResourceConfig"),
        request.get("StoppingCondition", {}),
    )
    if not machines or not request.get("StoppingCondition"):
        _refuse("ResourceConfig and StoppingCondition are required.")
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        _refuse("You must specify either TrainingImage or AlgorithmName, and not both.")
    spot, longest, wait = (
        request.get("EnableManagedSpotTraining"),
        end.get("MaxRuntimeInSeconds", 86400),
        end.get("MaxWaitTimeInSeconds"),
    )
    if spot and (wait is None or wait < longest):
        _refuse(
            "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds"
        )
    if not spot and wait is not None:
        _refuse("MaxWaitTimeInSeconds cannot be set when EnableManagedSpotTraining is false.")
    if spot and machines.get("KeepAlivePeriodInSeconds"):
        _refuse("KeepAlivePeriodInSeconds cannot be set when EnableManagedSpotTraining is true.")
    names = [channel["ChannelName"] for channel in request.get("InputDataConfig", [])]
    if len(names) != len(set(names)):
        _refuse("Channel names in InputDataConfig must be unique.")


def _check_world(request, world):
    name, role = request["TrainingJobName"], request["RoleArn"]
    if name in world.names():
        _refuse(
            "Training job names must be unique within an AWS account and region, and a training job with this name "
            f"already exists ({world.arn(name)})",
            "ResourceInUse",
        )
    if not _assumable(world.role(role)):
        _refuse(
            f"Could not assume role {role}. Please ensure that the role exists and allows principal '{ASSUMED_BY}' to "
            "assume the role."
        )
    _check_quota(request, world)
    for channel in request.get("InputDataConfig", []):
        uri = channel.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
        if uri and not world.objects(uri):
            bucket = uri.split("/")[2]
            _refuse(
                f'No S3 objects found under S3 URL "{uri}" given in input data source. Please ensure that the bucket '
                f"exists in the selected region ({world.region}), that objects exist under that S3 prefix, and that "
                f'the role "{role}" has "s3:ListBucket" permissions on bucket "{bucket}".'
            )


def _assumable(policy):
    """Return whether a trust policy allows SageMaker."""
    statements = (policy or {}).get("Statement", [])
    for statement in [statements] if isinstance(statements, dict) else statements:
        principal = statement.get("Principal", {})
        services = principal.get("Service", []) if isinstance(principal, dict) else []
        actions = statement.get("Action", [])
        allowed = statement.get("Effect") == "Allow" and "sts:AssumeRole" in (
            [actions] if isinstance(actions, str) else actions
        )
        if allowed and ASSUMED_BY in ([services] if isinstance(services, str) else services):
            return True
    return False


def _check_quota(request, world):
    machines, spot = request["ResourceConfig"], bool(request.get("EnableManagedSpotTraining"))
    kind, count = machines.get("InstanceType"), machines.get("InstanceCount", 0)
    quota, used = world.quota(kind, spot), world.used(kind)
    if quota is not None and used + count > quota:
        _refuse(
            f"The account-level service limit '{kind} for {'spot ' if spot else ''}training job usage' is {quota} "
            f"Instances, with current utilization of {used} Instances and a request delta of {count} Instances. Please "
            "use AWS Service Quotas to request an increase for this quota. If AWS Service Quotas is not available, "
            "contact AWS support to request an increase for this quota.",
            "ResourceLimitExceeded",
        )
