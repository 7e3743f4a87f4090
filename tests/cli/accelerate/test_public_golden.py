"""Recorded config files and commands of public documentation, and what accel makes of them, compared with golden files.

Of each file: the profile and the lines of `accel config import`, the values and the plan under `--config-file`, and all
variables of Accelerate that a rank gets. Of each command: the translated command, the plan and the variables.
"""

import json
import re
import shlex
from pathlib import Path

from support.cases import golden

from accel_cli.accelerate.config_conversion import convert, find_engine, find_engine_file, read_engine_file
from accel_cli.accelerate.config_file import build_config
from accel_cli.errors import ProfileError, UsageError
from accel_cli.profile import yaml_io
from tests.cli.accelerate.test_config_file import FILES, prepare, select_variables
from tests.cli.accelerate.test_foreign_options import COMMANDS, launch
from tests.cli.accelerate.test_import_golden import ZERO_2

__all__ = ["launch"]

MORE = {
    "own-early-compiler": {"distributed_type": "MULTI_GPU", "num_processes": 2, "dynamo_backend": "INDUCTOR", "fp16": True},
    "own-fsdp-on-one-gpu": {"distributed_type": "NO", "fsdp_config": {"fsdp_version": 2}, "mixed_precision": "bf16"},
    "own-deepspeed-clipped": {
        "distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "fp16",
        "deepspeed_config": {"zero_stage": 1, "gradient_clipping": 0.5, "gradient_accumulation_steps": 4, "offload_optimizer_device": "cpu"},
    },
    "own-megatron": {
        "distributed_type": "MEGATRON_LM", "num_processes": 4, "mixed_precision": "bf16",
        "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_recompute_activations": True},
    },
}  # fmt: skip
UNRELATED = re.compile(
    r"(elastic agent|command|start method):|  (run_id|process_group_timeout|m\w+_(restarts|interval)|\w+_timeout|ranks|stall_action|keep_\w+|and \d+)"
)
"""Lines of a plan that no option of another launcher changes."""


def test_recorded_files_become_the_same_profiles_plans_and_variables(tmp_path, monkeypatch):
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for entry in FILES.values():
        if name := (entry["file"].get("deepspeed_config") or {}).get("deepspeed_config_file"):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(json.dumps(ZERO_2))
    files = {**{name: entry["file"] for name, entry in FILES.items()}, **MORE}
    text = "\n".join(f"=== {name}\n{describe_file(file)}" for name, file in files.items())
    golden.check("accelerate/files.txt", text.replace(str(tmp_path), "FOLDER"))


def describe_file(file):
    engine = find_engine(file)
    sections = ["fully_shard", *([engine.name] if engine else [])]
    return "".join([*(describe_import(file, section) for section in sections), describe_launch(file)])


def describe_import(file, section):
    folder = Path()
    try:
        result = convert(
            file,
            "config.yaml",
            read_engine_file(file, folder),
            engine_path=find_engine_file(file, folder),
            section=section,
        )
    except ProfileError as error:
        return f"import to {section}:\n" + "".join(f"  ! {problem}\n" for problem in error.problems)
    lines = [f"  + {line} -> {text}" for line, text in result.mapped]
    lines += [f"  - {line} -> {text}" for line, text in result.left]
    return "\n".join([f"import to {section}:", *lines, f"  = {yaml_io.inline(result.data)}", ""])


def describe_launch(file):
    try:
        config = build_config(file, "config.yaml", Path())
        _, plan = prepare(file)
    except UsageError as error:
        return f"launch:\n  ! {error}\n"
    lines = [f"  {key}: {value}" for key, value in config.values.items() if not key.startswith("env.")]
    lines += [f"  fixed: {config.fixed_reason}"] if config.fixed_reason else []
    lines += [f"  unused: {line} ({reason})" for line, reason in config.unused]
    lines += [f"  {name} is replaced by {key}" for name, key in sorted(config.replaced_by.items())]
    lines += [f"  plan: {plan.launcher} of {plan.nproc_per_node}, {plan.device}, {plan.layout or 'replicas'}"]
    lines += [f"  {name}={value}" for name, value in sorted(select_variables(plan.env).items())]
    return "\n".join(["launch:", *lines, ""])


def test_commands_of_public_documentation_become_the_same_commands(launch, cwd, monkeypatch, capfd):
    text = "".join(f"$ {command}\n{run_command(launch, command)}\n" for _, command in COMMANDS)
    golden.check("accelerate/commands.txt", text.replace(str(cwd), "FOLDER"))


def run_command(launch, command):
    *_, words = command.partition("launch ") if "launch" in command else command.partition("torchrun ")
    args = shlex.split(words)
    script = next(word for word in args if word.endswith(".py"))
    Path(script).parent.mkdir(parents=True, exist_ok=True)
    Path(script).write_text("")
    result = launch(*args)
    kept = [line for line in result.stdout.splitlines() if not UNRELATED.match(line)]
    return "\n".join([*result.stderr.splitlines(), *kept, f"exit code {result.returncode}"])
