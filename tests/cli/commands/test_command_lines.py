"""Command lines that are rejected: one message each."""

import pytest
from support.processes.commands import call_accel


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "runs --jso": "No such option: --jso (Possible options: --json). See accel runs --help.",
        "runs --num_ranks 2": "No such option: --num-ranks. See accel runs --help.",
        "runs -Z": "No such option: -Z. See accel runs --help.",
        "runs x y": "Got unexpected extra argument(s) (x y). See accel runs --help.",
        "logs -n 5": "No such option: -n. See accel logs --help.",
        "config import x --sharding bad": "Invalid --sharding 'bad': expected fully_shard or deepspeed.",
        "env x": "Got unexpected extra argument(s) (x). See accel env --help.",
        "runs --json=1": "Option '--json' does not take a value. See --help.",
        "runs -n": "Option '-n' requires an argument. See --help.",
        "runs -n 1.5": "Invalid value for '-n': expected a whole number, got '1.5'. See accel runs --help.",
        "logs --rank x": "Invalid value for '--rank': expected a whole number, got 'x'. See accel logs --help.",
        "estimate m:f --headroom=91": "Invalid value for '--headroom': expected at most 90, got '91'. See accel estimate --help.",
        "estimate m:f --dtype fp8": "Invalid value for '--dtype': 'fp8' is not one of 'bf16', 'fp16', 'fp32'. See accel estimate --help.",
        "launch --nproc-per-node train.py": "Missing argument 'SCRIPT': train.py is taken as the value of --nproc-per-node. Write --nproc-per-node VALUE train.py.",
        "config set": "Missing argument 'KEY=VALUE'. See accel config set --help.",
        "checkpoint export": "Missing option '--output' / '-o'. See accel checkpoint export --help.",
        "lunch": "No such command 'lunch'. Did you mean 'launch'? See accel --help.",
        "config sett": "No such command 'sett'. Did you mean 'set', 'unset'? See accel config --help.",
        "jobs x": "No such command 'x'. See accel jobs --help.",
    }.items(),
)
def test_a_rejected_command_line_is_one_message(capfd, home, line, message):
    result = call_accel(capfd, *line.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"accel: error: {message}\n")


def test_a_group_without_a_command_prints_its_help(capfd, home):
    result = call_accel(capfd, "jobs")
    assert (result.returncode, result.stderr) == (2, "")
    assert "Usage: accel jobs [OPTIONS] COMMAND [ARGS]..." in result.stdout
