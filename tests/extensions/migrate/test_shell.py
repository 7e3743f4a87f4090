"""Commands of shell scripts that launch training are converted; everything else in them stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_cli.extensions.migrate.shell import migrate_shell

CONVERTED = {
    "torchrun --standalone --nproc_per_node=4 train.py --lr 0.1": "accel launch --nproc_per_node=4 train.py --lr 0.1",
    "torchrun --nproc-per-node gpu -m package.train": "accel launch --nproc-per-node gpu -m package.train",
    "srun --ntasks=2 torchrun --nnodes $N --rdzv_id $ID --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 t.py": "srun --ntasks=2 accel launch --nproc-per-node 1 --nnodes $N --rdzv_id $ID --rdzv_endpoint $HEAD:29500 t.py",
    "torchrun --nnodes 2 --node_rank 1 --master_addr host --master_port 1234 t.py": "accel launch --nproc-per-node 1 --nnodes 2 --node_rank 1 --master_addr host --master_port 1234 t.py",
    "torchrun --nproc_per_node 2 --master_port 1234 t.py": "accel launch --nproc_per_node 2 --master_port 1234 t.py",
    "torchrun --max_restarts 3 --monitor_interval 5 t.py": "accel launch --nproc-per-node 1 --max_restarts 3 --monitor_interval 5 t.py",
    "python -m torch.distributed.launch --use_env --nproc_per_node 8 t.py": "accel launch --nproc_per_node 8 t.py",
    "python3 -m torch.distributed.run --nproc_per_node 8 t.py": "accel launch --nproc_per_node 8 t.py",
    "OMP_NUM_THREADS=4 torchrun --nproc_per_node 2 t.py &": "OMP_NUM_THREADS=4 accel launch --nproc_per_node 2 t.py &",
    "accelerate launch t.py": "accel launch t.py",
    "accelerate launch --multi_gpu --num_processes 2 --mixed_precision=bf16 t.py 'a b'": "accel launch --multi_gpu --num_processes 2 --mixed_precision=bf16 t.py 'a b'",
    "accelerate launch --num_processes 16 --num_machines 2 --machine_rank 1 --main_process_ip h --main_process_port 5 t.py": "accel launch --num_processes 16 --num_machines 2 --machine_rank 1 --main_process_ip h --main_process_port 5 t.py",
    'if torchrun "$SCRIPT" "$@"; then echo done; fi': 'if accel launch --nproc-per-node 1 "$SCRIPT" "$@"; then echo done; fi',
    "uv run torchrun --nproc_per_node 2 t.py": "uv run accel launch --nproc_per_node 2 t.py",
    "srun bash -c 'torchrun --nproc_per_node $GPUS t.py'": "srun bash -c 'accel launch --nproc_per_node $GPUS t.py'",
    'CMD="torchrun --nproc_per_node 2 t.py"; $CMD': 'CMD="accel launch --nproc_per_node 2 t.py"; $CMD',
    "python -u -m torch.distributed.launch --nproc_per_node 2 t.py": "accel launch --nproc_per_node 2 t.py",
    "$PYTHON -m torch.distributed.run --nproc_per_node 2 t.py": "$PYTHON -m accel_cli launch --nproc_per_node 2 t.py",
    "x=`torchrun --nproc_per_node 2 t.py`": "x=`accel launch --nproc_per_node 2 t.py`",
    "echo it\\'s; { accelerate-launch --use_cpu t.py; }": "echo it\\'s; { accel launch --use_cpu t.py; }",
    "accelerate launch --num_processes $((N * 8)) --num_machines $N t.py": "accel launch --num_processes $((N * 8)) --num_machines $N t.py",
    "accelerate launch -m --mixed_precision bf16 p.t": "accel launch -m --mixed_precision bf16 p.t",
    "ARGS='--nnodes 2 --master_addr h --master_port 5'\ntorchrun $ARGS --nproc_per_node 2 t.py": "ARGS='--nnodes 2 --master_addr h --master_port 5'\naccel launch $ARGS --nproc_per_node 2 t.py",
    "ARGS=(\n  --nproc_per_node 2\n  --standalone\n  --max_restarts 1\n)\ntorchrun ${ARGS[@]} t.py": "ARGS=(\n  --nproc_per_node 2\n  --standalone\n  --max_restarts 1\n)\naccel launch ${ARGS[@]} t.py",
    "accelerate launch --config_file fsdp.yaml --num_processes 2 t.py": "accel launch --config_file fsdp.yaml --num_processes 2 t.py",
    "deepspeed train.py --deepspeed ds.json": "accel launch --nproc-per-node auto train.py --deepspeed ds.json",
    "deepspeed --num_gpus=4 --master_port 1234 --no_local_rank train.py": "accel launch --num_gpus=4 train.py",
    "deepspeed --num_gpus 2 --module p.train --x": "accel launch --num_gpus 2 --module p.train --x",
    "deepspeed --hostfile hosts --num_nodes 2 $SCRIPT": "accel launch --hostfile hosts --num_nodes 2 $SCRIPT",
    "cd src && torchrun --nproc_per_node 2 t.py": "cd src && accel launch --nproc_per_node 2 t.py",
    "torchrun --standalone --nproc_per_node 2 --tee 3 -r 3 t.py": "accel launch --nproc_per_node 2 t.py",
    "ARGS='--nnodes 2'\ntorchrun $ARGS t.py": "ARGS='--nnodes 2'\naccel launch --nproc-per-node 1 $ARGS t.py",
    'ARGS="--nnodes 2 --nproc_per_node=4"\ntorchrun $ARGS t.py': 'ARGS="--nnodes 2 --nproc_per_node=4"\naccel launch $ARGS t.py',
    "accelerate launch --use_deepspeed --deepspeed_config_file ds.json --num_processes $N t.py": "accel launch --use_deepspeed --deepspeed_config_file ds.json --num_processes $N t.py",
    "accelerate launch --mixed_precision fp8 t.py": "accel launch --mixed_precision fp8 t.py",
    "deepspeed --hostfile hosts --master_port 1234 t.py": "accel launch --hostfile hosts t.py",
}
REFUSED = {
    "accelerate launch --fsdp_version 2 t.py": "Add --use-fsdp",
    "deepspeed --launcher pdsh t.py": "--hosts HOSTS or --hostfile FILE",
    "deepspeed --include localhost:0,1 t.py": "Use --gpu-ids IDS",
    "accelerate launch --num_processes 3 --num_machines 2 t.py": "Use --nproc-per-node N",
    "torchrun --rdzv_conf read_timeout=60 t.py": "launcher.rdzv_timeout=SECONDS",
}
COMMANDS = [
    line.partition("\t")[2]
    for line in (Path(__file__).parents[2] / "data" / "launch_commands.txt").read_text().splitlines()
    if not line.startswith("#") and "nvme" not in line
]
"""Commands that `accel launch` plans in `test_command_line`; one with nvme lacks the path that accel needs."""


@pytest.mark.parametrize(("before", "after"), CONVERTED.items())
def test_a_command_is_converted(before, after):
    text, findings = migrate_shell(f"#!/bin/bash\nset -e\n{before}\n")
    assert text == f"#!/bin/bash\nset -e\n{after}\n"
    assert not findings
    assert migrate_shell(text) == (text, ())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_public_documentation_keeps_its_options(command):
    after = command.replace("accelerate launch ", "accel launch ").replace("torchrun ", "accel launch ")
    assert migrate_shell(command) == (after, ())


@pytest.mark.parametrize(("command", "advice"), REFUSED.items())
def test_a_command_that_accel_launch_refuses_stays_with_its_message(command, advice):
    text, findings = migrate_shell(f"# first line\n{command}\n")
    assert text == f"# first line\n{command}\n"
    assert findings[0].line == 2
    assert advice in findings[0].text


def test_continued_lines_stay_continued():
    before = "torchrun \\\n    --standalone \\\n    --nproc_per_node 2 \\\n    train.py \\\n    --lr 0.1\n"
    after = "accel launch \\\n    --nproc_per_node 2 \\\n    train.py \\\n    --lr 0.1\n"
    assert migrate_shell(before) == (after, ())


@pytest.mark.parametrize(
    "line",
    [
        "# torchrun --nproc_per_node 2 t.py",
        'echo "torchrun is good"',
        'log "torchrun is good"',
        "echo torchrun --nproc_per_node 2 t.py",
        "pip install torchrun",
        "pip install deepspeed",
        "python t.py --deepspeed ds.json",
        "MODE=deepspeed",
        "module load deepspeed",
        "deepspeed --version",
        "if [ $MODE = deepspeed ]; then",
        "which torchrun",
        "python train.py",
    ],
)
def test_text_that_is_no_command_stays(line):
    assert migrate_shell(f"{line}\n") == (f"{line}\n", ())


def test_words_after_an_unknown_option_are_not_reported_since_they_may_be_those_of_the_script():
    text = "torchrun --nproc_per_node=4 --bogus train.py --lr 1\n"
    changed, findings = migrate_shell(text)
    assert changed == text
    assert ["--bogus" in one.text for one in findings] == [True]
