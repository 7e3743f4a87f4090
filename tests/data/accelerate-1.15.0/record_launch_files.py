"""Records the variables that `accelerate launch` 1.15.0 sets for the config files in launch_files.json.

Run it with Accelerate 1.15.0 and torch in an environment of its own; the file is updated in place.
"""

import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import yaml
from accelerate.commands import launch
from accelerate.utils import launch as prepare

RECORDED = Path(__file__).with_name("launch_files.json")
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


def record(data):
    """Return the variables of Accelerate that its launcher sets for a config file."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        # A number of processes is required if the file has none.
        count = ["--num_processes", "2"] if "num_processes" not in data else []
        args = launch.launch_command_parser().parse_args(["--config_file", str(path), *count, "train.py"])

        def keep(env):
            found.update({name: value for name, value in env.items() if name.startswith(PREFIXES)})

        with (
            mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}, clear=True),
            mock.patch.object(prepare, "is_port_in_use", return_value=False),
            mock.patch.object(prepare, "is_fp8_available", return_value=True),
            mock.patch.object(
                launch, "simple_launcher", lambda args: keep(prepare.prepare_simple_launcher_cmd_env(args)[1])
            ),
            mock.patch.object(
                launch, "multi_gpu_launcher", lambda args: keep(prepare.prepare_multi_gpu_env(args))
            ),
            mock.patch.object(
                launch, "deepspeed_launcher", lambda args: keep(prepare.prepare_deepspeed_cmd_env(args)[1])
            ),
        ):
            launch.launch_command(args)
    return found


if __name__ == "__main__":
    entries = json.loads(RECORDED.read_text())
    for entry in entries.values():
        entry["variables"] = dict(sorted(record(entry["file"]).items()))
    RECORDED.write_text(json.dumps(entries, indent=1) + "\n")
