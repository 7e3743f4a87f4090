"""Commands of shell scripts that launch training are converted; everything else in them stays."""

from __future__ import annotations

import pytest

from accel_cli.migrate.shell import migrate_shell

CONVERTED = {
    "torchrun --standalone --nproc_per_node=4 train.py --lr 0.1": "accel launch --nproc-per-node 4 train.py --lr 0.1",
    "torchrun --nproc-per-node gpu -m package.train": "accel launch --nproc-per-node auto -m package.train",
    "srun --ntasks=2 torchrun --nnodes $N --rdzv_id $ID --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 t.py": "srun --ntasks=2 accel launch --nproc-per-node 1 --nnodes $N --rdzv-id $ID --rdzv-endpoint $HEAD:29500 t.py",
    "torchrun --nnodes 2 --node_rank 1 --master_addr host --master_port 1234 t.py": "accel launch --nproc-per-node 1 --nnodes 2 --node-rank 1 --rdzv-endpoint host:1234 t.py",
    "torchrun --nproc_per_node 2 --master_port 1234 t.py": "accel launch --nproc-per-node 2 t.py",
    "torchrun --max_restarts 3 --monitor_interval 5 t.py": "accel launch --nproc-per-node 1 --max-restarts 3 --set launcher.monitor_interval=5 t.py",
    "python -m torch.distributed.launch --use_env --nproc_per_node 8 t.py": "accel launch --nproc-per-node 8 t.py",
    "python3 -m torch.distributed.run --nproc_per_node 8 t.py": "accel launch --nproc-per-node 8 t.py",
    "OMP_NUM_THREADS=4 torchrun --nproc_per_node 2 t.py &": "OMP_NUM_THREADS=4 accel launch --nproc-per-node 2 t.py &",
    "accelerate launch t.py": "accel launch t.py",
    "accelerate launch --multi_gpu --num_processes 2 --mixed_precision=bf16 t.py 'a b'": "accel launch --nproc-per-node 2 --mixed-precision bf16 t.py 'a b'",
    "accelerate launch --num_processes 16 --num_machines 2 --machine_rank 1 --main_process_ip h --main_process_port 5 t.py": "accel launch --nproc-per-node 8 --nnodes 2 --node-rank 1 --rdzv-endpoint h:5 t.py",
    "accelerate launch --cpu --num_cpu_threads_per_process 2 --dynamo_backend no t.py": "accel launch --cpu --set launcher.omp_num_threads=2 t.py",
    'if torchrun "$SCRIPT" "$@"; then echo done; fi': 'if accel launch --nproc-per-node 1 "$SCRIPT" "$@"; then echo done; fi',
    "uv run torchrun --nproc_per_node 2 t.py": "uv run accel launch --nproc-per-node 2 t.py",
    "srun bash -c 'torchrun --nproc_per_node $GPUS t.py'": "srun bash -c 'accel launch --nproc-per-node $GPUS t.py'",
    'CMD="torchrun --nproc_per_node 2 t.py"; $CMD': 'CMD="accel launch --nproc-per-node 2 t.py"; $CMD',
    "python -u -m torch.distributed.launch --nproc_per_node 2 t.py": "accel launch --nproc-per-node 2 t.py",
    "$PYTHON -m torch.distributed.run --nproc_per_node 2 t.py": "$PYTHON -m accel_cli launch --nproc-per-node 2 t.py",
    "x=`torchrun --nproc_per_node 2 t.py`": "x=`accel launch --nproc-per-node 2 t.py`",
    "echo it\\'s; { accelerate-launch --use_cpu t.py; }": "echo it\\'s; { accel launch --cpu t.py; }",
    "accelerate launch --num_processes $((N * 8)) --num_machines $N t.py": "accel launch --nproc-per-node $(((N * 8) / $N)) --nnodes $N t.py",
    "accelerate launch --num_processes $P --num_machines ${N} -m p.t": "accel launch --nproc-per-node $(($P / ${N})) --nnodes ${N} -m p.t",
    "accelerate launch -m --mixed_precision bf16 p.t": "accel launch --mixed-precision bf16 -m p.t",
    "accelerate launch --dynamo_backend 'no' t.py": "accel launch t.py",
    "ARGS='--nnodes 2 --master_addr h --master_port 5'\ntorchrun $ARGS --nproc_per_node 2 t.py": "ARGS='--nnodes 2 --rdzv-endpoint h:5'\naccel launch --nproc-per-node 2 $ARGS t.py",
    "ARGS=(\n  --nproc_per_node 2\n  --standalone\n  --max_restarts 1\n)\ntorchrun ${ARGS[@]} t.py": "ARGS=(\n  --nproc-per-node 2\n  --max-restarts 1\n)\naccel launch ${ARGS[@]} t.py",
    "accelerate launch --use_deepspeed t.py": "accel launch --set deepspeed.stage=2 t.py",
    'accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device "cpu" --offload_optimizer_device none --zero3_save_16bit_model true --gradient_accumulation_steps 4 --deepspeed_multinode_launcher standard t.py': 'accel launch --set deepspeed.stage=3 --set deepspeed.zero3_init=true --set deepspeed.offload_param="cpu" --set gradient_accumulation_steps=4 t.py',
    "accelerate launch --use_deepspeed --deepspeed_config_file ds.json --gradient_clipping 1.0 t.py": "accel launch --set deepspeed.stage=auto --set deepspeed.gradient_clipping=1.0 --set deepspeed.config_file=ds.json t.py",
    "DS='--zero_stage 1 --offload_optimizer_device cpu'\naccelerate launch --use_deepspeed $DS t.py": "DS='--set deepspeed.stage=1 --set deepspeed.offload_optimizer=cpu'\naccel launch $DS t.py",
    "accelerate launch --config_file fsdp.yaml --num_processes 2 t.py": "accel launch --nproc-per-node 2 --config-file fsdp.yaml t.py",
    "deepspeed train.py --deepspeed ds.json": "accel launch --nproc-per-node auto train.py --deepspeed ds.json",
    "deepspeed --num_gpus=4 --master_port 1234 --no_local_rank train.py": "accel launch --nproc-per-node 4 train.py",
    "deepspeed --num_gpus 2 --module p.train --x": "accel launch --nproc-per-node 2 -m p.train --x",
    "deepspeed --hostfile hosts --num_nodes 2 $SCRIPT": "accel launch --hostfile hosts --nnodes 2 $SCRIPT",
    "deepspeed -H hosts t.py": "accel launch --hostfile hosts t.py",
    "deepspeed --include localhost:0,1 t.py": "accel launch --gpu-ids 0,1 t.py",
    "cd src && torchrun --nproc_per_node 2 t.py": "cd src && accel launch --nproc-per-node 2 t.py",
}
FOUND = {
    "accelerate launch --use_fsdp t.py": "parallel.dp_shard=auto",
    "accelerate launch --use_deepspeed --deepspeed_hostfile hosts t.py": "Use --hostfile FILE",
    "deepspeed --launcher pdsh t.py": "--hosts HOSTS or --hostfile FILE",
    "deepspeed --include h1:0@h2:0 t.py": "--hosts HOSTS",
    "deepspeed --autotuning run t.py": "accel launch has no such option",
    "accelerate launch --num_processes 3 --num_machines 2 t.py": "Use --nproc-per-node N",
    "accelerate launch --mixed_precision fp8 t.py": "no, bf16 or fp16",
    "torchrun --rdzv_conf timeout=60 t.py": "launcher.rdzv_timeout=SECONDS",
    "torchrun $ARGS t.py": "the options are in $ARGS",
    'run "torchrun --nproc_per_node 2 t.py"': "in a text and is not converted",
    "torchrun --unknown_option 3 t.py": "accel launch has no such option",
}


@pytest.mark.parametrize(("before", "after"), CONVERTED.items())
def test_a_command_is_converted(before, after):
    text, findings = migrate_shell(f"#!/bin/bash\nset -e\n{before}\n")
    assert text == f"#!/bin/bash\nset -e\n{after}\n"
    assert not findings
    assert migrate_shell(text) == (text, ())


@pytest.mark.parametrize(("command", "advice"), FOUND.items())
def test_a_command_with_an_option_that_has_no_equivalent_stays_and_is_found(command, advice):
    text, findings = migrate_shell(f"# first line\n{command}\n")
    assert text == f"# first line\n{command}\n"
    assert findings[0].line == 2
    assert advice in findings[0].text


def test_continued_lines_stay_continued():
    before = "torchrun \\\n    --standalone \\\n    --nproc_per_node 2 \\\n    train.py \\\n    --lr 0.1\n"
    after = "accel launch \\\n    --nproc-per-node 2 \\\n    train.py \\\n    --lr 0.1\n"
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
