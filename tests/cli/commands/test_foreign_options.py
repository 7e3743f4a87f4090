"""Options in the spelling of torchrun and Accelerate are accepted, or rejected with their replacement.

`tests/cli/accelerate/test_foreign_options.py` has the options that are translated.
"""

import re
from functools import partial

import pytest
from support.processes.commands import call_accel

from accel_cli.main import accel
from accel_cli.planning.launch_options import find_foreign_option, list_foreign_options, normalize_option
from accel_cli.profile.options import OPTIONS
from accel_cli.profile.schema import known_keys

TORCHRUN = """
    nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts monitor_interval
    start_method event_log_handler role module no_python run_path log_dir redirects tee local_ranks_filter node_rank
    master_addr master_port local_addr logs_specs numa_binding duplicate_stdout_filters duplicate_stderr_filters
    signals_to_handle virtual_local_rank
"""
ACCELERATE = """
    config_file quiet cpu multi_gpu tpu mixed_precision num_processes num_machines num_cpu_threads_per_process
    enable_cpu_affinity dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic use_deepspeed use_fsdp
    dynamo_use_regional_compilation use_parallelism_config use_megatron_lm same_network machine_rank
    main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf max_restarts monitor_interval module
    no_python tpu_cluster no_tpu_cluster tpu_use_sudo vm env main_training_function downcast_bf16 deepspeed_config_file
    zero_stage offload_optimizer_device offload_param_nvme_path gradient_accumulation_steps gradient_clipping
    zero3_init_flag deepspeed_hostfile fsdp_version fsdp_offload_params fsdp_min_num_params megatron_lm_tp_degree
    fp8_backend aws_access_key_id debug mpirun_hostfile parallelism_config_tp_size
"""


def list_commands(command, path=()):
    """Yield every command below one, with its path."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from list_commands(below, (*path, name))


COMMANDS = dict(list_commands(accel))


@pytest.fixture
def launch(script, capfd):
    script("raise SystemExit(7)")
    return partial(call_accel, capfd, "launch")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_of_every_command_is_accepted_with_underscores(path):
    context = None
    for end in range(len(path) + 1):
        command = COMMANDS[path[:end]]
        context = command.make_context("accel", [], parent=context, resilient_parsing=True)
    long = [name for param in command.params for name in param.opts if name.startswith("--")]
    parser = command.make_parser(context)
    for name in long:
        assert parser._long_opt[f"--{context.token_normalize_func(name.replace('-', '_').lstrip('_'))}"]


def test_an_option_with_underscores_has_the_same_meaning(launch):
    result = launch(
        "--dry_run", "--nproc_per_node=2", "--mixed_precision", "bf16", "--cpu", "train.py", "--a_b"
    )
    assert result.returncode == 0
    assert "start: 2 processes" in result.stdout
    assert "script train.py --a_b" in result.stdout


@pytest.mark.parametrize("name", sorted({*TORCHRUN.split(), *ACCELERATE.split()}))
def test_every_option_of_other_launchers_is_accepted_or_rejected_with_a_cure(launch, name):
    option = normalize_option(name)
    if f"--{option}" in {each for param in COMMANDS["launch",].params for each in param.opts}:
        return
    foreign = find_foreign_option(option)
    value = () if foreign and not foreign.takes_value else ("1",)
    result = launch("--dry-run", f"--{name}", *value, "train.py")
    if result.returncode == 0:
        assert result.stderr.startswith("accel: same as: accel launch --dry-run")
        return
    assert (result.returncode, result.stdout) == (2, "")
    # The value 1 is none of some options that are translated.
    refused = rf"accel: error: accel launch has no option --{name}\. [A-Z].*\.\n"
    assert re.fullmatch(refused, result.stderr) or result.stderr.startswith("accel: error: ")


def test_all_foreign_options_before_the_script_are_reported_at_once(launch):
    args = [
        "--downcast_bf16",
        "--tee",
        "3",
        "-m",
        "--role=x",
        "--num_processes",
        "2",
        "--cpu",
        "train",
        "--run_path",
    ]
    result = launch(*args)
    assert re.findall(r"option (\S+)\.", result.stderr) == ["--downcast_bf16", "--tee", "--role"]


@pytest.mark.parametrize("name", ["-n", "-np"])
def test_other_options_for_the_number_of_processes_are_rejected_with_a_replacement(launch, name):
    result = launch("-q", name, "2", "train.py")
    assert result.returncode == 2
    assert f"accel launch has no option {name}. Use --nproc-per-node N" in result.stderr


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--nproc", "--nproc-per-node"),
        ("--nproc_per_nod", "--nproc-per-node"),
        ("--log_dirr", "--log-dir"),
        ("--rdzv", "--rdzv-endpoint"),
        ("--xyz", None),
    ],
)
def test_an_unknown_option_is_reported_as_typed_with_a_suggestion(launch, option, meant):
    guess = f"Did you mean {meant}? " if meant else ""
    result = launch("--cpu", f"{option}", "2", "train.py", "--lr", "1")
    assert result.returncode == 2
    assert (
        result.stderr
        == f"accel: error: accel launch has no option {option}. {guess}See --help for all options.\n"
    )


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ("--world_size", "Use --nproc-per-node N and --nnodes N"),
        ("--config", "or --config-file FILE of accel launch"),
        ("--backend", "Use --set process_group_backend="),
    ],
)
def test_commonly_guessed_options_are_rejected_with_a_replacement(launch, option, cure):
    result = launch(f"{option}=2", "train.py")
    assert (result.returncode, cure in result.stderr) == (2, True)


def test_unknown_options_do_not_break_shell_completion():
    command, args = COMMANDS["launch",], ["--num_processes", "2", "--xyz"]
    assert command.make_context("launch", args, resilient_parsing=True)


def test_foreign_options_after_the_script_belong_to_the_script(launch):
    result = launch("--cpu", "--dry-run", "train.py", "--num_processes", "8")
    assert (result.returncode, "same as" in result.stderr) == (0, False)


@pytest.mark.parametrize("args", [("config",), ("test",), ("env",)])
def test_config_file_is_rejected_with_the_options_for_files(capfd, cwd, args):
    result = call_accel(capfd, *args, "--config_file", "x.yaml")
    assert result.returncode == 2
    assert "No such option: --config-file. In accel launch, use --profile NAME" in result.stderr


def test_the_command_declares_every_option_of_a_launch():
    assert {*OPTIONS} <= {parameter.name for parameter in COMMANDS["launch",].params}


def test_replacements_name_existing_keys_and_options():
    commands = (COMMANDS["launch",], COMMANDS["xla", "pod"])
    options = {name for command in commands for param in command.params for name in param.opts}
    for cure in {foreign.advice for foreign in list_foreign_options().values()}:
        for key in re.findall(r"--set ([\w.]+)=", cure):
            assert key in known_keys() or key.startswith("env.")
        for option in re.findall(r"(?<![\w-])(--[a-z-]+)", cure):
            assert option in options
