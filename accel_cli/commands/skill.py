"""`accel skill`: what a coding agent has to know about the installed version, in the form of a skill.

The commands and their options are those of the help. A test runs each command of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from accel_cli.profile.options import OPTIONS

__all__ = ["app", "build_skill"]

app = typer.Typer()

_SKILL = """\
---
name: accel
description: Run PyTorch training scripts with accel {version} (`accel launch`) on one or several processes, read why a run failed, follow its progress, resume it, and find settings. Use when a task runs, debugs or submits PyTorch training.
---

# accel {version}

`accel launch` runs a PyTorch script, unchanged, on one process or many: it starts the ranks, names the rank and the line that failed, and
keeps a folder of each run. The script needs no prints for it. `accel COMMAND --help` has all options of a command.

## Run

A small script to try it with:

```python title="skill_train.py"
import argparse

import torch

from accel_runtime import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()
accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), data)
for epoch in range(args.epochs):
    for batch in data:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print("epoch", epoch)
```

```console
$ accel launch --dry-run --cpu --nproc-per-node 2 skill_train.py --epochs 2
...
$ accel launch --cpu --nproc-per-node 2 skill_train.py --epochs 2
accel: torchrun, 2 processes, cpu, ...
epoch 0
epoch 1
accel: 2 processes finished in ..., exit code 0; logs: ...
```

- Options of `accel launch` stand before the script; everything after it goes to the script.
- `--dry-run` prints what would start, and `--explain` also where each value comes from. Neither starts a process.
- Lines that begin with `accel:` are the launcher's, on standard error. Everything else is the script's output, by default of rank 0.
- Do not start ranks yourself, and do not set RANK, WORLD_SIZE or MASTER_ADDR.
- Keys of a profile are set for one run by `--set launcher.KEY=VALUE`; a misspelt key is refused with the nearest one.

{options}

## Read a failure

```python title="skill_broken.py"
import os

if os.environ["RANK"] == "1":
    raise ValueError("no data")
```

```console
$ accel launch --cpu --nproc-per-node 2 skill_broken.py  # exit 1
...
accel: error: rank 1 of 2 on ... (pid ...): ValueError: no data
accel: 2 processes ended after ... with exit code 1; logs: ...
$ accel logs --rank 1
...ValueError: no data
$ accel runs -n 1 --json
...
```

- The last `accel: error:` line is the root cause: rank, machine and exception, below the traceback. Failures that follow from it are left out.
- A message of accel has the form `what failed: why. what to do.` Do what its last sentence says.

{exit_codes}

## Watch and stop

```console
$ accel launch --cpu --nproc-per-node 2 --progress-line 1 --progress-file progress.json skill_train.py --epochs 3
accel: torchrun, 2 processes, cpu, ...
...
accel: step 12, succeeded
accel: 2 processes finished in ..., exit code 0; logs: ...
$ cat progress.json
{{"time": ..., "state": "succeeded", "exit_code": 0, ...}}
```

- A long run: start it in the background with `--progress-file FILE.json`, and read the file; `accel top --json` prints one snapshot of the run in progress.
- `accel stacks` shows what every rank of a run does now: use it before you kill a run that seems to hang. `--stall-timeout 600` does so by itself.
- Stop a run by one SIGINT or SIGTERM to `accel launch`: the ranks get time to save.
- `--resume` continues from the newest complete checkpoint, if the script calls `accelerator.resume()`.

From Python: `accel_cli.launch("train.py", args, nproc_per_node=2)` returns the exit code, the reason of a failure, the run and its last metrics.

## Commands

{commands}
"""


@app.command(
    "skill",
    hidden=True,
    rich_help_panel="Set up",
    epilog="Example: accel skill > .claude/skills/accel/SKILL.md",
)
def skill(context: typer.Context) -> None:
    """Print a skill for coding agents: what to run, and how to read failures."""
    from accel_cli import console

    console.plain(build_skill(context.find_root().command).rstrip("\n"))


def build_skill(command: Any) -> str:
    """Return the skill of the installed version.

    Args:
        command: The command `accel` with all commands below it.
    """
    from accel_runtime.environment.settings import __version__

    return _SKILL.format(
        version=__version__,
        options=_join_rows("Option of `accel launch`", _list_options()),
        exit_codes=_join_rows("Exit code", _list_exit_codes()),
        commands=_join_rows("Command", _list_commands(command)),
    )


def _join_rows(title: str, rows: Iterator[tuple[str, str]]) -> str:
    lines = (f"| {name} | {text} |" for name, text in rows)
    return "\n".join([f"| {title} | |", "| --- | --- |", *lines])


def _list_options() -> Iterator[tuple[str, str]]:
    for option in OPTIONS.values():
        yield f"`{f'{option.flag} {option.metavar}'.strip()}`", option.help.replace("|", "\\|")


def _list_exit_codes() -> Iterator[tuple[str, str]]:
    from accel_cli import errors

    yield "0", "the run has succeeded"
    yield "2", "accel refused the command before a process started (or the script itself exited with 2)"
    yield str(errors.StalledError.exit_code), "the run made no progress, with `--stall-action fail`"
    yield (
        "128 + N",
        "signal N ended the run: 130 Ctrl-C, 143 SIGTERM, 137 SIGKILL, often of the kernel for lack of memory",
    )
    yield "other", "that of the script"


def _list_commands(command: Any) -> Iterator[tuple[str, str]]:
    context = typer.Context(command, info_name="accel")
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        summary = (found.help or "").partition("\n\n")[0].replace("\n", " ")
        below = f" ({', '.join(found.list_commands(context))})" if hasattr(found, "list_commands") else ""
        yield f"`accel {name}`", f"{summary}{below}"
