"""Output of `accel --help`, `accel config ...`, `accel env` and `accel test`."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from support.processes import commands
from support.processes.commands import call_accel, run_accel
from support.processes.waits import limit

from accel_cli.main import accel
from accel_cli.planning.machine import Machine
from accel_cli.profile.layers import read_file, resolve

COMMANDS = [
    (),
    *((name,) for name in accel.commands),
    *((group, name) for group in ("config", "jobs") for name in accel.commands[group].commands),
]


@pytest.fixture
def typed(cwd, capfd):
    """Call `accel` in an empty folder, in this process."""
    return partial(call_accel, capfd)


@pytest.fixture
def machine(monkeypatch):
    """A stub of a machine with two cores and no devices, which needs no child process."""
    monkeypatch.setattr("accel_cli.planning.machine.detect", lambda *_: Machine(2))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_and_shows_an_example(typed, command):
    environ = {**os.environ, "COLUMNS": "80"}
    result = typed(*command, "--help", env=environ)
    assert result.returncode == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert f"accel {' '.join(command)}".strip() in result.stdout.partition("Usage")[2].partition("\n")[2]


def test_help_is_grouped(typed):
    text = typed("--help").stdout
    assert text.index(" Run ") < text.index("launch") < text.index(" Set up ") < text.index("config")


def test_the_version_is_that_of_the_package(typed):
    assert typed("--version").stdout == f"accel {version('accel-runtime')}\n"


def test_the_console_script_and_the_module_are_the_same_command(cwd):
    script = Path(sys.executable).with_name("accel")
    outputs = [
        subprocess.run([*command, "config", "show"], capture_output=True, check=True, text=True).stdout
        for command in ([script], [sys.executable, "-m", "accel_cli"])
    ]
    assert outputs[0] == outputs[1]
    assert "launcher.kind\tsingle" in outputs[0]


@pytest.fixture
def complete(typed):
    """Return the completions of bash for the words of a command line, the last of which is incomplete."""

    def complete_words(*words):
        completing = {"_ACCEL_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words)}
        return typed(env={**os.environ, **completing, "COMP_CWORD": str(len(words) - 1)}).stdout.split()

    return complete_words


def test_the_shell_completes_commands_profiles_and_keys(typed, complete):
    typed("config", "set", "--profile", "gpu-box", "device=cuda")
    assert complete("accel", "")[:2] == ["launch", "test"]
    assert complete("accel", "launch", "--profile", "") == ["gpu-box"]
    assert complete("accel", "launch", "--cpu", "") == []  # then bash completes names of files
    assert "--nproc-per-node" in complete("accel", "launch", "--n")
    assert complete("accel", "launch", "--job") == ["--job-name"]  # of a launcher
    assert "mixed_precision=" in complete("accel", "config", "set", "")
    assert "mixed_precision=" in complete("accel", "launch", "--set", "")
    assert complete("accel", "config", "get", "mixed") == ["mixed_precision"]
    assert complete("accel", "checkpoint", "export", "--format", "d") == ["dcp"]


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["accel", "config", "set", "mixed_precision", "="], ["bf16", "fp16", "no"]),
        (["accel", "launch", "--set", "mixed_precision", "=", "b"], ["bf16"]),
        (["accel", "launch", "--set", "=", "resume", "=", "t"], ["true"]),
        (["accel", "config", "set", "device=cpu", "resume=f"], ["resume=false"]),
        (["accel", "config", "set", "launcher.kind", "=", "torch"], ["torchrun"]),
        (["accel", "stacks", "2026"], ["20260102-030405-train-7"]),
    ],
)
def test_the_shell_completes_values_and_runs(complete, home, words, completions):
    (home / "runs" / "20260102-030405-train-7").mkdir(parents=True)
    (home / "runs" / "20260102-030405-train-7" / "run.json").write_text('{"started": 1}')
    assert complete(*words) == completions


def test_bash_completes_an_assignment_with_the_script_that_is_shown(cwd, monkeypatch, typed):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    script = typed("--show-completion").stdout
    call = "COMP_WORDS=(accel launch --set mixed_precision = b) COMP_CWORD=5; _accel_completion accel; echo $COMPREPLY"
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = ["bash", "--norc", "-c", f"{script}\n{call}"]
    assert subprocess.run(shell, env=environ, capture_output=True, check=True, text=True).stdout == "bf16\n"


@pytest.mark.parametrize(
    ("shell", "files"),
    [
        ("bash", (".bash_completions/accel.sh", ".bashrc")),
        ("zsh", (".zfunc/_accel", ".zshrc")),
        ("fish", (".config/fish/completions/accel.fish",)),
    ],
)
def test_completion_is_installed_once_for_the_current_shell(typed, tmp_path, monkeypatch, shell, files):
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    environ = {**os.environ, "HOME": str(tmp_path)}
    script, *start_up = [tmp_path / name for name in files]
    for file in start_up:
        file.write_text("export A=1")
    for _ in range(2):  # the second finds the lines of the first
        result = typed("--install-completion", env=environ)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines()[0] == f"{shell} completion installed in {script}"
    assert script.read_text().strip() == typed("--show-completion").stdout.strip()
    for file in start_up:
        first, *added = filter(None, file.read_text().splitlines())
        assert (first, len(added)) == ("export A=1", len({*added}))


def test_completion_for_another_shell_is_refused(typed, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("tcsh", "/bin/tcsh"))
    result = typed("--install-completion")
    assert (result.returncode, result.stdout) == (1, "Shell tcsh is not supported.\n")


def test_a_profile_can_be_created_changed_shown_listed_and_deleted(typed, home):
    path = home / "profiles" / "gpu.yaml"
    assert (
        typed(
            "config", "set", "--profile", "gpu", "launcher.kind=torchrun", "launcher.nproc_per_node=2"
        ).returncode
        == 0
    )
    assert typed("config", "set", "--profile", "gpu", "mixed_precision=bf16").returncode == 0
    assert typed("config", "path", "--profile", "gpu").stdout.strip() == str(path)
    assert typed("config", "list").stdout == f"NAME\tFILE\ngpu\t{path}\n"
    rows = dict(
        line.split("\t")[:2] for line in typed("config", "show", "--profile", "gpu").stdout.splitlines()
    )
    assert (rows["launcher.nproc_per_node"], rows["mixed_precision"], rows["device"]) == ("2", "bf16", "auto")
    assert (
        f"launcher.kind\ttorchrun\tprofile gpu: {path}:4"
        in typed("config", "show", "--profile", "gpu").stdout
    )
    assert typed("config", "validate", "--profile", "gpu").returncode == 0
    assert typed("config", "delete", "gpu", "--yes").returncode == 0
    assert typed("config", "list").stdout == ""
    assert typed("config", "delete", "gpu", "--yes").returncode == 2


def test_an_effective_value_is_printed_as_it_can_be_typed(typed, cwd):
    typed("config", "set", "launcher.kind=torchrun", "launcher.ranks=0,2", "env.A=1", "resume=true")
    expected = {
        "launcher.ranks": "0,2",
        "resume": "true",
        "device": "auto",
        "env.A": "1",
        "launcher.log_dir": "",
    }
    for key, value in expected.items():
        result = typed("config", "get", key)
        assert (result.returncode, result.stdout, result.stderr) == (0, f"{value}\n", "")
    assert typed("config", "get", "env.B").stdout == "\n"
    for key, message in {
        "launcher.nprocs": "mean launcher.nproc_per_node?",
        "launcher.qos": "belongs to launcher.kind: slurm",
    }.items():
        result = typed("config", "get", key)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr


def test_unset_removes_values_and_sections(typed, home):
    typed(
        "config", "set", "launcher.kind=torchrun", "launcher.ranks=all", "env.A=1", "env.B=2", "resume=true"
    )
    path = home / "profiles" / "default.yaml"
    path.write_text(f"{path.read_text()}# mine\n")
    result = typed("config", "unset", "env", "launcher.ranks", "resume")
    assert (result.returncode, result.stderr.endswith("removed env, launcher.ranks, resume\n")) == (
        0,
        True,
    )
    assert path.read_text().splitlines()[1:] == [
        "schema_version: 1",
        "launcher:",
        "  kind: torchrun",
        "# mine",
    ]
    for keys, message in ((["resume", "launcher.kind"], "does not set resume. It sets: launcher.kind"),):
        result = typed("config", "unset", *keys)
        assert (result.returncode, message in result.stderr) == (2, True)
    assert "Profile not found: " in typed("config", "unset", "resume", "--profile", "gone").stderr
    path.write_text("schema_version: 1\nresume: 3\ndevise: cpu\n")
    assert "Cannot remove schema_version" in typed("config", "unset", "schema_version").stderr
    result = typed("config", "unset", "devise")
    assert (result.returncode, path.read_text()) == (0, "schema_version: 1\nresume: 3\n")
    assert f"remaining mistake: {path}:2: resume: expected true or false, got 3\n" in result.stderr


@pytest.mark.parametrize("command", [("set", "resume=true"), ("show",), ("validate",)])
def test_an_empty_profile_name_is_not_the_default_profile(typed, home, command):
    result = typed("config", *command, "--profile", "")
    assert (result.returncode, "Invalid profile name ''" in result.stderr) == (2, True)
    assert not (home / "profiles" / "default.yaml").exists()


def test_a_profile_is_deleted_only_after_confirmation(typed, home, terminal):
    typed("config", "set", "--profile", "gpu", "resume=true")
    path = home / "profiles" / "gpu.yaml"
    result = typed("config", "delete", "gpu")
    assert (result.returncode, path.exists()) == (2, True)
    assert "Use --yes to delete it.\n" in result.stderr
    for answer, is_kept in (("n\r", True), ("y\r", False)):
        screen = terminal("delete", "gpu")
        screen.answer("gpu.yaml? [y/N]", answer)
        assert (screen.end(), path.exists()) == (0, is_kept)


ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: {}\n"


def test_an_import_replaces_only_a_profile_without_other_values(typed, home, cwd, machine):
    path = home / "profiles" / "default.yaml"
    (cwd / "two.yaml").write_text(ACCELERATE.format(2))
    (cwd / "three.yaml").write_text(ACCELERATE.format(3))
    typed("config", "default")
    for _ in range(2):  # the second finds what it would write
        assert typed("config", "import", "two.yaml").returncode == 0
        assert "nproc_per_node: 2" in path.read_text()
    result = typed("config", "import", "three.yaml")
    assert (result.returncode, "nproc_per_node: 2" in path.read_text()) == (2, True)
    assert "Use --force to replace it, or --profile NAME to write another profile.\n" in result.stderr
    assert typed("config", "import", "three.yaml", "--force").returncode == 0
    assert "nproc_per_node: 3" in path.read_text()


def test_an_import_on_a_terminal_asks_before_it_replaces_a_profile(typed, home, cwd, terminal):
    typed("config", "set", "resume=true")
    path = home / "profiles" / "default.yaml"
    (cwd / "two.yaml").write_text(ACCELERATE.format(2))
    for answer, is_kept in (("n\r", True), ("y\r", False)):
        screen = terminal("import", "two.yaml")
        screen.answer("default.yaml? [y/N]", answer)
        assert (screen.end(), "resume" in path.read_text()) == (0, is_kept)


def test_each_effective_value_is_one_line_on_a_terminal_of_80_columns(typed, terminal, home):
    typed("config", "set", "launcher.kind=torchrun", "mixed_precision=bf16")
    screen = terminal("show", lines=80)
    assert screen.end() == 0
    rows = [line.split() for line in screen.text().split("\nuser: ")[0].splitlines()]
    assert len(rows) == len(typed("config", "show").stdout.splitlines())
    assert ["launcher.kind", "torchrun", "user:4"] in rows
    assert ["fully_shard.activation_checkpointing", "false", "default"] in rows
    assert str(home / "profiles" / "default.yaml") in screen.text().replace("\n", "")


def test_an_empty_value_unsets_a_key(typed, home):
    typed("config", "set", "device=cpu", "env.A=1")
    typed("config", "set", "device=")
    assert "device" not in (home / "profiles" / "default.yaml").read_text()


def test_an_invalid_value_is_rejected_and_the_file_is_unchanged(typed, home):
    typed("config", "set", "device=cpu")
    before = (home / "profiles" / "default.yaml").read_text()
    result = typed("config", "set", "device=gpu", "process_group_timeout=0")
    assert result.returncode == 2
    assert "device: expected auto, cpu, cuda, mps, xla or xpu, got 'gpu'" in result.stderr
    assert "process_group_timeout: expected at least 1, got 0" in result.stderr
    assert (home / "profiles" / "default.yaml").read_text() == before


def test_defaults_for_the_machine_are_written_once_without_questions(typed, home, machine):
    command = ("config", "default")
    assert typed(*command).returncode == 0
    assert (home / "profiles" / "default.yaml").read_text().splitlines()[1:] == [
        "schema_version: 1",
        "launcher:",
        "  # One process on this machine",
        "  kind: single",
        "# Mixed precision of the forward pass: no keeps the dtype of the model",
        "mixed_precision: 'no'",
    ]
    second_result = typed(*command)
    assert second_result.returncode == 2
    assert "already exists. Use --force to replace it." in second_result.stderr
    assert typed(*command, "--force").returncode == 0


@pytest.mark.slow
def test_defaults_for_this_machine_are_written(accel, home):
    assert accel("config", "default").returncode == 0
    assert resolve([read_file(home / "profiles" / "default.yaml", "file")]).profile.launcher.kind == "single"


def test_the_project_file_applies_in_the_project(typed, cwd):
    assert typed("config", "set", "--project", "mixed_precision=bf16").returncode == 0
    assert f"mixed_precision\tbf16\tproject: {cwd}/accel.yaml:3" in typed("config", "show").stdout
    assert "(project)" in typed("config", "list").stdout


def test_getting_a_section_is_an_error_that_names_a_key(typed):
    for section, key in (
        ("env", "env.NAME"),
        ("launcher", "launcher.kind"),
        ("parallel", "parallel.dp_shard"),
    ):
        result = typed("config", "get", section)
        assert result.returncode == 2
        assert f"get: {section}: this is a section. Name a key of it, such as {key}" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("set", "resume=true"),
        ("unset", "device"),
        ("edit",),
        ("default", "--force"),
        ("import", "x.yaml", "--force"),
    ],
)
def test_a_project_file_that_other_users_could_have_written_is_not_changed(typed, cwd, command):
    text = "schema_version: 1\ndevice: cpu\nenv:\n  PYTHONPATH: planted\n"
    (cwd / "x.yaml").write_text("schema_version: 1\n")
    path = cwd / "accel.yaml"
    path.write_text(text)
    path.chmod(0o666)
    result = typed("config", *command, "--project", env={**os.environ, "VISUAL": "true"})
    assert (result.returncode, path.read_text()) == (2, text)
    assert (
        f"Cannot change {path}: every user can write {path}. Set ACCEL_TRUSTED_PROJECTS={cwd}"
        in result.stderr
    )
    trusted = {**os.environ, "ACCEL_TRUSTED_PROJECTS": str(cwd)}
    assert typed("config", "set", "--project", "resume=true", env=trusted).returncode == 0


def test_all_mistakes_of_a_file_are_reported_with_their_lines(typed, cwd):
    (cwd / "x.yaml").write_text(
        "schema_version: 1\ndevise: cpu\nlauncher:\n  kind: torchrun\n  nproc_per_node: 0\n"
    )
    result = typed("config", "validate", "x.yaml")
    assert result.returncode == 2
    assert "x.yaml:2: devise: unknown key (did you mean device?)" in result.stderr
    assert "x.yaml:5: launcher.nproc_per_node: expected at least 1 or auto, got 0" in result.stderr


def test_the_schema_is_written_beside_the_profiles(typed, home, machine):
    schema = json.loads(typed("config", "schema").stdout)
    assert schema["required"] == ["schema_version"]
    typed("config", "default")
    assert json.loads((home / "profiles" / ".accel.schema.json").read_text()) == schema


def test_config_edit_keeps_the_profile_unless_the_new_text_is_valid(typed, home, script):
    typed("config", "set", "device=cpu")
    path = home / "profiles" / "default.yaml"
    editor = script(
        "import sys; p = sys.argv[2]; t = open(p).read().replace('cpu', sys.argv[1]); open(p, 'w').write(t)",
        "ed.py",
    )

    def edit(word):
        return typed(
            "config",
            "edit",
            env={**os.environ, "VISUAL": "", "EDITOR": f"'{sys.executable}' '{editor}' {word}"},
        )

    assert edit("cuda").returncode == 0
    assert "device: cuda" in path.read_text()
    typed("config", "set", "device=cpu")
    refused = edit("gpu")
    assert refused.returncode == 2
    assert "default.yaml:3: device: expected auto, cpu, cuda, mps, xla or xpu, got 'gpu'" in refused.stderr
    assert "default.yaml is unchanged" in refused.stderr
    assert "device: cpu" in path.read_text()
    assert "is unchanged" in edit("cpu").stderr


@pytest.mark.parametrize(
    ("editor", "reason"),
    [("no-such-editor -w", "No such file or directory"), ("vi '", "No closing quotation")],
)
def test_an_editor_that_does_not_start_is_reported(typed, editor, reason):
    typed("config", "set", "device=cpu")
    result = typed("config", "edit", env={**os.environ, "VISUAL": editor})
    assert result.returncode == 2
    assert f"Cannot start the editor {editor!r}: {reason}. Set VISUAL or EDITOR" in result.stderr


def test_a_profile_that_is_not_text_is_not_opened_in_an_editor(typed, home):
    typed("config", "set", "device=cpu")
    (home / "profiles" / "default.yaml").write_bytes(b"\xff\xfe")
    result = typed("config", "edit", env={**os.environ, "VISUAL": "true"})
    assert (result.returncode, "it is not UTF-8 text" in result.stderr) == (2, True)


def test_an_accelerate_file_is_imported_and_unused_keys_are_reported(typed, cwd, home):
    (cwd / "old.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 1\n"
        "mixed_precision: bf16\nuse_cpu: true\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"
    )
    result = typed("config", "import", "old.yaml", "--profile", "old")
    assert result.returncode == 0, result.stderr
    assert "num_processes: 4\tlauncher.nproc_per_node: 4" in result.stdout
    assert "dynamo_config.dynamo_backend: INDUCTOR" in result.stdout
    profile = resolve([read_file(home / "profiles" / "old.yaml", "file")]).profile
    assert (profile.launcher.nproc_per_node, profile.device, profile.mixed_precision) == (4, "cpu", "bf16")


def test_a_profile_of_accel_is_imported_with_its_comments(typed, home):
    source = Path(__file__).parents[2] / "configs" / "cpu.yaml"
    assert typed("config", "import", source, "--profile", "cpu").returncode == 0
    assert (home / "profiles" / "cpu.yaml").read_text() == source.read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "--profile", "gone"), "Profile 'gone' (from --profile) not found"),
        (("path", "--profile", "a/b"), "Invalid profile name"),
        (("path", "--profile", "a", "--project"), "Pass either --profile or --project"),
        (("validate",), "Profile not found: "),
        (("validate", "gone.yaml"), "Profile not found: gone.yaml. Existing profiles: none."),
        (("validate", "."), "Cannot read .: Is a directory"),
        (("edit",), "Profile not found: "),
        (("set", "=1"), "invalid assignment '=1'"),
        (("set", "nonsense"), "set: invalid assignment 'nonsense': expected KEY=VALUE"),
        (("import", "gone.yaml"), "Cannot read gone.yaml: No such file or directory"),
        (("delete", "gone"), "Profile not found: "),
        (("--profile", "x", "show"), "Options belong after the subcommand"),
        (("--default",), "No such option: --default. See accel config --help."),
    ],
)
def test_invalid_input_is_one_message_with_exit_code_2(typed, home, args, message):
    result = typed("config", *args)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not home.exists()


def test_validate_without_a_profile_names_the_project_file(typed, cwd):
    (cwd / "accel.yaml").write_text("schema_version: 1\n")
    for arguments, is_named in (((), True), (("--profile", "gone"), False), (("gone.yaml",), False)):
        result = typed("config", "validate", *arguments)
        assert (result.returncode, f"Use --project for {cwd}/accel.yaml." in result.stderr) == (2, is_named)


@pytest.mark.parametrize("name", ["accel.yaml", "profiles/default.yaml"])
def test_a_broken_link_to_a_profile_is_not_ignored(typed, cwd, home, name):
    path = (home if "/" in name else cwd) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("absent.yaml")
    result = typed("config", "show")
    assert result.returncode == 2
    assert f"Cannot read {path}, a link to absent.yaml: No such file or directory. Correct" in result.stderr


def test_a_file_with_many_mistakes_is_rejected_by_its_first_lines(typed, cwd, monkeypatch):
    (cwd / "much.yaml").write_text("schema_version: 1\n" + "".join(f"key{n}: 1\n" for n in range(500)))
    searches = []
    monkeypatch.setattr(
        "accel_cli.profile.validation_errors.find_nearest", lambda *arguments: searches.append(arguments)
    )
    result = typed("config", "validate", "much.yaml")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "... and 450 more"
    assert "much.yaml:2: key0: unknown key" in result.stderr
    assert len(searches) <= 2 * 50  # each takes a third of a millisecond


@pytest.mark.parametrize("command", [("config", "show"), ("launch", "--cpu", "/train.py"), ("env",)])
def test_a_deleted_working_directory_is_one_message(typed, cwd, command):
    cwd.joinpath(".git").rmdir()
    cwd.rmdir()
    result = typed(*command)
    assert result.returncode in {1, 2}
    assert "Traceback" not in result.stderr
    assert command[0] == "launch" or "The working directory no longer exists" in result.stderr


def test_closed_standard_streams_are_replaced_by_dev_null(cwd, script):
    script(
        "import os\nopen('told', 'w').write(str([os.path.exists(f'/proc/self/fd/{n}') for n in range(3)]))\n"
    )
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "train.py"]
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=False, timeout=limit(200)
    )
    assert result.returncode == 0
    assert (cwd / "told").read_text() == "[True, True, True]"


def test_a_command_whose_reader_has_ended_exits_without_a_message():
    """As in `accel config path | true`: Python itself would print an error and exit with code 120."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "accel_cli", "config", "path"]
    try:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        result = subprocess.run(
            command, check=False, stdout=write, stderr=subprocess.PIPE, env=environ, timeout=limit(60)
        )
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize("command", [("config", "show"), ("launch", "--dry-run", "train.py"), ("stacks",)])
def test_a_user_without_a_home_directory_gets_an_error_with_the_variable_to_set(
    typed, script, monkeypatch, command
):
    def find_no_account(uid):
        raise KeyError(uid)

    script("")
    monkeypatch.setattr("pwd.getpwuid", find_no_account)
    environ = {name: value for name, value in os.environ.items() if name not in {"HOME", "ACCEL_HOME"}}
    environ = {name: value for name, value in environ.items() if not name.startswith("XDG_")}
    result = typed(*command, env=environ)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "accel: error: Cannot determine the home directory of this user. Set HOME or ACCEL_HOME.\n"
    )


def test_an_unwritable_home_is_reported(typed, tmp_path):
    (tmp_path / "file").write_text("")
    result = typed("config", "set", "device=cpu", env={**os.environ, "ACCEL_HOME": str(tmp_path / "file")})
    assert result.returncode == 2
    assert ": Not a directory." in result.stderr


def test_env_prints_facts_for_a_bug_report_without_secrets(typed, machine):
    added = {"TORCH_API_TOKEN": "hunter2", "NCCL_DEBUG": "WARN", "ACCELERATE_USE_CPU": "true"}
    environ = {**os.environ, **added}
    facts = json.loads(run_accel("env", "--json", env=environ).stdout)
    assert set(facts) == {
        *("system", "packages", "libraries", "devices", "tpu", "aws", "profile", "variables")
    }
    assert facts["libraries"]["transformers"] == version("transformers")
    assert "not installed" not in facts["libraries"].values()
    assert facts["variables"]["ACCELERATE_USE_CPU"] == "true"
    assert facts["variables"]["NCCL_DEBUG"] == "WARN"
    assert facts["variables"]["TORCH_API_TOKEN"] == "***"
    assert facts["profile"]["launcher.kind"] == "single  [detected]"
    result = typed("env", env=environ)
    assert result.returncode == 0
    assert "hunter2" not in result.stdout


@pytest.mark.full
def test_env_describes_a_tpu_and_its_missing_packages(accel):
    hosts = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
    facts = json.loads(accel("env", "--json", env=os.environ | {"PJRT_DEVICE": "TPU"} | hosts).stdout)
    tpu = facts["tpu"]
    assert (tpu["chips"], tpu["PJRT_DEVICE"]) == ("TPU (PJRT_DEVICE=TPU)", "TPU")
    assert tpu["hosts"] == "2, this is number 1 (TPU_WORKER_*)"
    assert "torch-xla[tpu]==2.9.0" in tpu["torch_xla"]
    assert facts["variables"]["TPU_WORKER_ID"] == "1"
    without = json.loads(accel("env", "--json").stdout)["tpu"]
    assert (without["chips"], without["PJRT_DEVICE"]) == ("none", "not set")


def test_env_names_the_aws_profile_without_keys(typed, machine, tmp_path):
    (tmp_path / "config").write_text("[profile team]\nregion = eu-central-1\n")
    (tmp_path / "keys").write_text(
        "[team]\naws_access_key_id = AKIAHUNTER\naws_secret_access_key = hunter2\n"
    )
    environ = {**{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
               "AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
               "AWS_SESSION_TOKEN": "hunter2"}  # fmt: skip
    result = typed("env", "--json", env={**environ, "AWS_PROFILE": "team"})
    assert json.loads(result.stdout)["aws"] == {"profile": "team", "region": "eu-central-1"}
    assert "hunter" not in result.stdout.lower()
    unknown_profile = json.loads(typed("env", "--json", env={**environ, "AWS_PROFILE": "taem"}).stdout)["aws"]
    assert "it has team" in unknown_profile


def test_env_works_with_an_invalid_profile(typed, home, machine):
    path = home / "profiles" / "default.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("schema_version: 1\ndevice: gpu\n")
    facts = json.loads(typed("env", "--json").stdout)
    assert facts["profile"].startswith("invalid: ")
    assert "default.yaml:2: device" in facts["profile"]


@pytest.mark.parametrize(
    ("count", "precision"),
    [
        pytest.param(2, "fp16", marks=pytest.mark.slow),
        *(pytest.param(2, precision, marks=pytest.mark.full) for precision in ("no", "bf16")),
        *(pytest.param(1, precision, marks=pytest.mark.full) for precision in ("no", "bf16", "fp16")),
    ],
)
def test_the_self_check_passes_on_this_machine(typed, cwd, count, precision):
    typed("config", "set", f"mixed_precision={precision}")
    result = commands.run_accel("test", "--nproc-per-node", count, cwd=cwd)
    assert result.returncode == 0, result.stderr
    checks = re.findall(r"^(ok|FAILED) +(\w+):", result.stdout, re.MULTILINE)
    names = ("nodes", "processes", "collectives", "gradients", "evaluation", "precision")
    assert checks == [("ok", name) for name in names]
    assert result.stdout.splitlines()[-1] == "everything works here"
