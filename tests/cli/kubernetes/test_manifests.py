"""The kubernetes launcher: plans and manifests, checked against golden files and the published schemas."""

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

import golden
import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import run
from pydantic import ValidationError

from accel_cli.errors import UsageError
from accel_cli.kubernetes import manifests
from accel_cli.kubernetes.config import Kubernetes
from accel_cli.launchers.base import LaunchSpec
from accel_cli.planning.machine import Machine
from accel_runtime.env import Settings

ROOT = Path(__file__).parents[3]
EVERYTHING = Kubernetes(
    image="registry.example.com/accel:cuda",
    nnodes=2,
    gpus_per_node=4,
    namespace="team",
    gpu_resource="amd.com/gpu",
    resources={"cpu": 8, "memory": "64Gi"},
    shared_memory="16Gi",
    volumes={"/data": "pvc/data:ro", "/etc/run": "configmap/run", "/keys": "secret/keys", "/disk": "host:/mnt", "/scratch": "emptydir"},
    service_account="trainer",
    node_selector={"pool": "training"},
    tolerations=["amd.com/gpu", "pool=training:NoExecute"],
    image_pull_secrets=["registry"],
    priority_class="high",
    labels={"kueue.x-k8s.io/queue-name": "training"},
    secrets={"WANDB_API_KEY": "wandb/key"},
    job_name="My run",
    time=3600,
    max_restarts=3,
    stall_timeout=600,
)  # fmt: skip
SECTIONS = {
    "one-node": Kubernetes(image="accel:cpu"),
    "everything": EVERYTHING,
    "in-the-image": Kubernetes(image="accel:cpu", source="image", working_dir="/app", nnodes=2),
}


@pytest.fixture(autouse=True)
def _files(cwd):
    (cwd / "train.py").write_text("pass")


def plan(section, *args, target="train.py", kind="script", env=None, **options):
    spec = LaunchSpec(target, args, kind, Settings(**options), env or {}, {}, Machine(2), python="python")
    return section.plan(spec)


def render(section, *args, archive=b"files", **options):
    job = plan(section, *args, **options).job
    return manifests.render(job, "my-run-x7k2p", "ann", archive if job.cwd is not None else None)


@pytest.mark.parametrize("name", SECTIONS)
def test_manifests_are_those_of_their_golden_file_and_of_the_published_schemas(name):
    rendered = render(SECTIONS[name], "--lr", "1", mixed_precision="bf16")
    golden.check(f"kubernetes/{name}.yaml", yaml.safe_dump_all(rendered, sort_keys=False))
    for manifest in rendered:
        for version in ("1.27", "1.31", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_manifest_with_an_unknown_key_is_refused_by_the_schemas():
    job = render(EVERYTHING)[-1]
    job["spec"]["template"]["spec"]["sub_domain"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_the_option_for_kubectl_prints_documents_with_the_files(cwd, capfd):
    (cwd / "lib").mkdir()
    (cwd / "lib" / "model.py").write_text("x = 1\n")
    (cwd / "key.pem").write_text("secret")
    done = run(capfd, "launch", "--set", "launcher.kind=kubernetes", "--set", "launcher.image=i", "--nnodes", "2",
               "--manifest", "train.py", "two\nlines", "no", "$(HOME)")  # fmt: skip
    assert done.returncode == 0, done.stderr
    service, config, job = yaml.safe_load_all(done.stdout)
    assert [item["kind"] for item in (service, config, job)] == ["Service", "ConfigMap", "Job"]
    with tarfile.open(fileobj=io.BytesIO(_decode(config["binaryData"]["source.tar.gz"]))) as archive:
        assert sorted(archive.getnames()) == ["lib/model.py", "train.py"]
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-4:] == ["train.py", "two\nlines", "no", "$$(HOME)"]
    assert "key.pem" in done.stderr


def _decode(text):
    import base64

    return base64.b64decode(text)


def test_the_script_runs_in_the_folder_of_the_launch(cwd, monkeypatch):
    (cwd / "a b").mkdir()
    (cwd / "a b" / "x.py").write_text("")
    monkeypatch.chdir(cwd / "a b")
    section = Kubernetes(image="i", source_dir="..")
    for target in ("x.py", str(cwd / "a b" / "x.py")):
        job = plan(section, target=target).job
        assert (job.cwd, job.needed, job.args[-1]) == ("a b", "a b/x.py", "x.py")
    assert (
        "\ncd 'a b'\n"
        in render(section, target="x.py")[-1]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    )
    with pytest.raises(UsageError, match=r"The current directory is not in .*launcher\.source: image"):
        plan(Kubernetes(image="i", source_dir=str(cwd / "other")))


def test_files_that_do_not_fit_a_config_map_are_an_error(cwd):
    (cwd / "data.bin").write_bytes(os.urandom(1 << 20))
    with pytest.raises(
        UsageError, match=r"carries at most 1 MiB\. The largest are data\.bin .*launcher\.source: image"
    ):
        manifests.read_source(plan(Kubernetes(image="i")).job)
    assert manifests.read_source(plan(Kubernetes(image="i", exclude=["data.bin"])).job)
    with pytest.raises(UsageError, match=r"train\.py is needed, but is not sent"):
        manifests.read_source(plan(Kubernetes(image="i", exclude=["*.py", "data.bin"])).job)


def test_nothing_is_needed_to_plan_what_is_in_the_image(monkeypatch):
    monkeypatch.setattr(manifests, "find_spec", lambda _: None)
    assert manifests.preview(plan(SECTIONS["in-the-image"]).job).startswith("apiVersion")
    with pytest.raises(UsageError, match=r"accel-runtime\[kubernetes\]"):
        manifests.read_source(plan(Kubernetes(image="i")).job)


@pytest.mark.parametrize("base", ["My run", "train_v2", "2nd", "-", "ü", "x" * 80, "a-" * 40])
def test_names_are_those_of_dns(base):
    names = {manifests.name_job(base) for _ in range(3)}
    assert len(names) == 3
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,55}[a-z0-9])", name) and len(name) <= 57 for name in names)


@settings(max_examples=100)
@given(st.text(st.sampled_from("$()aB\n ")))
def test_kubernetes_leaves_an_escaped_text_as_it_was(text):
    variables = {"a": "REPLACED", "B": "REPLACED"}
    # As in k8s.io/kubernetes/third_party/forked/golang/expansion.
    expanded = re.sub(r"\$\$|\$\(([^)]*)\)", lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]),
                      manifests._escape(text))  # fmt: skip
    assert expanded == text


def test_what_only_a_cluster_or_a_secret_may_have_is_refused():
    with pytest.raises(UsageError, match=r"No image is set"):
        plan(Kubernetes())
    with pytest.raises(
        UsageError, match=r"env\.API_KEY looks like a secret.*launcher\.secrets=\{API_KEY: NAME/KEY\}"
    ):
        plan(Kubernetes(image="i"), env={"API_KEY": "x"})
    with pytest.raises(UsageError, match=r"TOKEN is in both"):
        plan(Kubernetes(image="i", secrets={"TOKEN": "a/b"}), env={"TOKEN": "x"})
    with pytest.raises(UsageError, match=r"requests 1 GPU"):
        plan(Kubernetes(image="i", gpus_per_node=1, nproc_per_node=2))
    with pytest.raises(UsageError, match="not valid UTF-8"):
        plan(Kubernetes(image="i"), "\udcff")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("namespace", "My team", "expected a name of lower-case"),
        ("image", "a b", "expected text without spaces"),
        ("gpu_resource", "gpu", "expected a resource such as nvidia.com/gpu"),
        ("resources", {"memory": "64 GB"}, "expected resources such as"),
        ("volumes", {"data": "pvc/x"}, "expected a mount path"),
        ("volumes", {"/data": "nfs/x"}, "expected a mount path"),
        ("tolerations", ["a:Never"], "expected KEY, KEY:EFFECT"),
        ("secrets", {"TOKEN": "value"}, "expected variables with NAME/KEY"),
        ("labels", {"a": "two words"}, "expected labels"),
        ("shared_memory", "16 GB", "expected a size"),
        ("working_dir", "app", "expected an absolute path"),
        ("kubeflow", True, "Extra inputs"),
    ],
)
def test_an_invalid_value_is_an_error(key, value, message):
    with pytest.raises(ValidationError, match=message):
        Kubernetes(**{key: value})


def test_pods_without_a_common_volume_do_not_share_files():
    def shares(**options):
        return plan(Kubernetes(image="i", **options)).job.env["ACCEL_SHARED_FILES"]

    assert shares() == "1"
    assert shares(nnodes=2, volumes={"/x": "emptydir"}) == "0"
    assert shares(nnodes=2, volumes={"/x": "pvc/x"}) == "1"


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_dockerfile_copies_what_an_installation_needs(name, tmp_path):
    lines = (ROOT / "docs" / "docker" / f"Dockerfile.{name}").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / path).exists() for path in copied)
    built = subprocess.run(["git", "check-ignore", *copied], cwd=ROOT, capture_output=True, check=False)
    assert not built.stdout
    assert {"pyproject.toml", "README.md", "LICENSE", "accel_cli", "accel_runtime"} <= set(copied)
