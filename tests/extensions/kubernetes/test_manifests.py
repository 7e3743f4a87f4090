"""The kubernetes launcher: plans and manifests, checked against golden files and the published schemas."""

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.cases import golden
from support.launchers import job_set_schema, train_job_schema
from support.launchers.launch_specs import build_spec
from support.processes.commands import call_accel

from accel_cli.errors import UsageError
from accel_cli.extensions.kubernetes import manifests
from accel_cli.extensions.kubernetes.launcher import Kubernetes
from accel_cli.launchers import job_service as base
from accel_cli.profile.planner import build_plan

ROOT = Path(__file__).parents[3]
EVERYTHING = Kubernetes(
    image="registry.example.com/accel:cuda",
    nnodes=2,
    gpus_per_node=4,
    namespace="team",
    gpu_resource="amd.com/gpu",
    resources={"cpu": 8, "memory": "64Gi"},
    shared_memory="16Gi",
    volumes={
        "/data": "pvc/data:ro", "/etc/run": "configmap/run", "/keys": "secret/keys", "/disk": "host:/mnt", "/scratch": "emptydir",
        "/home": "nfs://files.example.com/export/home:ro", "/bucket": "csi/gcsfuse.csi.storage.gke.io?bucketName=b&mountOptions=a,b",
    },
    affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": []}]}}},
    annotations={"sidecar.istio.io/inject": "false"},
    service_account="trainer",
    node_selector={"pool": "training"},
    tolerations=["amd.com/gpu", "pool=training:NoExecute"],
    image_pull_secrets=["registry"],
    priority_class="high",
    labels={"kueue.x-k8s.io/queue-name": "training"},
    secrets={"WANDB_API_KEY": "wandb/key"},
    job_name="My run",
    time=3600,
    suspend=True,
    max_restarts=3,
    stall_timeout=600,
)  # fmt: skip
KUBEFLOW = EVERYTHING.model_copy(
    update={"kubeflow": True, "priority_class": None, "managed_by": "kueue.x-k8s.io/multikueue"}
)
PATCH = {
    "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
    "spec": {
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "volumes": [{"name": "cache", "nfs": {"server": "files", "path": "/cache"}}],
        "containers": [
            {
                "name": "accel",
                "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                "volumeMounts": [
                    {"name": "cache", "mountPath": "/cache"},
                    {"mountPath": "/dev/shm", "$patch": "delete"},  # noqa: S108 - not a file
                ],
                "resources": {"requests": {"cpu": 2}},
            },
            {"name": "proxy", "image": "proxy:1"},
        ],
    },
}  # fmt: skip
SECTIONS = {
    "patched": Kubernetes(image="accel:cpu", source="image", tolerations=["gpu"], gpus_per_node=1, pod=PATCH),
    "kubeflow-patched": Kubernetes(
        image="accel:cpu",
        source="image",
        kubeflow=True,
        pod={
            "metadata": {"annotations": {"a": "b"}},
            "spec": {
                "affinity": {"podAntiAffinity": {}},
                "containers": [{"name": "node", "securityContext": {"runAsUser": 7}}],
            },
        },
    ),
    "one-node": Kubernetes(image="accel:cpu"),
    "everything": EVERYTHING,
    "in-the-image": Kubernetes(
        image="accel:cpu",
        image_pull_policy="Always",
        source="image",
        working_dir="/app",
        nnodes=2,
        pod_security="none",
        fs_group=100,
        scheduler_name="volcano",
        runtime_class="nvidia",
    ),
    "jobset": Kubernetes(image="accel:cpu", jobset=True, nnodes=2, time=600),
    "rdma": Kubernetes(
        image="accel:cuda", source="image", gpus_per_node=8, resources={"vpc.amazonaws.com/efa": 32}
    ),
    "kubeflow": KUBEFLOW,
    "kubeflow-2.1": Kubernetes(
        image="accel:cpu", kubeflow=True, runtime="TrainingRuntime/team", trainer_version="2.1", nnodes=2
    ),
}


@pytest.fixture(autouse=True)
def _files(cwd):
    (cwd / "train.py").write_text("pass")


def plan(section, *args, **options):
    return build_plan(section, build_spec(*args, **options))


def render(section, *args, archive=b"files", **options):
    job = plan(section, *args, **options).job
    return manifests.render(job, "my-run-x7k2p", "ann", archive if job.sent else None)


@pytest.mark.smoke
@pytest.mark.parametrize("name", SECTIONS)
def test_manifests_are_those_of_their_golden_file_and_of_the_published_schemas(name):
    rendered = render(SECTIONS[name], "--lr", "1", mixed_precision="bf16")
    golden.check(f"kubernetes/{name}.yaml", yaml.safe_dump_all(rendered, sort_keys=False))
    for manifest in rendered:
        if manifest["kind"] == "TrainJob":
            version = SECTIONS[name].trainer_version
            assert train_job_schema.find_unknown_field(manifest, version) == ""
            assert train_job_schema.find_problem(manifest, version) == ""
            continue
        if manifest["kind"] == "JobSet":
            assert job_set_schema.find_problem(manifest) == ""
            continue
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
    done = call_accel(capfd, "launch", "--set", "launcher.kind=kubernetes", "--set", "launcher.image=i", "--nnodes", "2",
               "--manifest", "train.py", "two\nlines", "no", "$(HOME)")  # fmt: skip
    assert done.returncode == 0, done.stderr
    service, config, job = yaml.safe_load_all(done.stdout)
    assert [item["kind"] for item in (service, config, job)] == ["Service", "ConfigMap", "Job"]
    with tarfile.open(fileobj=io.BytesIO(_decode(config["binaryData"]["source.tar.gz"]))) as archive:
        assert sorted(archive.getnames()) == ["lib/model.py", "train.py"]
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-4:] == ["train.py", "two\nlines", "no", "$$(HOME)"]
    assert "key.pem" in done.stderr


class GoLoader(yaml.SafeLoader):
    """Reads plain scalars that only kubectl takes for a number or a truth value as None."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in PyYAML
        first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_GO_NUMBER = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?0[oxb][0-9a-fA-F_]+\Z|[yYnN]\Z"
GoLoader.add_implicit_resolver("!go", re.compile(_GO_NUMBER), [*"-+.0123456789yYnN"])
GoLoader.add_constructor("!go", lambda *_: None)


@settings(deadline=None)
@given(
    st.text(alphabet="0123456789.eExob_+-ynYN:", max_size=8)
    | st.sampled_from(["012345678901", "1e-3", "1234567e8"])
)
def test_arguments_and_variables_are_text_for_kubectl(text):
    job = plan(Kubernetes(image="i", source="image"), text, env={"A": text}).job
    pod = yaml.load(job.preview(), Loader=GoLoader)["spec"]["template"]["spec"]  # noqa: S506 - a safe loader
    (container,) = pod["containers"]
    assert container["args"][-1] == text
    assert {"name": "A", "value": text} in container["env"]


def _decode(text):
    import base64

    return base64.b64decode(text)


def test_the_script_runs_in_the_folder_of_the_launch(cwd, monkeypatch):
    (cwd / "a b").mkdir()
    monkeypatch.chdir(cwd / "a b")
    (container,) = render(Kubernetes(image="i", source_dir=".."))[-1]["spec"]["template"]["spec"][
        "containers"
    ]
    assert "\ncd 'a b'\n" in container["command"][2]


def test_files_that_do_not_fit_a_config_map_are_an_error(cwd):
    (cwd / "data.txt").write_bytes(os.urandom(1 << 20))
    with pytest.raises(
        UsageError, match=r"carries at most 1 MiB\. The largest are data\.txt .*launcher\.source: image"
    ):
        manifests.read_source(plan(Kubernetes(image="i")).job)
    archive, selection = manifests.read_source(plan(Kubernetes(image="i", exclude=["data.txt"])).job)
    assert (bool(archive), [file.name for file in selection.files]) == (True, ["train.py"])


def test_nothing_is_needed_to_plan_what_is_in_the_image(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert plan(SECTIONS["in-the-image"]).job.preview().startswith("apiVersion")


@pytest.mark.parametrize(
    ("config", "reason"),
    [(None, "no kubeconfig here"), ("", "needs the package kubernetes")],
)
def test_a_dry_run_without_a_connection_shows_the_manifests_and_that_they_were_not_checked(
    config, reason, cwd, capfd, monkeypatch
):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setenv("KUBECONFIG", str(cwd / "kubeconfig"))
    if config is not None:
        (cwd / "kubeconfig").write_text(config)
    words = ("launch", "--set", "launcher.kind=kubernetes", "--set", "launcher.image=i", "train.py")
    for option in ("--dry-run", "--manifest"):
        done = call_accel(capfd, words[0], option, *words[1:])
        assert (done.returncode, "kind: Job" in done.stdout) == (0, True), done.stderr
        assert ("the manifest is not checked by the cluster" in done.stderr) == (option == "--dry-run")
        assert reason in done.stderr or option == "--manifest"


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
    for options in ({"env": {"PET_NNODES": "3"}}, {"env": {"ACCEL_FAILURE_FILE": "/x"}}):
        with pytest.raises(UsageError, match=r"the launcher sets it in every pod"):
            plan(Kubernetes(image="i"), **options)
    with pytest.raises(UsageError, match=r"requests 1 GPU"):
        plan(Kubernetes(image="i", gpus_per_node=1, nproc_per_node=2))
    with pytest.raises(UsageError, match="not valid UTF-8"):
        plan(Kubernetes(image="i"), "\udcff")


@pytest.mark.parametrize(
    "options",
    [
        {"resources": {"nvidia.com/gpu": 8, "cpu": 4}},
        {"resources": {"amd.com/gpu": "8"}},
        {"resources": {"example.com/chip": 8}, "gpu_resource": "example.com/chip"},
        {"gpus_per_node": 8},
    ],
)
def test_one_process_is_started_for_each_gpu_of_the_resources(options):
    planned = plan(Kubernetes(image="i", **options))
    assert (planned.nproc_per_node, planned.device) == (8, "GPU")
    (container,) = render(Kubernetes(image="i", **options))[-1]["spec"]["template"]["spec"]["containers"]
    assert "launcher.nproc_per_node=8" in container["args"]
    assert [amount for name, amount in container["resources"]["limits"].items() if "/" in name] == ["8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resources": {"nvidia.com/gpu": 8}, "gpus_per_node": 8}, "cannot contain nvidia.com/gpu beside gpus_per_node"),
        ({"resources": {"nvidia.com/gpu": 8, "amd.com/gpu": 1}}, "cannot contain nvidia.com/gpu beside amd.com/gpu"),
        ({"resources": {"nvidia.com/gpu": "500m"}}, "expected a whole number for nvidia.com/gpu, got 500m"),
        ({"resources": {"google.com/tpu": 4}}, r"cannot contain google.com/tpu.*launcher.kind: xla"),
        ({"gpu_resource": "google.com/tpu", "gpus_per_node": 4}, r"cannot contain google.com/tpu"),
        ({"resources": {"nvidia.com/mig-1g.5gb": 2}}, r"set gpu_resource: nvidia.com/mig-1g.5gb and gpus_per_node"),
        ({"resources": {"habana.ai/gaudi": 8}}, r"cannot count processes from habana.ai/gaudi"),
    ],
)  # fmt: skip
def test_accelerators_that_cannot_be_counted_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        Kubernetes(image="i", **options)


def test_accelerators_are_not_counted_if_the_number_of_processes_is_given():
    section = Kubernetes(image="i", resources={"habana.ai/gaudi": 8}, nproc_per_node=8)
    assert plan(section).nproc_per_node == 8


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("namespace", "My team", "expected a name of lower-case"),
        ("image", "a b", "expected text without spaces"),
        ("gpu_resource", "gpu", "expected a resource such as nvidia.com/gpu"),
        ("volumes", {"data": "pvc/x"}, "expected a mount path"),
        ("volumes", {"/data": "nfs/x"}, "expected a mount path"),
        ("volumes", {"/data": "nfs://server"}, "expected a mount path"),
        ("volumes", {"/data": "csi/driver?bucket"}, "expected a mount path"),
        ("tolerations", ["a:Never"], "expected KEY, KEY:EFFECT"),
        ("secrets", {"TOKEN": "value"}, "expected variables with NAME/KEY"),
        ("working_dir", "app", "expected an absolute path"),
        ("ttl", 0, "greater than or equal to 60"),
        ("labels", {"accel-user": "bob"}, "expected labels other than accel-user, which accel sets"),
        ("trainer_version", 2.0, "Input should be"),
        ("runtime", "Other/x", "expected a name such as torch-distributed"),
    ],
)
def test_an_invalid_value_is_an_error(key, value, message):
    with pytest.raises(ValidationError, match=message):
        Kubernetes(**{"source": "image", key: value})


RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def find_violations(spec):
    """Return what the standard `restricted` of Kubernetes does not allow in the spec of a pod, sorted.

    Written from https://kubernetes.io/docs/concepts/security/pod-security-standards.
    """
    pod = spec.get("securityContext", {})
    found = {name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)}
    found |= {
        f"volume {kind}"
        for volume in spec["volumes"]
        for kind in volume.keys() - {"name"} - RESTRICTED_VOLUMES
    }
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


@pytest.mark.parametrize(
    ("options", "violations"),
    [
        ({}, []),
        ({"kubeflow": True}, []),
        ({"run_as_user": 7, "fs_group": 8, "volumes": {"/a": "pvc/a", "/b": "csi/d?x=y"}}, []),
        ({"volumes": {"/a": "nfs://s/x", "/b": "host:/x"}}, ["volume hostPath", "volume nfs"]),
        (
            {"pod_security": "none"},
            ["allowPrivilegeEscalation", "drop ALL", "runAsNonRoot", "seccompProfile"],
        ),
        ({"pod_security": "restricted", "resources": {"rdma/hca": 1}}, ["capabilities"]),
        ({"pod": {"spec": {"hostNetwork": True}}}, ["hostNetwork"]),
    ],
)
def test_pods_satisfy_the_standard_restricted_unless_the_profile_asks_for_more(options, violations):
    job = render(Kubernetes(image="i", nnodes=2, **options))[-1]
    if job["kind"] == "TrainJob":
        (template,) = train_job_schema.list_pod_patches(job["spec"])
    else:
        template = job["spec"]["template"]
    assert find_violations(template["spec"]) == violations


def test_rdma_locks_memory_as_root_unless_the_profile_chooses_a_user():
    def security(**options):
        spec = render(Kubernetes(image="i", resources={"rdma/hca": 1}, **options))[-1]["spec"]["template"][
            "spec"
        ]
        return spec.get("securityContext"), spec["containers"][0]["securityContext"]

    assert security() == (None, {"capabilities": {"add": ["IPC_LOCK"]}})
    assert security(run_as_user=5)[0] == {"runAsUser": 5}


def test_a_user_without_a_home_gets_one_where_it_can_write():
    def script(**options):
        return render(Kubernetes(image="i", **options))[-1]["spec"]["template"]["spec"]["containers"][0][
            "command"
        ][2]

    (line,) = [line for line in script().splitlines() if "HOME" in line]
    shell = ["sh", "-c", f'{line}\nprintf "%s %s" "$HOME" "$LOGNAME"']
    for home, shown in (("/nonexistent", "/tmp accel"), (str(Path.cwd()), f"{Path.cwd()} ")):  # noqa: S108 - of the container
        done = subprocess.run(
            shell, env={"PATH": os.environ["PATH"], "HOME": home}, capture_output=True, text=True, check=True
        )
        assert done.stdout == shown
    assert "HOME" not in script(pod_security="none")


MAIN = {"name": "accel"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"containers": [{"name": "b", "env": [{"name": "API_KEY", "value": "s3cret"}]}]}, r"env\[API_KEY\]: it looks like a secret"),
        ({"restartPolicy": "Always"}, r"Cannot set launcher\.pod\.spec\.restartPolicy.*Set launcher\.max_restarts"),
        ({"containers": [{**MAIN, "command": ["sh"]}]}, r"Cannot set .*containers\[accel\]\.command"),
        ({"containers": [{**MAIN, "env": [{"name": "PET_NODE_RANK", "value": "0"}]}]}, r"Cannot set .*env\[PET_NODE_RANK\]"),
        ({"containers": [{**MAIN, "env": [{"name": "ACCEL_DEVICE", "value": "cpu"}]}]}, r"Cannot set .*env\[ACCEL_DEVICE\]"),
        ({"containers": [{**MAIN, "resources": {"limits": {"nvidia.com/gpu": 8}}}]}, r"Set launcher\.gpus_per_node"),
        ({"containers": [{**MAIN, "resources": None}]}, r"Cannot set .*resources"),
    ],
)  # fmt: skip
def test_a_patch_that_contradicts_accel_or_has_a_secret_is_an_error_with_its_path(spec, message):
    with pytest.raises(UsageError, match=message) as caught:
        render(Kubernetes(image="i", source="image", pod={"spec": spec}))
    assert "s3cret" not in str(caught.value)


def test_the_metadata_of_pods_keep_the_labels_of_accel_and_have_no_name_of_their_own():
    for metadata, message in (
        ({"name": "x"}, r"launcher\.pod\.metadata\.name: .*Set launcher\.job_name"),
        ({"labels": {"accel-user": "x"}}, r"Use launcher\.labels"),
    ):
        with pytest.raises(UsageError, match=message):
            render(Kubernetes(image="i", pod={"metadata": metadata}))


def test_a_patch_of_a_train_job_changes_its_trainer_and_the_pods_of_its_runtime():
    container = {"name": "node", "env": [{"name": "A", "value": "1"}], "volumeMounts": [], "tty": True}
    section = Kubernetes(image="i", kubeflow=True, source="image", pod={"spec": {"containers": [container]}})
    (job,) = render(section)
    assert {"name": "A", "value": "1"} in job["spec"]["trainer"]["env"]
    (pods,) = train_job_schema.list_pod_patches(job["spec"])
    (changed,) = pods["spec"]["containers"]
    assert changed.keys() == {"name", "securityContext", "volumeMounts", "tty"}
    assert train_job_schema.find_unknown_field(job, "2.2").endswith("spec.containers.0.tty")


TRAINER_PODS = (
    "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template"
)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ('unknown field "spec.template.spec.hostnam"', 'unknown field "launcher.pod.spec.hostnam"'),
        ('unknown field "spec.replicatedJobs[0].template.spec.template.spec.affinity.podAffinit"', 'unknown field "launcher.affinity.podAffinit"'),
        (f'unknown field "{TRAINER_PODS}.spec.priorityClassName"', 'unknown field "launcher.priority_class"'),
        ("does not know spec.podTemplateOverrides[0].spec.hostnam", "does not know launcher.pod.spec.hostnam"),
        ('Job.batch "x" is invalid: spec.template.metadata.labels: Invalid value: "two words"',
         'Job.batch "x" is invalid: launcher.pod.metadata.labels: Invalid value: "two words"'),
        ('Job.batch "x" is invalid: spec.template.spec.containers[0].image: Required value', None),
        ("spec.replicatedJobs[0].template.spec.completions: Invalid value", None),
        ("does not know spec.runtimePatches", None),
    ],
)  # fmt: skip
def test_a_message_of_the_cluster_has_the_keys_of_the_profile(message, shown):
    section = Kubernetes(pod={"metadata": {"labels": {"a": "two words"}}, "spec": {"hostnam": "x"}})
    assert manifests.name_keys(section, message) == (shown or message)


def test_pods_without_a_common_volume_do_not_share_files():
    def shares(**options):
        return plan(Kubernetes(image="i", **options)).job.env["ACCEL_SHARED_FILES"]

    assert shares() == "1"
    assert shares(nnodes=2, volumes={"/x": "pvc/x"}) == "1"
    assert shares(nnodes=2, volumes={"/x": "nfs://s/x"}) == "1"
    for volume in (
        "emptydir",
        "pvc/x:ro",
        "nfs://s/x:ro",
        "csi/d?a=b",
        "host:/mnt",
        "host:/mnt:ro",
        "configmap/x",
        "secret/x",
    ):
        assert shares(nnodes=2, volumes={"/x": volume}) == "0", volume
    assert shares(nnodes=2, volumes={"/data": "pvc/data:ro", "/runs": "pvc/runs"}) == "1"
    assert shares(volumes={"/x": "host:/mnt:ro"}) == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kubeflow": True, "jobset": True}, "jobset: Kubeflow Trainer makes a JobSet of a TrainJob itself"),
        ({"max_retries": 2}, "max_retries: only a JobSet starts lost pods again"),
        ({"runtime": "mine"}, "runtime and trainer_version are for TrainJobs"),
        ({"trainer_version": "2.1"}, "runtime and trainer_version are for TrainJobs"),
        (
            {"run_as_user": 0},
            "run_as_user: the standard restricted does not allow root; set pod_security: none",
        ),
        ({"kubeflow": True, "ttl": 3600}, "ttl: a TrainJob cannot set it"),
        ({"kubeflow": True, "shutdown_timeout": 60}, "are killed after 30 seconds"),
        ({"working_dir": "/app"}, "expected none with source: folder, whose files"),
        ({"source": "image", "exclude": ["data"]}, "expected none without source: folder"),
        ({"source": "image", "source_dir": ".."}, "expected none without source: folder"),
    ],
)
def test_a_key_without_effect_is_an_error(options, message):
    with pytest.raises(ValidationError, match=message):
        Kubernetes(**options)


def test_a_number_is_a_version_of_trainer_too_and_a_longer_shutdown_needs_another_runtime():
    section = Kubernetes(kubeflow=True, trainer_version=2.1, runtime="slow", shutdown_timeout=60)
    assert section.trainer_version == "2.1"


@pytest.mark.parametrize(
    ("version", "keys", "field"),
    [
        ("2.1", {}, "spec.runtimePatches"),
        ("2.1", {"trainer_version": "2.1", "time": 60}, "spec.activeDeadlineSeconds"),
        (
            "2.1",
            {"trainer_version": "2.1", "run_as_user": 7},
            "spec.podTemplateOverrides.0.spec.securityContext",
        ),
        ("2.1", {"trainer_version": "2.1", "pod_security": "restricted"}, "containers.0.securityContext"),
        ("2.1", {"trainer_version": "2.1", "resources": {"rdma/ib": 1}}, "containers.0.securityContext"),
        ("2.2", {"trainer_version": "2.1"}, "spec.podTemplateOverrides"),
        ("2.2", {"priority_class": "high"}, "spec.priorityClassName"),
        ("2.2", {"scheduler_name": "volcano"}, "spec.schedulerName"),
        ("2.2", {"runtime_class": "nvidia"}, "spec.runtimeClassName"),
        ("2.2", {"image_pull_policy": "Never"}, "containers.0.imagePullPolicy"),
        ("2.2", {"pod": {"spec": {"hostNetwork": True}}}, "spec.hostNetwork"),
    ],
)
def test_a_key_that_a_version_of_trainer_has_no_field_for_is_sent_and_unknown_to_its_schema(
    version, keys, field
):
    (job,) = render(Kubernetes(image="i", kubeflow=True, source="image", **keys))
    unknown = [*train_job_schema.list_unknown_fields(job, version)]
    assert any(path.endswith(field) for path in unknown), unknown


def test_the_schema_of_train_jobs_checks_the_volumes_of_pods():
    (job,) = render(Kubernetes(image="i", kubeflow=True, source="image", trainer_version="2.1"))
    job["spec"]["podTemplateOverrides"][0]["spec"]["volumes"][0]["emptydir"] = {}
    assert "emptydir" in train_job_schema.find_problem(job, "2.1")


@pytest.mark.parametrize("nnodes", [1, 2000])
@pytest.mark.parametrize("base", ["My run", "train_v2", "2nd", "-", "ü", "x" * 80, "a-" * 40])
def test_names_are_those_of_dns_also_with_the_indexes_of_pods(base, nnodes):
    long = f"-node-0-{nnodes - 1}-abcde"
    for options, end in (({}, f"-{nnodes - 1}"), ({"kubeflow": True}, long), ({"jobset": True}, long)):
        job = plan(Kubernetes(image="i", nnodes=nnodes, job_name=base, **options)).job
        names = {manifests.name_job(job) for _ in range(3)}
        assert len(names) == 3
        assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])", name + end) for name in names)


def test_the_name_of_a_user_is_the_value_of_a_label(monkeypatch):
    for name, label in (("a" * 62 + "-b", "a" * 62), ("DOMAIN\\Ann", "DOMAIN-Ann"), ("--", "unknown")):
        monkeypatch.setattr(base.getpass, "getuser", lambda name=name: name)
        assert manifests.format_user() == label
