"""The connection to a cluster, from a kubeconfig or in a pod."""

import json
import re

import pytest
import yaml
from kubernetes.client import ApiException

from accel_cli.errors import UsageError
from accel_cli.extensions.kubernetes import cluster as module
from accel_cli.extensions.kubernetes.cluster import KubernetesCluster

CONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [
        {"name": "c", "cluster": {"server": "http://one.example:1"}},
        {"name": "d", "cluster": {"server": "http://two.example:2"}},
    ],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [
        {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
        {"name": "y", "context": {"cluster": "d", "user": "u"}},
    ],
}


@pytest.fixture
def kubeconfig(tmp_path, monkeypatch):
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return path


def connect(**options):
    cluster = KubernetesCluster(**options)
    return cluster.core.api_client.configuration.host, cluster.namespace


def test_the_context_selects_the_cluster_and_its_namespace(kubeconfig):
    kubeconfig.write_text(yaml.safe_dump({**CONFIG, "current-context": "x"}))
    assert connect() == ("http://one.example:1", "team")
    assert connect(context="y") == ("http://two.example:2", "default")
    assert connect(context="y", namespace="mine") == ("http://two.example:2", "mine")
    with pytest.raises(UsageError, match=r"Cannot read the kubeconfig: .*z.*launcher\.context"):
        connect(context="z")


def test_commands_of_kubectl_use_the_same_context_and_namespace(kubeconfig):
    kubeconfig.write_text(yaml.safe_dump({**CONFIG, "current-context": "x"}))
    assert KubernetesCluster().kubectl == "kubectl -n team"
    assert KubernetesCluster(context="y", namespace="mine").kubectl == "kubectl --context y -n mine"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (403, "no such verb", "Cannot list jobs: no such verb. Ask an administrator of the cluster."),
        (
            404,
            'namespaces "x" not found',
            'rejects it with 404: namespaces "x" not found. Correct the launcher',
        ),
        (
            404,
            None,
            "the cluster has no Kubeflow Trainer 2, or no JobSet. Install it, or set launcher.kubeflow",
        ),
    ],
)
def test_an_answer_that_is_an_error_has_a_cure(status, body, message):
    error = ApiException(status=status, reason="Not Found")
    error.body = json.dumps({"message": body}) if body else "404 page not found\n"
    with (
        pytest.raises(UsageError, match=re.escape(message)),
        KubernetesCluster().translate_errors("list jobs"),
    ):
        raise error


def test_a_kubeconfig_without_a_current_context_needs_one(kubeconfig):
    kubeconfig.write_text(yaml.safe_dump(CONFIG))
    assert connect(context="x") == ("http://one.example:1", "team")
    with pytest.raises(UsageError, match="current-context"):
        connect()


def test_several_files_are_merged(kubeconfig, tmp_path, monkeypatch):
    kubeconfig.write_text(
        yaml.safe_dump({**CONFIG, "contexts": CONFIG["contexts"][:1], "current-context": "x"})
    )
    other = tmp_path / "other"
    other.write_text(yaml.safe_dump({**CONFIG, "contexts": CONFIG["contexts"][1:]}))
    monkeypatch.setenv("KUBECONFIG", f"{kubeconfig}:{other}")
    assert connect(context="y") == ("http://two.example:2", "default")


@pytest.mark.parametrize(
    "text", [None, "", "a: [", "just text", "[]", yaml.safe_dump({**CONFIG, "contexts": None})]
)
def test_a_kubeconfig_that_cannot_be_read_is_an_error(text, kubeconfig):
    if text is not None:
        kubeconfig.write_text(text)
    with pytest.raises(UsageError, match=r"Cannot read the kubeconfig: .*Set KUBECONFIG"):
        connect()


def test_in_a_pod_without_a_kubeconfig_the_cluster_is_that_of_the_pod(kubeconfig, tmp_path, monkeypatch):
    from kubernetes.config import incluster_config

    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text("jobs" if name == "namespace" else "x")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(module, "_POD_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    cluster = KubernetesCluster()
    monkeypatch.setattr(cluster._sdk.client, "ApiClient", lambda configuration: configuration)
    configuration, namespace = cluster._connection
    assert (configuration.host, namespace) == ("https://10.0.0.1:443", "jobs")
    kubeconfig.write_text(yaml.safe_dump({**CONFIG, "current-context": "x"}))
    configuration, namespace = KubernetesCluster()._connection
    assert (configuration.host, namespace) == ("http://one.example:1", "team")
