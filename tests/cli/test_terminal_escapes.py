"""Names and texts of other people cannot control the terminal of a command."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes.commands import call_accel

from accel_cli import console
from accel_cli.runs.run_dir import RunFolder
from accel_runtime.environment.text import decode_text, encode_text, escape_controls, parse_json

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b2J\r\u202eb\ud800\udcff"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
TEXT = st.text(st.characters(codec=None), max_size=50)


@given(text=TEXT)
def test_a_message_has_no_control_characters(text):
    assert not CONTROL.search(escape_controls(text))
    assert not re.search(r"[\t\n]", escape_controls(text, keep_lines=False))
    assert escape_controls("train.py\n\tü") == "train.py\n\tü"


@given(text=TEXT, data=st.binary(max_size=50))
def test_text_and_bytes_survive_a_file_and_a_process(text, data):
    assert encode_text(decode_text(data)) == data
    assert isinstance(decode_text(encode_text(text)), str)
    if not re.search("[\ud800-\udfff]", text):
        assert decode_text(encode_text(text)) == text


def test_json_that_is_nested_too_deeply_is_invalid():
    for depth in (101, 900, 100_000):
        with pytest.raises(ValueError, match="nested more than 100 levels deep"):
            parse_json("[" * depth + "]" * depth)
    assert parse_json(json.dumps([[[]]] * 500)) == [[[]]] * 500


def check_output(result):
    assert not CONTROL.search(result.stdout), ascii(result.stdout)
    assert not CONTROL.search(result.stderr), ascii(result.stderr)
    return result


def test_every_function_of_the_console_escapes_control_characters(capfd):
    console.note(HOSTILE)
    console.error(HOSTILE)
    console.plain(HOSTILE)
    console.show(HOSTILE.replace("[", ""))
    console.print_json({HOSTILE: HOSTILE})
    console.print_problem(HOSTILE)
    console.print_failure(HOSTILE, [HOSTILE], HOSTILE)
    console.table((HOSTILE,), [(HOSTILE,)])
    with console.spinner(HOSTILE.replace("[", "")):
        pass
    out, err = capfd.readouterr()
    assert r"\x1b[2J" in out
    assert not CONTROL.search(out + err), ascii(out + err)


def test_the_names_in_a_checkpoint_are_escaped(handmade, tmp_path, capfd):
    path = tmp_path / f"checkpoint_1{HOSTILE.replace('/', '')[:-2]}"
    handmade.write(path, {"model" + HOSTILE[:-2]: {"w" + HOSTILE[:-2]: torch.ones(3)}}, step=1)
    (path / f"extra{HOSTILE[:-2]}").touch()
    for command in ("list", "show --tensors", "verify", "export -o out.safetensors"):
        first, *options = command.split()
        target = tmp_path if first == "list" else path
        check_output(call_accel(capfd, "checkpoint", first, target, *options))


def test_the_names_of_files_are_escaped_in_migrate(tmp_path, capfd):
    name = tmp_path / f"{HOSTILE[:-2]}\nx.py"
    name.write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    (tmp_path / f"bad{HOSTILE[:-2]}.py").write_text("def\n")
    for options in ((), ("--write",)):
        result = check_output(call_accel(capfd, "migrate", tmp_path, *options))
        assert r"\nx.py" in result.stdout + result.stderr


def test_arguments_and_variables_are_escaped_in_a_dry_run(tmp_path, capfd):
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    for launcher in ("torchrun", "single", "slurm"):
        options = (
            "--set",
            f"launcher.kind={launcher}",
            "--dry-run",
            "--explain",
            "--set",
            "env.NAME=\x1b[2J",
        )
        result = check_output(call_accel(capfd, "launch", *options, script, HOSTILE[:-2]))
        assert result.returncode == 0


def test_the_command_of_a_dry_run_is_the_one_of_the_launch_in_bash(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.touch()
    result = call_accel(capfd, "launch", "--set", "launcher.kind=torchrun", "--dry-run", script, HOSTILE[:-2])
    command = result.stdout.partition("command: ")[2].splitlines()[0]
    words = command.partition(f"{script} ")[2]
    printed = subprocess.run(["bash", "-c", f"printf %s {words}"], capture_output=True, check=True).stdout
    assert printed.decode() == HOSTILE[:-2]


def test_the_record_of_a_run_is_escaped(tmp_path, capfd):
    fields = {"target": HOSTILE, "arguments": [HOSTILE], "exit_code": 1, "launcher": HOSTILE, "host": HOSTILE}
    run = RunFolder.create(tmp_path, "train.py", fields)
    run.update(fields)
    run.get_rank(0, 0).path.mkdir(parents=True)
    run.get_rank(0, 0).metrics.write_text(json.dumps({"step": 1, "values": {HOSTILE: 1.0}}) + "\n")
    (run.path / "events.jsonl").write_text(
        json.dumps({"event": "failure", "rank": HOSTILE, "cause": HOSTILE}) + "\n"
    )
    for command in (("runs",), ("top", run.path.name)):
        assert check_output(call_accel(capfd, *command, "--log-dir", tmp_path)).returncode == 0


def run_on_terminal(*args):
    """Run `accel` on a terminal, and return what the terminal received."""
    local_end, remote_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    command = [sys.executable, "-m", "accel_cli", *args]
    process = subprocess.Popen(
        command, stdin=remote_end, stdout=remote_end, stderr=remote_end, env=environment
    )
    os.close(remote_end)
    output = b""
    with os.fdopen(local_end, "rb", 0) as terminal:
        try:
            while chunk := terminal.read(4096):
                output += chunk
        except OSError:  # the other end is closed
            pass
    process.wait()
    return output


def test_the_view_of_a_run_has_colours_and_no_escapes_of_names_on_a_terminal(tmp_path):
    fields = {"target": HOSTILE, "exit_code": 1}
    run = RunFolder.create(tmp_path, "train.py", fields)
    run.update(fields)
    output = run_on_terminal("top", run.path.name, "--log-dir", tmp_path)
    assert b"\x1b[31mexit code 1" in output
    assert b"\\x1b" not in output
    assert b"\x1b]0;" not in output


def test_a_terminal_gets_the_escape_sequences_of_accel_only(tmp_path):
    """Colours stay; the names of files are escaped."""
    script = tmp_path / f"{HOSTILE[:-2]}.py"
    script.write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    output = run_on_terminal("migrate", script)
    assert set(re.findall(rb"\x1b[^m]*m?", output)) <= {
        b"\x1b[1;31m",
        b"\x1b[2m",
        b"\x1b[0m",
        b"\x1b[31m",
        b"\x1b[32m",
        b"\x1b[36m",
    }
    assert b"\x1b[32m" in output
