"""Targets of a launch that cannot run are refused before anything starts."""

import os

import pytest
from support.launchers import plans

from accel_cli.commands.target import check_target
from accel_cli.errors import UsageError
from accel_cli.planning.launch_options import Request


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("gone.py", "script", "Script not found: gone.py. Check its path."),
        ("trian.py", "script", "Did you mean train.py?"),
        (".", "script", "Cannot run .: it is a directory"),
        ("no_such_module_x", "module", "Module not found: 'no_such_module_x'"),
        ("no-such-program-x", "program", "Program not found: 'no-such-program-x'"),
        ("", "script", "Cannot run '': the name is empty."),
        ("nb.ipynb", "script", "Cannot run nb.ipynb: a notebook is not a script."),
    ],
)
def test_a_target_that_cannot_run_is_an_error(cwd, target, kind, message):
    (cwd / "train.py").write_text("")
    with pytest.raises(UsageError) as caught:
        check_target(Request(target, kind=kind))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "#!/bin/sh\r\n",
            r"Cannot run ./run: its lines end as on Windows, .* is '/bin/sh\\r'. Convert it: sed -i",
        ),
        ("#! /usr/bin/env python -u\r\n", r"is '/usr/bin/env python -u\\r'"),
        (
            "#!/no/such/python -u\n",
            "the interpreter in its first line, '/no/such/python', does not exist. Correct",
        ),
    ],
)
def test_a_program_whose_interpreter_does_not_exist_is_an_error(cwd, line, message):
    (cwd / "run").write_text(f"{line}echo\n", newline="")
    (cwd / "run").chmod(0o755)
    with pytest.raises(UsageError, match=message):
        check_target(Request("./run", kind="program"))
    (cwd / "run").write_text("#!/usr/bin/env sh\necho\n")
    check_target(Request("./run", kind="program"))


@pytest.mark.parametrize(
    ("target", "kind"),
    [("train.py", "script"), ("json.tool", "module"), ("train", "module"), ("sh", "program")],
)
def test_targets_that_can_run_are_accepted(cwd, target, kind):
    (cwd / "train.py").write_text("")
    check_target(Request(target, kind=kind))


def test_a_script_that_is_a_pipe_is_for_one_process_and_is_not_opened(cwd):
    os.mkfifo("pipe.py")
    check_target(Request("pipe.py", kind="script"))  # opening it would block
    plans.prepare(Request("pipe.py", options={"cpu": True}), os.environ)
    with pytest.raises(
        UsageError,
        match=r"Cannot run pipe.py in several processes: it is a pipe, which only one can read\. Save it",
    ):
        plans.prepare(Request("pipe.py", options={"cpu": True, "nproc_per_node": "2"}), os.environ)
