"""Makes checkpoints with DeepSpeed on the CPU: `python make.py OUTPUT [CASE ...]`, in the environment of `make test-deepspeed`.

Every case is run by two processes, and writes OUTPUT/CASE/checkpoint, with the values that were in memory in expected.safetensors
and expected.json beside it. The case `accelerate` is saved by Accelerate 1.15.0, which must be installed then.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

CASES = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage0-bf16": {"stage": 0, "precision": "bf16"},
    "stage1-bf16": {"stage": 1, "precision": "bf16"},
    "stage1-bf16-fp32-gradients": {"stage": 1, "precision": "bf16", "accumulate": "fp32"},
    "stage2": {"stage": 2},
    "stage2-elastic": {"stage": 2, "zero_optimization": {"elastic_checkpoint": True}},
    "stage2-offload": {"stage": 2, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "stage2-bf16": {"stage": 2, "precision": "bf16"},
    "stage2-fp16": {"stage": 2, "precision": "fp16"},
    "stage3": {"stage": 3},
    "stage3-bf16": {"stage": 3, "precision": "bf16"},
    "stage3-sub-groups": {"stage": 3, "zero_optimization": {"sub_group_size": 10}},
    "stage3-offload": {"stage": 3, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "stage3-elsewhere": {"stage": 3, "processes": 3},
    "universal2": {"stage": 2, "universal": True},
    "universal3": {"stage": 3, "universal": True},
    "accelerate": {"stage": 2, "precision": "bf16", "accelerate": True},
    "accelerate3": {"stage": 3, "accelerate": True},
}


class Block(nn.Module):
    """A model with what checkpoints must keep: odd sizes, buffers, a frozen and a tied parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.hidden = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, inputs):
        hidden = torch.tanh(self.norm(self.hidden(self.embedding(inputs))))
        self.average.lerp_(hidden.detach().mean(0).to(self.average.dtype), 0.1)
        self.steps += 1
        return self.head(self.frozen(hidden) * self.scale)


def build():
    """Return a model and an optimizer with two groups."""
    torch.manual_seed(0)
    model = Block()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    decayed = [model.embedding.weight, model.hidden.weight]
    others = [model.hidden.bias, model.norm.weight, model.norm.bias, model.scale]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))


def train(model, backward, step, rank):
    """Train for three steps."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        inputs = torch.randint(0, 7, (5,), generator=generator)
        backward(nn.functional.cross_entropy(model(inputs).float(), inputs))
        step()


def configuration(options):
    """Return a configuration of DeepSpeed."""
    precision = options.get("precision")
    section = {"enabled": True, "initial_scale_power": 8} if precision == "fp16" else {"enabled": True}
    return {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": options["stage"], **options.get("zero_optimization", {})},
        **({precision: section} if precision else {}),
        **({"data_types": {"grad_accum_dtype": options["accumulate"]}} if "accumulate" in options else {}),
    }


def read_memory(engine):
    """Return tensors by kind and name, as they are in memory; collective."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    tensors = {f"buffer.{name}": buffer for name, buffer in engine.module.named_buffers()}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links the states after the step of the first group, when the others have none.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state = engine.optimizer.state if engine.zero_optimization_stage() == 0 else {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with GatheredParameters([parameter]):
                tensors[f"weight.{name}"] = parameter.detach().clone()
        elif engine.zero_optimization_stage() == 0:
            tensors[f"weight.{name}"] = parameter.detach()
            tensors |= {f"{key}.{name}": state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
        else:
            tensors[f"weight.{name}"] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{key}.{name}"] = safe_get_full_optimizer_state(parameter, key)
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def save(options, output):
    """Train and save in one of the processes."""
    import deepspeed

    # Its collectives in shared memory are compiled for half a minute, and leave large files there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    if options.get("precision") == "fp16":
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    model, optimizer = build()
    if options.get("accelerate"):
        engine, scheduler = save_with_accelerate(model, optimizer, options, output)
    else:
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=configuration(options)
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        engine.lr_scheduler = scheduler  # saved, and stepped by the engine
        train(engine, engine.backward, engine.step, engine.global_rank)
        engine.save_checkpoint(str(output / "checkpoint"), tag="global_step3", client_state={"epoch": 2})
    memory = read_memory(engine)
    if engine.global_rank == 0:
        from safetensors.torch import save_file

        save_file(memory, output / "expected.safetensors")
        groups = [
            {k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups
        ]
        expected = {"groups": groups, "lr": scheduler.get_last_lr(), "last_epoch": scheduler.last_epoch}
        (output / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def save_with_accelerate(model, optimizer, options, output):
    """Train and save by the interface of Accelerate."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=configuration(options))
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=options.get("precision", "no"))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step():
        optimizer.step()
        scheduler.step()

    # On the CPU, Accelerate takes every process for the first, and writes one file of random states.
    rank = torch.distributed.get_rank()
    accelerator.state._shared_state["process_index"] = rank
    type(accelerator.state)._shared_state["process_index"] = rank
    PartialState._shared_state["process_index"] = rank
    train(engine, accelerator.backward, step, rank)
    accelerator.save_state(str(output / "checkpoint"))
    return engine, scheduler.scheduler


def make(name, output):
    """Run a case in processes of its own."""
    options, folder = CASES[name], output / name
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    count = options.get("processes", 2)
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    environ |= {
        "MASTER_PORT": port,
        "ACCELERATE_USE_DEEPSPEED": "true" if options.get("accelerate") else "false",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, output, name],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(count)},
        )
        for rank in range(count)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"{name} failed")
    checkpoint = folder / "checkpoint"
    if options.get("universal"):
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder"]
        command += [checkpoint / "global_step3", "--output_folder", checkpoint / "global_step3_universal"]
        subprocess.run([*command, "--inject_missing_state"], check=True)
        for path in (checkpoint / "global_step3").iterdir():
            path.unlink()
        (checkpoint / "global_step3").rmdir()
        (checkpoint / "latest").rename(checkpoint / "latest_universal")
        (checkpoint / "latest_universal").write_text("global_step3_universal")
    for script in checkpoint.rglob("zero_to_*.py"):
        script.unlink()


if __name__ == "__main__":
    if "RANK" in os.environ:
        save(CASES[sys.argv[2]], Path(sys.argv[1]) / sys.argv[2])
    else:
        for case in sys.argv[2:] or CASES:
            make(case, Path(sys.argv[1]))
