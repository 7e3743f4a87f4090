"""Messages of `accel launch` about options after the script, and its start line."""

from functools import partial

import pytest
from support.launchers import plans
from support.processes.commands import call_accel

from accel_cli.commands.plan_view import format_headline
from accel_cli.planning.launch_options import Request

PRINTS = "import sys\nprint(sys.argv)\n"


@pytest.fixture
def stderr_of(cwd, capfd):
    """Call `accel launch --dry-run`, and return its stderr."""
    typed = partial(call_accel, capfd)
    return lambda *args: typed("launch", "--dry-run", "--cpu", *args).stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("train.py", "--nproc-per-node", "2"), "--nproc-per-node"),
        (("train.py", "--lr", "1", "--nproc-per-node=2", "--cpu", "--cpu"), "--nproc-per-node, --cpu"),
        (("-m", "train", "--resume"), "--resume"),
        (("train.py", "--nproc_per_node", "2"), "--nproc_per_node"),
        (("--log-dir", "logs", "--nproc-per-node", "2", "train.py", "--log-dir", "x"), "--log-dir"),
    ],
)
def test_options_of_accel_after_the_script_are_reported(script, stderr_of, args, named):
    script(PRINTS)
    target = next(arg for arg in args if arg.startswith("train"))
    assert stderr_of(*args) == (
        f"accel: options after {target} are passed to it, not to accel launch: {named}. Put them before {target} to pass them to "
        f"accel launch, or put -- before {target} to silence this line.\n"
    )


@pytest.mark.parametrize(
    "args",
    [
        ("--", "train.py", "--nproc-per-node", "2"),
        ("train.py", "--", "--nproc-per-node", "2"),
        ("train.py", "--help", "-m", "-q", "--nproc", "--nprocs_per_node"),
        ("--no-python", "env", "--cpu"),
    ],
)
def test_other_arguments_of_the_script_are_not_reported(script, stderr_of, args):
    script(PRINTS)
    assert stderr_of(*args) == ""


@pytest.mark.parametrize(
    "declares",
    [
        'parser.add_argument("--log-dir")',
        'parser.add_argument("--log_dir")',
        "class Arguments:\n    log_dir: str = 'logs'",
        "def main(log_dir=None):\n    pass",
        "args = options.parse()\nprint(args.log_dir)",
    ],
)
def test_an_option_that_the_script_declares_is_not_reported(script, stderr_of, declares):
    script(declares)
    assert stderr_of("train.py", "--log-dir", "logs") == ""


def test_a_method_with_the_name_of_an_option_declares_no_option(script, stderr_of):
    script("model.cpu()\nif args.log_directory == cpu:\n    pass\n")
    assert "not to accel launch: --cpu, --log-dir. " in stderr_of("train.py", "--cpu", "--log-dir", "x")


def test_a_rejected_launch_writes_its_error_to_the_failure_file(cwd, capfd, monkeypatch):
    monkeypatch.setenv("ACCEL_FAILURE_FILE", str(cwd / "failure"))
    assert call_accel(capfd, "launch", "--nproc-per-node", "2", "absent.py").returncode == 2
    assert (cwd / "failure").read_text() == "Script not found: absent.py. Check its path."


@pytest.mark.parametrize(
    ("kind", "profile"), [("torchrun", "none"), (None, "none, detected defaults (accel")]
)
def test_the_headline_advises_a_profile_unless_an_option_names_the_launcher(cwd, kind, profile):
    options = {"no_profile": True, "cpu": True, "set": [f"launcher.kind={kind}"] if kind else []}
    resolved, plan = plans.prepare(Request("train.py", options=options), {})
    assert f"; profile: {profile}" in format_headline(plan, resolved)
    assert ("accel config" in format_headline(plan, resolved)) is (kind is None)


def test_notes_about_unused_files_precede_the_error_of_a_launch(cwd, script, capfd):
    script(PRINTS)
    (cwd / "accel.yml").write_text("device: cpu\n")
    result = call_accel(capfd, "launch", "--dry-run", "--profile", "absent", "train.py")
    note, error = result.stderr.splitlines()
    assert note.startswith(f"accel: {cwd / 'accel.yml'} is not used")
    assert error.startswith("accel: error: Profile 'absent'")


@pytest.mark.parametrize(
    "command",
    [
        ("launch", "--dry-run", "train.py"),
        ("config", "show"),
        ("env",),
        ("logs",),
        ("jobs", "list", "--launcher", "slurm"),
    ],
)
def test_each_command_that_reads_the_profile_names_the_files_that_it_does_not_use(
    cwd, script, capfd, command
):
    script(PRINTS)
    (cwd / "accel.yml").write_text("device: cpu\n")
    assert call_accel(capfd, *command).stderr.count("accel.yml is not used") == 1


def test_a_mistake_in_the_file_of_an_engine_is_no_error_of_commands_that_start_nothing(cwd, script, capfd):
    script(PRINTS)
    text = "schema_version: 1\ndeepspeed:\n  stage: auto\n  config_file: missing.json\n"
    (cwd / "accel.yaml").write_text(text)
    assert "Cannot read" in call_accel(capfd, "launch", "--dry-run", "train.py").stderr
    assert "Cannot read" in call_accel(capfd, "config", "show").stderr
    for command in (("runs",), ("env",)):
        result = call_accel(capfd, *command)
        assert (result.returncode, "missing.json: " in result.stdout + result.stderr) == (0, False)
    assert "deepspeed.stage: auto" in result.stdout


def test_values_of_a_config_file_without_effect_are_named_before_an_error(cwd, script, capfd):
    script(PRINTS)
    (cwd / "config.yaml").write_text(
        'compute_environment: LOCAL_MACHINE\ndistributed_type: "NO"\nmain_process_port: 29500\n'
    )
    options = ("--config_file", "config.yaml", "--set", "launcher.kind=absent")
    result = call_accel(capfd, "launch", "--dry-run", *options, "train.py")
    assert result.returncode == 2
    assert "config.yaml: 1 value(s) have no effect: main_process_port" in result.stderr
