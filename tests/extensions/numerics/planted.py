# ruff: noqa: C901, PLR0912, PLR0915 - one script, in which each line may be the cause
"""The script of the planted causes: a training whose variable `CAUSE` changes one thing."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CAUSE = os.environ.get("CAUSE", "")
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH, STEPS = 8, int(os.environ.get("STEPS", "12"))


class Data(Dataset):
    def __init__(self, size=64):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = torch.randn(size, 1, generator=generator)

    def __len__(self):
        return len(self.x) - (CAUSE == "dropped sample") * WORLD_SIZE

    def __getitem__(self, index):
        x = self.x[index]
        if CAUSE == "normalization of data":
            x = x * 1.01
        if CAUSE == "augmentation":
            x = x + 0.01 * random.random()
        return x, (self.y[index] + 1 if CAUSE == "one label" and index == 5 else self.y[index])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        if os.environ.get("NORM") == "layer":
            self.norm = nn.LayerNorm(16)
        else:
            self.norm = nn.BatchNorm1d(16, momentum=0.2 if CAUSE == "BatchNorm" else 0.1)
        self.hidden = nn.Linear(16, 16)
        rate = 0.0 if os.environ.get("NORM") == "layer" else 0.1
        self.drop = nn.Dropout(0.2 if CAUSE == "dropout" else rate)
        self.out = nn.Linear(16, 1)
        scale = torch.linspace(0.5, 1.7, 16)
        self.register_buffer("scale", scale.bfloat16().float() if CAUSE == "bf16 buffer" else scale)
        if CAUSE == "initialization":
            nn.init.zeros_(self.out.bias)

    def forward(self, x):
        x = self.norm(self.embed(x)) * self.scale
        x = nn.functional.gelu(x, approximate="tanh") if CAUSE == "activation" else nn.functional.gelu(x)
        if CAUSE == "rounding of matmul":
            weight, bias = self.hidden.weight.double(), self.hidden.bias.double()
            hidden = nn.functional.linear(x.double(), weight, bias).float()
        else:
            hidden = self.hidden(x)
        if CAUSE == "residual":
            hidden = hidden + 1e-3 * x
        if CAUSE == "detach":
            hidden = 0.5 * hidden + 0.5 * hidden.detach()
        return self.out(self.drop(hidden))


def average(model):
    """Average gradients, as scripts without DDP do."""
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is None or (CAUSE == "missing all_reduce" and index == 2):
            continue
        dist.all_reduce(parameter.grad)
        if CAUSE != "wrong average":
            parameter.grad /= WORLD_SIZE


def main():
    torch.manual_seed(1 if CAUSE == "seed" else 0)
    random.seed(0)
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    model = Net()
    named = dict(model.named_parameters())
    norms = [parameter for name, parameter in named.items() if "norm" in name or "bias" in name]
    weights = [parameter for name, parameter in named.items() if not ("norm" in name or "bias" in name)]
    decay = 0.05 if CAUSE == "weight decay on norms" else 0.0
    groups = [{"params": weights, "weight_decay": 0.05}, {"params": norms, "weight_decay": decay}]
    if CAUSE == "order of parameters":
        groups[0]["params"] = weights[::-1]
    if CAUSE == "forgotten parameters":
        groups[0]["params"] = weights[:-1]
    rate = 0.011 if CAUSE == "lr" else 0.01
    if CAUSE == "epsilon of Adam":
        optimizer = torch.optim.AdamW(groups, lr=rate, eps=1e-6)
    elif CAUSE == "optimizer":
        optimizer = torch.optim.Adam(groups, lr=rate)
    else:
        optimizer = torch.optim.AdamW(groups, lr=rate)
    late = 5 if CAUSE == "warmup" else 4
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / late))
    uses_ddp = WORLD_SIZE > 1 and os.environ.get("EXCHANGE") != "manual"
    trained = nn.parallel.DistributedDataParallel(model) if uses_ddp else model
    if CAUSE == "compile":
        trained = torch.compile(trained, backend="aot_eager_decomp_partition")
    data = Data()
    seed = 3 if CAUSE == "sampler seed" else 2
    sampler = DistributedSampler(data, WORLD_SIZE, RANK, seed=seed)
    loader = DataLoader(data, BATCH // WORLD_SIZE, sampler=sampler, drop_last=CAUSE != "uneven tail")
    if CAUSE == "uneven tail":
        data.x = data.x[:60]
    if CAUSE == "evaluation mode":
        trained.eval()
    average_weights = [parameter.detach().clone() for parameter in model.parameters()]
    step, epoch = 0, 0
    while step < STEPS:
        if CAUSE != "forgotten set_epoch":
            sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            if step == STEPS:
                break
            step += 1
            train_step(model, trained, optimizer, (x, y), step)
            if not (CAUSE == "forgotten scheduler" and step == 2):
                schedule.step()
            if CAUSE == "EMA":
                for mean, parameter in zip(average_weights, model.parameters(), strict=True):
                    mean.lerp_(parameter.detach(), 0.5)
                    if step == 4:
                        parameter.data.copy_(mean)
            if CAUSE == "one step more" and step == STEPS:
                train_step(model, trained, optimizer, (x, y), step)


def train_step(model, trained, optimizer, batch, step):
    x, y = batch
    if CAUSE == "extra random number" and step == 3:
        torch.rand(1)
    if CAUSE == "cast of inputs":
        x = x.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16, enabled=CAUSE == "autocast"):
        output = trained(x)
    if CAUSE == "order of sums":
        output, y = output.flip(0), y.flip(0)
    loss = nn.functional.mse_loss(output.float(), y, reduction="sum" if CAUSE == "loss reduction" else "mean")
    if CAUSE == "gradient of one rank" and step == 5 and RANK == WORLD_SIZE - 1:
        flip = model.hidden.weight.register_hook(flip_bit)
        loss.backward()
        flip.remove()
    else:
        loss.backward()
    if CAUSE == "stale gradients" and step == 6:
        model.out.weight.grad += 1e-3
    if os.environ.get("EXCHANGE") == "manual" and WORLD_SIZE > 1:
        if CAUSE == "clip before exchange":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        average(model)
    if CAUSE != "clip before exchange":
        nn.utils.clip_grad_norm_(model.parameters(), 0.4 if CAUSE == "clipping" else 0.5)
    optimizer.step()
    if CAUSE == "weights changed" and step == 3:
        model.out.weight.data[0, 0] += 1e-4
    if not (CAUSE == "forgotten zero_grad" and step == 4):
        optimizer.zero_grad()


def flip_bit(gradient):
    gradient = gradient.clone()
    bits = gradient.view(torch.int32)
    bits[3, 5] ^= 1 << 18
    return gradient


main()
