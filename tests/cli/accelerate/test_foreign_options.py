"""Options of `accelerate launch` and `torchrun` are translated to those of `accel launch`, in one line, or refused."""

import json
import os
import shlex
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.processes.commands import call_accel

from accel_cli.accelerate.foreign_options import translate
from accel_cli.errors import UsageError
from accel_cli.planning.machine import Machine

DATA = Path(__file__).parents[2] / "data"
COMMANDS = [
    line.split("\t")
    for line in (DATA / "launch_commands.txt").read_text().splitlines()
    if not line.startswith("#")
]
FILES = json.loads((DATA / "accelerate-1.15.0" / "launch_files.json").read_text())
CONFIGS = {
    "examples/accelerate_configs/multi_gpu.yaml": "trl-multi_gpu",
    "examples/accelerate_configs/alst_ulysses_4gpu.yaml": "trl-alst_ulysses_4gpu",
    "examples/accelerate_configs/deepspeed_zero1.yaml": "trl-deepspeed_zero1",
    "examples/accelerate_configs/deepspeed_zero2.yaml": "trl-zero2",
    "examples/accelerate_configs/deepspeed_zero3.yaml": "trl-zero3",
    "context_parallel_2gpu.yaml": "trl-context_parallel_2gpu",
    "multi_node.yaml": "trl-multi_node",
    "single_gpu.yaml": "trl-single_gpu",
    "fsdp1.yaml": "trl-fsdp1",
    "fsdp2.yaml": "trl-fsdp2",
    "zero3.yaml": "trl-zero3",
    "accelerate.yaml": "diffusers-accelerate",
    "ds2.yaml": "diffusers-ds2",
    "sdxl.yaml": "diffusers-sdxl",
}
GPUS = Machine(16, "cuda", ("H100",) * 8, bf16=True)


@pytest.fixture
def launch(cwd, capfd, monkeypatch):
    """Call `accel launch` on a stub of a machine with GPUs; every script and config file exists."""
    monkeypatch.setattr("accel_cli.planning.machine.detect_quickly", lambda _environ: GPUS)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for path, name in CONFIGS.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(yaml.safe_dump(FILES[name]["file"]))
    fsdp2 = FILES["trl-fsdp2"]["file"]
    offloading = {**fsdp2, "fsdp_config": {**fsdp2["fsdp_config"], "fsdp_offload_params": True}}
    (cwd / "fsdp2-offloading.yaml").write_text(yaml.safe_dump(offloading))
    (cwd / "train.py").write_text("raise SystemExit(7)")
    (cwd / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    return partial(call_accel, capfd, "launch", "--dry-run")


def get_words(result):
    """Return the options of the line that prints the command, without the script."""
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("accel: same as: ")]
    command = line.removeprefix("accel: same as: accel launch --dry-run ")
    return command.removesuffix(" ...").removesuffix(" train.py")


@pytest.mark.parametrize(("source", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_a_command_of_public_documentation_becomes_a_plan(launch, source, command):
    *_, words = command.partition("launch ") if "launch" in command else command.partition("torchrun ")
    args = shlex.split(words)
    script = next(word for word in args if word.endswith(".py"))
    Path(script).parent.mkdir(parents=True, exist_ok=True)
    Path(script).write_text("")
    result = launch(*args)
    if "nvme" in command and "nvme_path" not in command:  # Accelerate would write to a folder `none`
        assert "deepspeed.nvme_path: expected a directory" in result.stderr
        return
    assert result.returncode == 0, (source, result.stderr)
    assert result.stdout.startswith("launcher: ")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--num_processes 2", "--nproc-per-node 2"),
        ("--num-processes=2", "--nproc-per-node 2"),
        ("--num_processes 2 --nproc_per_node 2", "--nproc-per-node 2"),
        (
            "--num_processes=8 --num_machines=2 --machine_rank=1 --main_process_ip=node0",
            "--nproc-per-node 4 --nnodes 2 --node-rank 1 --rdzv-endpoint node0:29500",
        ),
        ("--num_processes 1 --num_machines 1 --machine_rank 0", "--nproc-per-node 1 --nnodes 1"),
        ("--nnodes 2 --num_processes 8 --rdzv-endpoint node0:1", "--nnodes 2 --rdzv-endpoint node0:1 --nproc-per-node 4"),
        (
            "--nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=node0 --master_port=1234",
            "--nnodes=2 --node-rank=0 --nproc-per-node=4 --rdzv-endpoint node0:1234",
        ),
        ("--multi_gpu", "--nproc-per-node auto"),
        ("--multi_gpu --num_processes 2 --mixed_precision bf16", "--mixed-precision bf16 --nproc-per-node 2"),
        ("--multi_gpu --gpu_ids 0,1", "--gpu-ids 0,1"),
        ("--multi_gpu --config_file single_gpu.yaml", "--config-file single_gpu.yaml --nproc-per-node 8"),
        ("--num_processes 2 --config_file single_gpu.yaml", "--config-file single_gpu.yaml --nproc-per-node 2"),
        ("--multi_gpu --config_file fsdp2.yaml", "--config-file fsdp2.yaml"),
        ("--nproc_per_node gpu", "--nproc-per-node auto --set device=cuda"),
        ("--nproc_per_node=cpu", f"--nproc-per-node {os.cpu_count()} --cpu"),
        ("--num_gpus 2", "--nproc-per-node 2"),
        ("--gpus 2", "--nproc-per-node 2"),
        ("--gpus 0,2", "--gpu-ids 0,2"),
        ("--gpus all", "--nproc-per-node auto"),
        ("--use_cpu --num_processes 2", "--nproc-per-node 2 --cpu"),
        ("--standalone --nproc_per_node 2", "--nproc-per-node 2 --nnodes 1"),
        ("--rdzv_backend c10d --same_network --nproc_per_node 2", "--nproc-per-node 2"),
        (
            "--nproc_per_node 2 --rdzv_conf timeout=900,last_call_timeout=9",
            "--nproc-per-node 2 --set launcher.rdzv_timeout=900 --set launcher.last_call_timeout=9",
        ),
        ("--num_processes 2 --main_process_port 29501 --dynamo_backend NO", "--nproc-per-node 2 --set compile.backend=no"),
        (
            "--dynamo_backend INDUCTOR --dynamo_mode max-autotune --dynamo_use_dynamic --gradient_accumulation_steps 4",
            ("--set compile.backend=inductor --set compile.mode=max-autotune --set compile.dynamic=true "
            "--set gradient_accumulation_steps=4"),
        ),
        ("--num_processes 2 --num_cpu_threads_per_process 3", "--nproc-per-node 2 --set env.OMP_NUM_THREADS=3"),
        ("--num_processes 2 --monitor_interval 1", "--nproc-per-node 2 --set launcher.monitor_interval=1"),
        ("--num_processes 2 --debug", "--nproc-per-node 2 --set env.ACCELERATE_DEBUG_MODE=true"),
        ("--num_processes 2 --use_fsdp", "--nproc-per-node 2 --set parallel.dp_shard=auto"),
        (
            ("--use_fsdp --fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap=A,B "
            "--fsdp_sharding_strategy=SHARD_GRAD_OP --fsdp_state_dict_type FULL_STATE_DICT"),
            ("--set parallel.dp_shard=auto --set 'fully_shard.wrap=[A, B]' --set fully_shard.reshard_after_forward=false "
            "--set env.FSDP_STATE_DICT_TYPE=FULL_STATE_DICT"),
        ),
        (
            ("--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_dp_shard_size 4 "
            "--parallelism_config_tp_size 2"),
            "--set parallel.dp_shard=4 --set parallel.tp=2",
        ),
        (
            "--use_deepspeed --deepspeed_config_file zero.json --deepspeed_multinode_launcher standard",
            "--set deepspeed.stage=auto --set deepspeed.config_file=zero.json",
        ),
        ("--use_deepspeed", "--set deepspeed.stage=2"),
        (
            ("--use_deepspeed --zero_stage 3 --offload_param_device cpu --offload_optimizer_device none --zero3_init_flag false "
            "--gradient_clipping 1.0 --gradient_accumulation_steps 4 --zero3_save_16bit_model true --num_processes 2"),
            ("--nproc-per-node 2 --set gradient_accumulation_steps=4 --set deepspeed.stage=3 --set deepspeed.offload_param=cpu "
            "--set deepspeed.gradient_clipping=1.0 --set env.ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=true"),
        ),
        (
            "--config_file zero3.yaml --num_processes 2 --zero_stage 2",
            "--config-file zero3.yaml --nproc-per-node 2 --set deepspeed.stage=2 --set deepspeed.zero3_init=false",
        ),
        (
            "--config_file fsdp2.yaml --use_fsdp --fsdp_offload_params true",
            "--config-file fsdp2.yaml --set fully_shard.cpu_offload=true",
        ),
        (
            "--config_file fsdp2-offloading.yaml --use_fsdp --fsdp_offload_params false",
            "--config-file fsdp2-offloading.yaml --set fully_shard.cpu_offload=false",
        ),
        ("--config_file fsdp1.yaml --use_fsdp --num_machines 1", "--config-file fsdp1.yaml --nnodes 1"),
        (
            "--config_file multi_node.yaml --machine_rank 1 --main_process_port 1234",
            "--config-file multi_node.yaml --node-rank 1 --rdzv-endpoint 10.0.0.1:1234",
        ),
        ("--config_file multi_node.yaml --num_processes 8 --machine_rank 0", "--config-file multi_node.yaml --nproc-per-node 4 --node-rank 0"),
    ],
)  # fmt: skip
def test_options_of_other_launchers_are_printed_in_those_of_accel(launch, typed, words):
    assert get_words(launch(*shlex.split(typed), "train.py", "--num_processes", "9")) == words


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("--num_processes 4 --nproc-per-node 2", "Cannot use --num_processes 4 with --nproc-per-node 2: both set --nproc-per-node."),
        ("--num_machines 2 --nnodes 3", "Cannot use --num_machines 2 with --nnodes 3"),
        ("--num_processes 4 --num_gpus 2", "Cannot use --num_gpus 2 with --num_processes 4"),
        ("--num_processes 3 --num_machines 2", "must be a multiple of their number, 2."),
        ("--num_processes 4 --nnodes 1:2 --rdzv_endpoint a:1", "the number of nodes is not fixed."),
        ("--num_processes two", "Invalid --num_processes 'two': expected a whole number of at least 1."),
        ("--num_processes -1", "Invalid --num_processes '-1'"),
        ("--num_machines 2 --machine_rank 2", "Invalid --machine_rank 2: expected 0 to 1"),
        ("--num_machines 2 --main_process_port 1", "2 nodes need the address of one of them."),
        ("--multi_gpu --cpu", "Cannot use --multi_gpu with --cpu"),
        ("--main_process_ip a --master_addr b", "Cannot use --main_process_ip a with --master_addr b."),
        ("--standalone --nnodes 2 --rdzv_endpoint a:1", "it is for one node."),
        ("--use_fsdp --use_deepspeed", "they shard models in different ways."),
        ("--use_fsdp --config_file zero3.yaml", "the file has distributed_type: DEEPSPEED."),
        ("--fsdp_offload_params true --config_file fsdp1.yaml", "the file has fsdp_version: 1."),
        ("--fsdp_offload_params true", "Cannot use --fsdp_offload_params true without --use-fsdp"),
        ("--zero_stage 2", "without --use-deepspeed"),
        ("--use_deepspeed --zero_stage 2 --offload_param_device cpu", "--offload_param_device cpu: DeepSpeed does not use it in ZeRO stage 2"),
        ("--use_deepspeed --deepspeed_multinode_launcher pdsh", "launcher.kind: ssh or slurm"),
        ("--use_deepspeed --deepspeed_hostfile hosts", "use launcher.kind: ssh with launcher.hostfile"),
        ("--use_deepspeed --deepspeed_config_file gone.json", "expected the path of a JSON file, which was not found, got 'gone.json'"),
        ("--parallelism_config_tp_size 2", "without --use-parallelism-config"),
        ("--fp8_backend te", "without --mixed-precision fp8"),
        ("--use_fsdp --fsdp_use_orig_params false", "Cannot use --fsdp_use_orig_params false: parameters always keep"),
        ("--use_fsdp --fsdp_reshard_after_forward false", "false: Accelerate uses it with fsdp_version: 2 only."),
        ("--use_fsdp --fsdp_offload_params maybe", "expected true or false"),
        ("--use_fsdp --set parallel.dp_shard=2", "both set --set parallel.dp_shard."),
        ("--gpus 0", "Invalid --gpus '0'"),
        ("--gradient_accumulation_steps auto", "Invalid --gradient_accumulation_steps 'auto'"),
        ("--num_processes 2 --tee 3", "has no option --tee. Use --ranks"),
        ("--num_processes 2 --dynamo_use_fullgraph", "has no effect with compile.backend: no"),
        ("--rdzv_backend etcd", "has no option --rdzv_backend."),
        ("--rdzv_conf is_host=1", "has no option --rdzv_conf."),
        ("--num_processes 2 --nproc 3", "has no option --nproc. Did you mean --nproc-per-node?"),
    ],
)  # fmt: skip
def test_options_without_one_meaning_are_refused(launch, typed, problem):
    result = launch(*shlex.split(typed), "train.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr
    assert "same as" not in result.stderr


def test_a_config_file_that_is_a_pipe_is_read_once(launch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        pipe.write(Path("fsdp2.yaml").read_text())
    result = launch("--config_file", f"/dev/fd/{reader}", "--num_processes", "3", "train.py")
    os.close(reader)
    assert result.returncode == 0, result.stderr
    assert "start: 3 processes" in result.stdout


def test_a_command_in_the_options_of_accel_prints_no_line(launch):
    assert launch("--mixed_precision", "bf16", "--nproc_per_node=2", "train.py").stderr == ""
    assert launch("-q", "--num_processes", "2", "train.py").stderr == ""


def test_the_number_of_all_nodes_is_refused_if_the_profile_has_other_nodes(launch):
    Path("accel.yaml").write_text(
        "schema_version: 1\nlauncher: {kind: torchrun, nnodes: 2, rdzv_endpoint: 'node0:1'}\n"
    )
    result = launch("--num_processes", "4", "train.py")
    assert result.returncode == 2
    assert "starts 8 on 2 nodes" in result.stderr
    assert launch("--main_process_port", "5", "train.py").returncode == 2


def test_deepspeed_is_refused_if_the_profile_shards_models(launch):
    Path("accel.yaml").write_text(
        "schema_version: 1\nlauncher: {kind: torchrun}\nparallel: {dp_shard: auto}\n"
    )
    result = launch("--use_deepspeed", "train.py")
    assert result.returncode == 2
    assert "parallel.dp_shard: cannot be auto with deepspeed.stage: 2 (--set)" in result.stderr


def test_an_option_never_loses_to_a_variable_in_silence(launch, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    result = launch("--num_processes", "2", "--num_cpu_threads_per_process", "3", "train.py")
    assert result.returncode == 2
    assert "OMP_NUM_THREADS=8 in the environment takes precedence" in result.stderr


@given(st.integers(1, 64), st.integers(1, 8))
def test_the_number_of_all_nodes_is_divided_among_them(total, nodes):
    args = ["--num_processes", str(total), "--num_machines", str(nodes), "train.py"]
    if total % nodes:
        with pytest.raises(UsageError):
            translate(args, {})
    else:
        words = ("--nproc-per-node", str(total // nodes), "--nnodes", str(nodes), "train.py")
        assert translate(args, {}).args == words


def test_a_second_translation_changes_nothing():
    own = {"--nproc-per-node": True, "--nnodes": True, "--set": True}
    args = ["--num_processes", "4", "--use_fsdp", "--nnodes", "2", "train.py", "--num_processes", "1"]
    first = translate(args, own)
    second = translate(first.args, own)
    assert (second.args, second.is_changed) == (first.args, False)
