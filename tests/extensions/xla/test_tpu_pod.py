"""`accel xla pod` starts the same `accel launch` on every worker of a pod, through gcloud and its shell."""

import os
import shlex
import subprocess
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.commands import call_accel

from accel_cli.errors import UsageError
from accel_cli.extensions.xla import tpu_pod
from accel_cli.planning.launch_options import Request
from accel_cli.profile import planner, yaml_io

GCLOUD = """#!/bin/bash
for word; do case $word in --command=*) command=${word#--command=} ;; esac; done
printf '%s\\0' "$@" > "$RECORD/gcloud"
HOME=$RECORD/worker PATH=$RECORD/worker/bin:$PATH bash -c "$command"
"""
PYTHON = """#!/bin/bash
printf '%s\\0' "$@" > "$RECORD/argv"
pwd > "$RECORD/pwd"
exit "${CODE:-0}"
"""
POD = tpu_pod.Pod("my-pod", folder="my project", zone="us-central2-b")


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Create a folder with a stub of gcloud and the home of a worker; return it with its environment."""
    folder = tmp_path_factory.mktemp("world")
    write_program(folder / "bin/gcloud", GCLOUD)
    write_program(folder / "worker/bin/python3", PYTHON)
    (folder / "worker/my project").mkdir()
    (folder / "home/my project/.git").mkdir(parents=True)
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "RECORD": str(folder)}
    return folder, environ | {"HOME": str(folder / "home")}


def read_words(file):
    return [os.fsdecode(word) for word in file.read_bytes().split(b"\0")[:-1]]


def prepared(*args, pod=POD, environ=None, target="train.py", kind="script", **options):
    request = Request(target, args, kind, options, for_pod=True)
    return tpu_pod.prepare(pod, request, environ or {"ACCEL_HOME": "/nowhere"})[1]


def run_on_worker(world, plan, **more):
    """Return the arguments of a worker's Python when the printed command is run in a shell."""
    folder, environ = world
    (folder / "argv").unlink(missing_ok=True)
    process = subprocess.run(["bash", "-c", shlex.join(plan.argv)], env=environ | more, check=False)
    assert process.returncode == int(more.get("CODE", 0))
    return read_words(folder / "argv")


@pytest.mark.smoke
def test_the_command_starts_the_same_launch_on_every_worker(world):
    plan = prepared("--epochs", "3", mixed_precision="bf16")
    assert plan.argv[:6] == ("gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-pod")
    assert plan.argv[6:8] == ("--zone=us-central2-b", "--worker=all")
    launch = "-m accel_cli launch --no-profile --set launcher.kind=xla --set mixed_precision=bf16 --"
    assert run_on_worker(world, plan) == [*launch.split(), "train.py", "--epochs", "3"]
    assert (world[0] / "pwd").read_text() == f"{world[0]}/worker/my project\n"


@settings(max_examples=60)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8")) | st.binary().map(os.fsdecode),
        max_size=4,
    )
)
def test_arguments_are_passed_byte_for_byte(world, arguments):
    arguments = [argument.replace("\0", "") for argument in arguments]
    actual = run_on_worker(world, prepared(*arguments))
    assert actual[actual.index("--") + 1 :] == ["train.py", *arguments]


@pytest.mark.parametrize("target", ["-x.py", "a b/t'r.py", "$HOME.py"])
def test_the_script_path_is_passed_as_typed(world, target):
    assert run_on_worker(world, prepared(target=target))[-1] == target


def test_a_module_is_passed_as_a_module(world):
    assert run_on_worker(world, prepared("x", target="pkg.train", kind="module"))[-4:] == [
        "-m",
        "--",
        "pkg.train",
        "x",
    ]


def test_resolved_settings_are_passed_and_the_user_profile_is_not(world, tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "accel.yaml").write_text(
        "schema_version: 1\nlauncher:\n  kind: xla\n  spmd: true\nlog_level: info\n"
    )
    (tmp_path / "home/profiles").mkdir(parents=True)
    (tmp_path / "home/profiles/default.yaml").write_text("schema_version: 1\nmixed_precision: fp16\n")
    monkeypatch.chdir(tmp_path)
    environ = {"ACCEL_HOME": str(tmp_path / "home"), "ACCEL_PROCESS_GROUP_TIMEOUT": "60"}
    argv = run_on_worker(world, prepared(environ=environ, set=("env.A=b c",)))
    settings = {argv[index + 1] for index, word in enumerate(argv) if word == "--set"}
    assert settings == {
        "launcher.kind=xla",
        "launcher.spmd=true",
        "log_level=info",
        "process_group_timeout=60",
        "env.A=b c",
    }


@settings(max_examples=50)
@given(
    st.sampled_from(["no", "true", "3", "0,2", "a: b", "#x", "", "~", "'", "[", "a\nb", "\u2028"])
    | st.text(st.characters(codec="utf-8"), min_size=1)
)
def test_an_inlined_value_is_parsed_to_the_same_value(value):
    text = yaml_io.inline(value)
    assert planner.layers.parse_assignments([f"launcher.rdzv_id={text}"]).values == {
        "launcher.rdzv_id": value
    }


def test_setup_lines_run_on_the_worker(world):
    pod = tpu_pod.Pod("p", folder="my project", setup=["export CODE=5", "cd /"])
    run_on_worker(world, prepared(pod=pod), CODE="5")
    assert (world[0] / "pwd").read_text() == "/\n"


def test_zone_and_project_default_to_those_of_gcloud():
    assert [
        w for w in prepared(pod=tpu_pod.Pod("p", folder=".")).argv if w.startswith(("--zone", "--project"))
    ] == []
    assert "--project=mine" in prepared(pod=tpu_pod.Pod("p", folder=".", project="mine")).argv


def test_the_folder_is_relative_to_the_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "a b").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "a b")
    assert tpu_pod.find_folder(None) == "a b"
    assert tpu_pod.find_folder("~/other") == "other"
    assert tpu_pod.find_folder("/srv/run") == "/srv/run"
    monkeypatch.chdir(tmp_path)
    assert tpu_pod.find_folder(None) == str(tmp_path)


def test_a_home_that_is_a_symbolic_link_is_resolved(tmp_path, monkeypatch):
    (tmp_path / "disk/me/work").mkdir(parents=True)
    (tmp_path / "me").symlink_to(tmp_path / "disk/me")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path / "me/work")
    assert tpu_pod.find_folder(None) == "work"


def test_variables_about_the_hosts_of_this_machine_are_not_passed(world):
    environ = {"ACCEL_HOME": "/nowhere", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}
    assert not [word for word in run_on_worker(world, prepared(environ=environ)) if "nnodes" in word]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pod": tpu_pod.Pod("-oProxyCommand=x", folder=".")},
            "Invalid NAME '-oProxyCommand=x': expected letters",
        ),
        ({"pod": tpu_pod.Pod("p", folder=".", zone="a b")}, "Invalid --zone 'a b': expected letters"),
        ({"node_rank": 0}, "Cannot use --node-rank with accel xla pod"),
        ({"mixed_precision": "fp16"}, "fp16"),
        ({"cpu": True}, "device: cpu"),
        ({"set": ("launcher.kind=single",)}, "--set launcher.kind=xla"),
        (
            {"set": ("env.HF_TOKEN=hf_secret",)},
            "Cannot send env.HF_TOKEN to the workers: it looks like a secret",
        ),
    ],
)
def test_a_request_that_cannot_run_on_a_pod_is_rejected(options, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")) as caught:
        prepared(**options)
    assert "hf_secret" not in str(caught.value)


# The command itself.


@pytest.fixture
def tpu_pod_command(cwd, capfd):
    """Call `accel xla pod` in this process."""
    return partial(call_accel, capfd, "xla", "pod")


def test_the_command_is_printed_and_not_run(tpu_pod_command, script, world):
    script("")
    result = tpu_pod_command("pod", "--zone", "z", "--", "train.py", "a  b", env=world[1])
    assert result.returncode == 0
    assert shlex.split(result.stdout)[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod"]
    assert "--run" in result.stderr
    quiet = tpu_pod_command("pod", "--zone", "z", "--", "-q", "train.py", "a  b", env=world[1])
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_options_of_the_launch_and_of_the_script_follow_the_dashes(tpu_pod_command, script):
    script("")
    result = tpu_pod_command("pod", "--", "--mixed-precision", "bf16", "train.py", "--lr", "1", "--", "x")
    assert result.stdout.endswith(
        "--set launcher.kind=xla --set mixed_precision=bf16 -- train.py --lr 1 -- x'\n"
    )


@pytest.mark.parametrize("code", [0, 7])
def test_run_runs_the_command_and_returns_the_exit_code_of_gcloud(accel, script, world, code, cwd):
    script("")
    folder, environ = world
    (folder / "worker/elsewhere").mkdir(exist_ok=True)
    options = ["pod", "--zone", "z", "--folder", "elsewhere", "--run", "--"]
    result = accel("xla", "pod", *options, "train.py", "a  b", env=environ | {"CODE": str(code)})
    assert result.returncode == code, result.stderr
    assert read_words(folder / "argv")[-2:] == ["train.py", "a  b"]
    assert (folder / "pwd").read_text() == f"{folder}/worker/elsewhere\n"
    assert "TPU pod pod" in result.stderr


def test_a_missing_gcloud_is_one_message(tpu_pod_command, script, tmp_path):
    script("")
    (tmp_path / "empty").mkdir()
    environ = {**os.environ, "PATH": str(tmp_path / "empty")}
    result = tpu_pod_command("p", "--run", "--", "train.py", env=environ)
    assert result.returncode == 2
    assert "gcloud not found: accel xla pod --run needs it" in result.stderr
    assert "Traceback" not in result.stderr


def test_explain_prints_the_command_and_the_source_of_each_value(tpu_pod_command, script, world):
    script("")
    (world[0] / "gcloud").unlink(missing_ok=True)
    result = tpu_pod_command("p", "--run", "--", "--explain", "train.py", env=world[1])
    assert "command: gcloud compute tpus tpu-vm ssh p" in result.stdout
    assert "launcher.kind: xla  [detected]" in result.stdout
    assert not (world[0] / "gcloud").exists()


@pytest.mark.parametrize(
    ("option", "replacement"),
    [
        (["--tpu-pod", "p"], "accel xla pod NAME"),
        (["--zone", "z"], "accel xla pod NAME --zone ZONE"),
        (["--project", "p"], "accel xla pod NAME --project ID"),
        (["--pod-folder", "d"], "accel xla pod NAME --folder DIR"),
        (["--pod-setup", "x"], "accel xla pod NAME --setup COMMAND"),
        (["--run-pod"], "accel xla pod NAME --run"),
    ],
)
def test_former_pod_options_of_accel_launch_are_rejected_with_the_command(capfd, script, option, replacement):
    script("")
    result = call_accel(capfd, "launch", *option, "train.py")
    assert result.returncode == 2
    assert f"accel launch has no option {option[0]}. Use {replacement}" in result.stderr


def test_an_option_of_job_launchers_is_rejected(tpu_pod_command, script):
    script("")
    result = tpu_pod_command("p", "--", "--detach", "train.py")
    assert result.returncode == 2
    assert "Cannot use --detach with launcher.kind: xla" in result.stderr


def test_a_missing_script_is_rejected_unless_a_folder_is_given(tpu_pod_command):
    assert "Script not found" in tpu_pod_command("p", "--", "train.py").stderr
    assert tpu_pod_command("p", "--folder", "d", "--", "train.py").returncode == 0
