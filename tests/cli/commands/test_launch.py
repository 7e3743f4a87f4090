"""`accel launch` names its own options where they stand after the script."""

from functools import partial

import pytest
from in_process import run

PRINTS = "import sys\nprint(sys.argv)\n"


@pytest.fixture
def stderr_of(cwd, capfd):
    """Calls `accel launch --dry-run`, and returns what it wrote to stderr."""
    typed = partial(run, capfd)
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
def test_options_after_the_script_are_named(script, stderr_of, args, named):
    script(PRINTS)
    target = next(arg for arg in args if arg.startswith("train"))
    assert stderr_of(*args) == (
        f"accel: options after {target} go to it, not to accel launch: {named}. To give them to accel launch, put them "
        f"before {target}; to leave out this line, put -- before {target}.\n"
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
def test_arguments_that_are_surely_the_scripts_are_not_named(script, stderr_of, args):
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
def test_an_option_that_the_script_declares_too_is_not_named(script, stderr_of, declares):
    script(declares)
    assert stderr_of("train.py", "--log-dir", "logs") == ""


def test_a_method_of_the_same_name_declares_no_option(script, stderr_of):
    script("model.cpu()\nif args.log_directory == cpu:\n    pass\n")
    assert "not to accel launch: --cpu, --log-dir. " in stderr_of("train.py", "--cpu", "--log-dir", "x")
