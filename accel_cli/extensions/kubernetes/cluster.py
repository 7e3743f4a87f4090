"""The connection to a Kubernetes cluster through the official client, and its errors as those of accel."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers.job_service import UnreachableError
from accel_runtime.environment.installation import format_install

__all__ = ["TIMEOUT_S", "KubernetesCluster", "has_kubeconfig"]

TIMEOUT_S = (10, 60)
"""Seconds to connect, and to wait for an answer."""
_CURE = "Check the network, or set launcher.context."
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def has_kubeconfig() -> bool:
    """Return True if there is a kubeconfig file, as the tools of Kubernetes look for it, or this is a pod."""
    paths = os.environ.get("KUBECONFIG") or "~/.kube/config"
    files = [Path(path).expanduser() for path in paths.split(os.pathsep) if path]
    return any(file.is_file() for file in [*files, _POD_NAMESPACE])


class KubernetesCluster:
    """A cluster of the user's kubeconfig, and a namespace in it.

    In a pod without a kubeconfig it is the cluster of the pod, with the credentials of its service account.

    Args:
        context: The context; None takes the current one.
        namespace: The namespace; None takes that of the context, or of the pod.
    """

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        self._context, self._namespace = context, namespace
        try:
            import kubernetes  # noqa: PLC0415 - takes a second
        except ImportError as error:
            raise UsageError(
                f"launcher.kind: kubernetes needs the package kubernetes, which cannot be imported ({error}). Run: "
                f"{format_install('kubernetes', extra='kubernetes')}"
            ) from None
        self._sdk: Any = kubernetes
        # The client logs why a credential plugin failed, and calls the cluster without credentials.
        logging.basicConfig(format="accel: %(message)s")

    @property
    def namespace(self) -> str:
        """The namespace of the profile, else of the context, else `default`."""
        return self._namespace or self._connection[1]

    @cached_property
    def core(self) -> Any:
        """The API of pods, services, ConfigMaps and events."""
        return self._sdk.client.CoreV1Api(self._connection[0])

    @cached_property
    def custom(self) -> Any:
        """The API of all other objects, as plain data: Jobs and TrainJobs."""
        return self._sdk.client.CustomObjectsApi(self._connection[0])

    @cached_property
    def _connection(self) -> tuple[Any, str]:
        """The client, and the namespace of the context."""
        config = self._sdk.config
        configuration = self._sdk.client.Configuration()
        # Repeated by `follow`, with a message of its own.
        configuration.retries = False
        # Not the constant of the client, which takes an empty variable for a path.
        paths = os.environ.get("KUBECONFIG") or "~/.kube/config"
        try:
            merged = config.kube_config.KubeConfigMerger(paths).config
            if merged is None and self._context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
                config.load_incluster_config(client_configuration=configuration)
                namespace = _POD_NAMESPACE.read_text().strip() if _POD_NAMESPACE.exists() else ""
            else:
                config.load_kube_config(paths, context=self._context, client_configuration=configuration)
                loader = config.kube_config.KubeConfigLoader(merged, active_context=self._context)
                namespace = loader.current_context["context"].get("namespace")
        # The others are what the client raises for a file that is no kubeconfig.
        except (
            config.ConfigException,
            yaml.YAMLError,
            OSError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            raise _describe_config_error(error) from error
        return self._sdk.client.ApiClient(configuration), str(namespace or "default")

    @property
    def kubectl(self) -> str:
        """The start of a command of kubectl on this namespace."""
        context = f" --context {shlex.quote(self._context)}" if self._context else ""
        return f"kubectl{context} -n {self.namespace}"

    @property
    def response_error(self) -> Any:
        """The class of errors for answers that are not successful, with the HTTP `status` and the `body`."""
        return self._sdk.client.ApiException

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Turn errors of the client into `UsageError`, or `UnreachableError` if the cluster does not answer.

        `action` follows "Cannot" in the message: `submit the job`.
        """
        import urllib3  # noqa: PLC0415 - a package of the client

        try:
            yield
        except self._sdk.config.ConfigException as error:  # of credentials that are renewed
            raise _describe_config_error(error) from error
        except self.response_error as error:
            raise self._translate_response(error, action) from error
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(
                f"Cannot {action}: the cluster does not answer: {error}. {_CURE}"
            ) from error

    def was_sent(self, error: BaseException) -> bool:
        """Return True if the call that raised a translated error may have had its effect."""
        from urllib3 import exceptions  # noqa: PLC0415 - a package of the client

        unsent = (
            exceptions.ConnectTimeoutError,
            exceptions.NewConnectionError,
            exceptions.LocationValueError,
        )
        return not (isinstance(error, UsageError) or isinstance(error.__cause__, unsent))

    def _translate_response(self, error: Any, action: str) -> AccelError:
        code, message = error.status or 0, _read_message(error)
        if code in {0, HTTPStatus.TOO_MANY_REQUESTS} or code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return UnreachableError(
                f"Cannot {action}: the cluster does not answer: {code} {message}. {_CURE}"
            )
        if code == HTTPStatus.UNAUTHORIZED:
            return UsageError(
                f"Cannot {action}: the cluster rejects the credentials: {message}. Log in again, or set launcher.context."
            )
        if code == HTTPStatus.FORBIDDEN:
            return UsageError(f"Cannot {action}: {message}. Ask an administrator of the cluster.")
        if code == HTTPStatus.NOT_FOUND and "page not found" in str(error.body):
            return UsageError(
                f"Cannot {action}: the cluster has no Kubeflow Trainer 2, or no JobSet. Install it, or set launcher.kubeflow and "
                "launcher.jobset to false for an ordinary Job."
            )
        return UsageError(
            f"Cannot {action}: the cluster rejects it with {code}: {message}. Correct the launcher section of the profile."
        )


def _describe_config_error(error: Exception) -> UsageError:
    text = " ".join(str(error).split()).rstrip(".")
    return UsageError(
        f"Cannot read the kubeconfig: {text}. Set KUBECONFIG or launcher.context; kubectl config get-contexts lists contexts."
    )


def _read_message(error: Any) -> str:
    """Return the message of an answer in one line."""
    try:
        text = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        text = error.reason
    return " ".join(str(text).split()).rstrip(".")
