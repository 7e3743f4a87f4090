import os
import re

import pytest

from accel_cli.errors import ProfileError, UsageError
from accel_cli.profile import validation_errors
from accel_cli.profile.layers import (
    Layer,
    list_unused_files,
    parse_assignments,
    read_environment,
    read_file,
    read_layers,
    resolve,
)
from accel_cli.profile.schema import SECTIONS, known_keys
from accel_cli.profile.store import ProfileStore, write
from accel_runtime.environment.settings import Settings


@pytest.fixture
def store(cwd, home):
    return ProfileStore.from_env({"ACCEL_HOME": str(home)}, cwd)


def write_profile(path, text):
    write(path, f"schema_version: 1\n{text}")


def test_a_higher_layer_overrides_single_keys_and_each_value_has_a_source(store, cwd):
    write_profile(
        store.get_path("default"), "mixed_precision: fp16\ndevice: cuda\nprocess_group_timeout: 5\n"
    )
    write_profile(cwd / "accel.yaml", "device: cpu\nprocess_group_timeout: 6\n")
    write_profile(store.get_path("gpu"), "process_group_timeout: 7\n")
    environ = {"ACCEL_PROCESS_GROUP_BACKEND": "gloo", "ACCEL_PROFILE": "gpu"}
    resolved = resolve(read_layers(store, environ, None, [parse_assignments(["env.X=1=2"])]))
    profile = resolved.profile
    assert (profile.mixed_precision, profile.device, profile.process_group_timeout) == ("fp16", "cpu", 7)
    assert (profile.process_group_backend, profile.env) == ("gloo", {"X": "1=2"})
    assert resolved.get_source("mixed_precision") == f"user: {store.get_path('default')}:2"
    assert resolved.get_source("device") == f"project: {cwd / 'accel.yaml'}:2"
    assert resolved.get_source("process_group_timeout") == f"profile gpu: {store.get_path('gpu')}:2"
    assert resolved.get_source("process_group_backend") == "environment: ACCEL_PROCESS_GROUP_BACKEND"
    assert resolved.get_source("env.X") == "--set"
    assert resolved.get_source("launcher.kind") == "default"


def test_the_option_profile_overrides_the_variable(store):
    write_profile(store.get_path("a"), "device: cpu\n")
    write_profile(store.get_path("b"), "device: cuda\n")
    assert resolve(read_layers(store, {"ACCEL_PROFILE": "a"}, "b")).profile.device == "cuda"


def test_a_layer_that_changes_the_launcher_resets_its_section(store, cwd):
    write_profile(store.get_path("default"), "launcher:\n  kind: torchrun\n  nproc_per_node: 4\n")
    write_profile(cwd / "accel.yaml", "launcher:\n  kind: single\n")
    resolved = resolve(read_layers(store, {}, None))
    assert resolved.profile.launcher.kind == "single"
    assert "launcher.nproc_per_node" not in resolved.sources


def test_a_layer_with_the_same_launcher_changes_only_its_keys(store, cwd):
    write_profile(
        store.get_path("default"), "launcher:\n  kind: torchrun\n  nproc_per_node: 4\n  max_restarts: 2\n"
    )
    write_profile(cwd / "accel.yaml", "launcher:\n  nproc_per_node: 2\n")
    launcher = resolve(read_layers(store, {}, None)).profile.launcher
    assert (launcher.nproc_per_node, launcher.max_restarts) == (2, 2)


@pytest.mark.parametrize(
    "distrusted",
    [
        ("accel.yaml", lambda path: path.chmod(0o666), "every user can write {}"),
        ("", lambda path: path.chmod(0o1777), "every user can write {}"),
        pytest.param(
            ("accel.yaml", lambda path: os.chown(path, 12345, -1), "{} belongs to another user"),
            marks=pytest.mark.service("root"),
        ),
        pytest.param(
            ("", lambda path: os.chown(path, 12345, -1), "{} belongs to another user"),
            marks=pytest.mark.service("root"),
        ),
    ],
)
def test_a_project_file_that_other_users_could_have_written_is_not_used(store, cwd, distrusted):
    """The file is in a folder above the working folder of the user."""
    which, change, reason = distrusted
    write_profile(cwd / "accel.yaml", "env:\n  PYTHONPATH: planted\n")
    inside = ProfileStore(store.home, cwd / "own")
    inside.cwd.mkdir(mode=0o700)
    assert resolve(read_layers(inside, {}, None)).profile.env == {"PYTHONPATH": "planted"}
    change(cwd / which)
    assert resolve(read_layers(inside, {}, None)).profile.env == {}
    assert list_unused_files(inside, {}) == (
        f"{cwd}/accel.yaml is not used: {reason.format(cwd / which)}. Set ACCEL_TRUSTED_PROJECTS={cwd} to use it.",
    )
    trusted = {"ACCEL_TRUSTED_PROJECTS": f"/somewhere{os.pathsep}{cwd}"}
    assert resolve(read_layers(inside, trusted, None)).profile.env == {"PYTHONPATH": "planted"}
    assert not list_unused_files(inside, trusted)


@pytest.mark.service("root")
def test_files_of_the_user_who_called_sudo_are_trusted(store, cwd):
    write_profile(cwd / "accel.yaml", "device: cpu\n")
    for path in (cwd, cwd / "accel.yaml"):
        os.chown(path, 12345, -1)
    assert not resolve(read_layers(store, {"SUDO_UID": "1"}, None)).sources
    assert resolve(read_layers(store, {"SUDO_UID": "12345"}, None)).profile.device == "cpu"


def test_the_project_file_is_searched_up_to_the_root_of_the_repository(store, cwd):
    write_profile(cwd / "accel.yaml", "device: cpu\n")
    inside = cwd / "a" / "b"
    inside.mkdir(parents=True)
    assert ProfileStore(store.home, inside).find_project_file() == cwd / "accel.yaml"
    (inside / ".git").mkdir()
    assert ProfileStore(store.home, inside).find_project_file() is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"ACCEL_MIXED_PRECISION": "half"},
            "Invalid ACCEL_MIXED_PRECISION 'half': expected one of no, bf16, fp16.",
        ),
        ({"ACCEL_PROFILE": "gone"}, "Profile 'gone' (from ACCEL_PROFILE) not found"),
        ({"ACCEL_PROFILE": "a/b"}, "Invalid profile name 'a/b'"),
        ({"ACCEL_MIXED_PRECISON": "bf16"}, "did you mean ACCEL_MIXED_PRECISION?"),
    ],
)
def test_an_invalid_variable_is_reported(store, environ, message):
    with pytest.raises(UsageError, match=r"ACCEL|name") as caught:
        read_layers(store, environ, None)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixed_precision", "--set: invalid assignment 'mixed_precision': expected KEY=VALUE"),
        (
            "mixed_precison=bf16",
            "--set: mixed_precison: unknown key (did you mean mixed_precision?)",
        ),
        ("nproc_per_node=2", "did you mean launcher.nproc_per_node?"),
        ("device=[", "invalid YAML"),
        ("launcher.nprocs=2", "did you mean launcher.nproc_per_node?"),
    ],
)
def test_an_invalid_assignment_is_rejected_with_a_reason(text, message):
    with pytest.raises(UsageError) as caught:
        parse_assignments([text])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "kind", "meant"),
    [
        (
            "launcher.nprocs",
            "single",
            "launcher.nproc_per_node, a key of launcher.kind: torchrun or slurm or ssh or sagemaker or kubernetes or ray or skypilot",
        ),
        ("launcher.log", "torchrun", "launcher.log_dir"),
        ("launcher.max", "torchrun", "launcher.max_restarts"),
        ("launcher.gpu", "slurm", "launcher.gpus_per_node"),
        ("launcher.port", "torchrun", None),
        ("launcher.xyz.abc", "torchrun", None),
        ("launcher.timeout", "slurm", "launcher.time"),
        ("launcher.timeout", "torchrun", "launcher.rdzv_timeout"),
        ("launcher.instance", "torchrun", "launcher.instance_type, a key of launcher.kind: sagemaker"),
        ("launcher.rdzv", "torchrun", "launcher.rdzv_endpoint"),
        ("nprocs", None, "launcher.nproc_per_node"),
        ("launcher.xyz", "torchrun", None),
    ],
)
def test_suggested_keys_prefer_those_of_the_active_launcher(key, kind, meant):
    with pytest.raises(ProfileError) as caught:
        parse_assignments([f"{key}=2"], kind=kind)
    hint = caught.value.problems[0].hint
    assert hint == f"did you mean {meant}?" if meant else hint.startswith("keys of ")


def test_an_unknown_key_without_a_similar_one_lists_the_keys_of_its_section_once():
    with pytest.raises(ProfileError) as caught:
        parse_assignments(["parallel.qqq=1", "nosuch=1", "zzz=1"])
    section, first, second = (problem.hint for problem in caught.value.problems)
    assert section == "keys of parallel: dp_replicate, dp_shard, tp, cp, sp, tp_plan"
    assert "mixed_precision" in first
    assert "launcher.KEY" in first
    assert second == ""


def test_a_launcher_given_by_its_name_alone_leads_to_its_kind(tmp_path):
    file = tmp_path / "accel.yaml"
    file.write_text("schema_version: 1\nlauncher: torchrn\n")
    with pytest.raises(ProfileError, match=r"accel.yaml:2: launcher: .*launcher: \{kind: torchrun\}"):
        resolve([read_file(file, "project")])


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("num_processes", "launcher.nproc_per_node, the number of processes on each node"),
        ("launcher.num_machines", "launcher.nnodes"),
        ("main_process_ip", "launcher.rdzv_endpoint, HOST:PORT"),
        (
            "launcher.node_rank",
            "the option --node-rank of accel launch, if the order of nodes must be fixed",
        ),
        ("use_cpu", "device: cpu"),
        ("distributed_type", "launcher.kind, and the sections parallel and fully_shard"),
        ("fsdp_config", "the sections parallel and fully_shard"),
    ],
)
def test_a_key_of_accelerate_or_torchrun_is_rejected_with_its_replacement(key, instead):
    with pytest.raises(ProfileError) as caught:
        parse_assignments([f"{key}=2"])
    assert str(caught.value) == f"--set: {key}: unknown key (use {instead})"


def test_replacements_name_existing_keys_and_sections():
    keys = re.findall(
        r"(launcher\.\w+|device|mixed_precision)\b", " ".join(validation_errors._RENAMED.values())
    )
    assert set(keys) <= set(known_keys())
    assert set(validation_errors._EXAMPLES) == set(SECTIONS)


def test_an_unquoted_value_with_commas_is_reported_with_a_correction(store, cwd):
    write_profile(cwd / "accel.yaml", "launcher: {kind: single, gpu_ids: 3,1}\n")
    with pytest.raises(ProfileError, match=r"launcher.1: unknown key \(quote a value that has commas: '0,1'"):
        resolve(read_layers(store, {}, None))


@pytest.mark.parametrize(
    "text", ["compute_environment: LOCAL_MACHINE\n", "num_processes: 2\ndistributed_type: NO\n"]
)
def test_an_accelerate_file_is_rejected_with_the_import_command(store, cwd, text):
    path = cwd / "accel.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        resolve(read_layers(store, {}, None))
    assert str(caught.value) == (
        f"{path}:1: this is a config file of Accelerate, not a profile. Convert it with: accel config import FILE"
    )


def test_the_launcher_of_an_assignment_is_the_active_one():
    with pytest.raises(ProfileError, match=r"did you mean launcher.time\?"):
        parse_assignments(["launcher.timeout=2", "launcher.kind=slurm"], kind="torchrun")


def test_all_unknown_keys_of_assignments_are_reported_at_once():
    with pytest.raises(ProfileError) as caught:
        parse_assignments(["devise=cpu", "device=cpu", "launcher.nprocs=2"])
    assert [problem.key for problem in caught.value.problems] == ["devise", "launcher.nprocs"]


@pytest.mark.parametrize("version", ["", "schema_version: '1'\n"])
def test_a_missing_version_does_not_hide_other_mistakes(store, cwd, version):
    path = cwd / "accel.yaml"
    path.write_text(f"{version}devise: cpu\nmixed_precision: half\n")
    with pytest.raises(ProfileError) as caught:
        resolve(read_layers(store, {}, None))
    keys = [problem.key for problem in caught.value.problems]
    assert (keys[0], sorted(keys)) == ("schema_version", ["devise", "mixed_precision", "schema_version"])
    path.write_text(f"{version}device: cpu\n")
    with pytest.raises(ProfileError) as caught:
        resolve(read_layers(store, {}, None))
    assert [problem.key for problem in caught.value.problems] == ["schema_version"]


def test_a_profile_with_the_other_suffix_of_yaml_is_not_used_and_named(store, cwd):
    (cwd / "deep").mkdir()
    deep = ProfileStore(store.home, cwd / "deep")
    for path in (cwd / "accel.yml", store.get_path("default").with_suffix(".yml")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("device: cpu\n")
    assert read_layers(deep, {}, None) == []
    notes = "".join(list_unused_files(deep, {}))
    assert (
        f"{cwd / 'accel.yml'} is not used: the suffix of a profile is .yaml. Rename it: accel.yaml" in notes
    )
    assert "default.yml is not used" in notes
    write_profile(cwd / "accel.yaml", "device: cpu\n")
    assert len(read_layers(deep, {}, None)) == 1
    assert "accel.yml" not in "".join(list_unused_files(deep, {}))


@pytest.mark.parametrize("create", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("missing")])
@pytest.mark.parametrize("name", ["user", "project"])
def test_a_profile_that_is_no_file_is_an_error(store, cwd, create, name):
    path = store.get_path("default") if name == "user" else cwd / "accel.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    create(path)
    with pytest.raises(
        UsageError, match=r"Cannot read .*(it is not a regular file|Is a directory|No such file)"
    ):
        read_layers(store, {}, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$SCRATCH/logs", "/scratch/logs"), ("${SCRATCH}/a b", "/scratch/a b"), ("~/logs", "/home/me/logs"), ("logs", "logs"),
        ("$MISSING/logs", "expected a path whose variables are set; MISSING is not"),
        ("~nobody-has-this-name/x", "~nobody-has-this-name names no home directory"), ("./~x", "./~x"), ("a$", "a$"),
        *((text, "expected a path with variables as $NAME or ${NAME}, got $") for text in ("${SCRATCH/logs", "$1/logs", "${}/x", "${A-b}/x")),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "key", ["torchrun.log_dir", "xla.log_dir", "slurm.output_dir", "sagemaker.output_dir", "sagemaker.source_dir",
            "sagemaker.requirements", "ray.source_dir", "ray.requirements", "kubernetes.source_dir", "ssh.hostfile"],
)  # fmt: skip
def test_a_path_of_this_machine_has_its_variables_expanded_or_is_refused(monkeypatch, key, text, expected):
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("MISSING", raising=False)
    kind, _, name = key.partition(".")
    values = {"launcher.kind": kind, f"launcher.{name}": text}
    values |= {"launcher.image": "x"} if kind == "kubernetes" else {}
    values |= {"launcher.role": "r", "launcher.instance_type": "ml.m5.large"} if kind == "sagemaker" else {}
    try:
        profile = resolve([Layer("file", values)]).profile
    except ProfileError as error:
        assert expected in "\n".join(problem.expected for problem in error.problems)
    else:
        assert getattr(profile.launcher, name) == expected


def test_an_invalid_value_is_reported_with_its_source(store, cwd):
    write_profile(cwd / "accel.yaml", "device: gpu\n")
    with pytest.raises(ProfileError) as caught:
        resolve(read_layers(store, {}, None, [parse_assignments(["process_group_timeout=soon"])]))
    message = str(caught.value)
    assert f"{cwd / 'accel.yaml'}:2: device: expected auto, cpu, cuda, mps, xla or xpu, got 'gpu'" in message
    assert "--set: process_group_timeout: expected a whole number, got 'soon'" in message


def test_an_error_of_a_section_is_reported_with_the_source_of_the_section(store, cwd):
    path = cwd / "accel.yaml"
    write_profile(path, "launcher:\n  kind: torchrun\n  nnodes: 2\n")
    for options, source in (
        ((), f"{path}:2"),
        (("launcher.ranks=1",), "--set"),
        (("device=cpu",), f"{path}:2"),
    ):
        with pytest.raises(ProfileError) as caught:
            resolve(read_layers(store, {}, None, [parse_assignments(options)]))
        assert (
            str(caught.value)
            == f"{source}: launcher: rdzv_endpoint (host:port) is needed if nnodes is above 1"
        )


def test_an_invalid_kind_is_reported_with_its_source(store, cwd):
    path = cwd / "accel.yaml"
    write_profile(path, "launcher:\n  kind: tochrun\n")
    for options, source in (
        ((), f"{path}:3"),
        (("launcher.kind=torch",), "--set"),
        (("device=cpu",), f"{path}:3"),
    ):
        with pytest.raises(ProfileError, match=f"^{source}: launcher.kind: expected single, "):
            resolve(read_layers(store, {}, None, [parse_assignments(options)]))


def test_the_spmd_variable_is_not_a_key_of_a_nested_launch():
    assert "spmd" not in read_environment(Settings(device="cpu").to_env()).values
    with pytest.raises(UsageError, match=r"Invalid ACCEL_SPMD: .* Set launcher.spmd: true"):
        read_environment({"ACCEL_SPMD": "1"})


def test_keys_of_a_section_are_overridden_one_by_one_with_their_sources(store, cwd):
    write_profile(
        store.get_path("default"), "parallel:\n  dp_shard: 4\n  tp: 2\nfully_shard:\n  wrap: [A, B]\n"
    )
    write_profile(cwd / "accel.yaml", "parallel:\n  dp_shard: 2\n")
    environ = {"ACCEL_FULLY_SHARD_CPU_OFFLOAD": "1", "ACCEL_PARALLEL_TP_PLAN": "a.*=colwise"}
    resolved = resolve(read_layers(store, environ, None, [parse_assignments(["parallel.cp=3"])]))
    parallel, options = resolved.profile.parallel, resolved.profile.fully_shard
    assert (parallel.dp_shard, parallel.tp, parallel.cp) == (2, 2, 3)
    assert (parallel.tp_plan, options.wrap, options.cpu_offload) == ({"a.*": "colwise"}, ["A", "B"], True)
    assert resolved.get_source("parallel.dp_shard") == f"project: {cwd / 'accel.yaml'}:3"
    assert resolved.get_source("parallel.tp") == f"user: {store.get_path('default')}:4"
    assert resolved.get_source("parallel.cp") == "--set"
    assert resolved.get_source("parallel.tp_plan") == "environment: ACCEL_PARALLEL_TP_PLAN"
    assert resolved.get_source("fully_shard.ignore") == "default"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ACCEL_PARALLEL_TP": "two"}, "Invalid ACCEL_PARALLEL_TP 'two': expected a whole number above 0."),
        ({"ACCEL_PARALEL_TP": "2"}, "did you mean ACCEL_PARALLEL_TP?"),
        ({"ACCEL_FULLY_SHARD_WRAP": "a b"}, "Invalid ACCEL_FULLY_SHARD_WRAP 'a b': expected auto, none"),
    ],
)
def test_an_invalid_variable_of_a_section_is_reported(store, environ, message):
    with pytest.raises(UsageError) as caught:
        read_layers(store, environ, None)
    assert message in str(caught.value)


def test_the_environment_of_a_launch_without_sharding_is_a_profile_without_sharding():
    assert resolve([read_environment(Settings().to_env())]).profile.settings.parallel.plain
