"""Muon of a script and of torch for the matrices, with AdamW for the rest: sharded as on one process, and across checkpoints."""

from __future__ import annotations

import pytest
import torch
from support.runs.sharded_runs import build_accelerator, to_full
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import DataLoaderConfiguration

TOKENS, WIDTH, EXPERTS = 12, 8, 3
SHARDED = {"dp_shard": 2}
STOP = 4
"""Batches before the checkpoint, of 8 in two epochs; each two are a step."""


class ScriptMuon(torch.optim.Optimizer):
    """Keller Jordan's Muon for one device, in the dtype of the parameters; stacks are batches of matrices."""

    def __init__(self, parameters, lr=0.02, momentum=0.95, weight_decay=0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(self.gather(p.grad.lerp(momentum, group["momentum"])))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)

    def gather(self, update):
        return update


class GatheringMuon(ScriptMuon):
    """The same, which sends each matrix once."""

    def gather(self, update):
        if isinstance(update, DTensor):
            return update.redistribute(placements=[Replicate()] * update.device_mesh.ndim)
        return update


def orthogonalize(x):
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH + 3) / WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.layers[1](torch.tanh(self.layers[0](self.norm(x))))
        x = x + torch.tanh(x @ self.experts).sum(dim=0)[..., :WIDTH]
        return nn.functional.cross_entropy(self.head(x), (tokens * 5 + 1) % TOKENS)


class Run:
    """A training with two optimizers, each with two groups and a schedule, clipping, and cycles of two micro-batches."""

    def __init__(self, sizes, kind, seed=1):
        config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
        self.accelerator = build_accelerator(sizes, dataloader_config=config, gradient_accumulation_steps=2)
        torch.manual_seed(seed)
        model = Net().double()
        stacks = 2 if kind is torch.optim.Muon else 3
        matrices = {
            name: p
            for name, p in model.named_parameters()
            if 2 <= p.ndim <= stacks and not name.startswith(("embed", "head"))
        }
        muon = kind([{"params": [p], "lr": 0.02 / (i + 1)} for i, p in enumerate(matrices.values())])
        rest = [(name, p) for name, p in model.named_parameters() if name not in matrices]
        adamw = torch.optim.AdamW(
            [
                {"params": [p for _, p in rest if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for _, p in rest if p.ndim == 1], "weight_decay": 0.0, "lr": 0.003},
            ],
            lr=0.01,
        )
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.8**step) for o in (muon, adamw)]
        loader = DataLoader(TensorDataset(torch.arange(32) % TOKENS), batch_size=8, shuffle=True)
        self.model, self.loader, *others = self.accelerator.prepare(model, loader, muon, adamw, *schedules)
        self.optimizers, self.schedules = others[:2], others[2:]
        self.epoch = self.batches = 0

    def train(self, stop=8):
        """Train to a number of batches, and return the losses, norms and weights."""
        losses, norms = [], []
        while self.batches < stop:
            for (tokens,) in self.loader:
                self.batches += 1
                with self.accelerator.accumulate(self.model):
                    loss = self.model(tokens)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5).item())
                    for each in (*self.optimizers, *self.schedules):
                        each.step()
                    for optimizer in self.optimizers:
                        optimizer.zero_grad()
                losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        weights = self.accelerator.unwrap_model(self.model).named_parameters()
        return losses, norms, {name: to_full(p.detach()).clone() for name, p in weights}


def save_and_continue(sizes, kind, folder):
    """Save after some batches; return the results after them."""
    run = Run(sizes, kind)
    run.train(STOP)
    run.accelerator.save_state(folder)
    run.accelerator.wait_for_checkpoint()
    return run.train()


def resume(sizes, kind, folder):
    """Load a checkpoint into other values and train on."""
    run = Run(sizes, kind, seed=2)
    run.accelerator.resume(folder)
    run.batches = STOP
    return run.train()


KINDS = [
    pytest.param(ScriptMuon, 1e-9, id="of a script"),
    pytest.param(GatheringMuon, 1e-9, id="of a script that gathers"),
    pytest.param(torch.optim.Muon, 0.01, id="of torch"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
def test_muon_trains_and_resumes_on_another_number_of_processes_as_on_one(
    alone, pair, memory, kind, tolerance
):
    expected, *_ = alone.run(save_and_continue, {}, kind, str(memory / "one"))
    assert len(expected[0]) == STOP
    results = {
        "two": pair.run(save_and_continue, SHARDED, kind, str(memory / "two")),
        "one to two": pair.run(resume, SHARDED, kind, str(memory / "one")),
        "two to one": alone.run(resume, {}, kind, str(memory / "two")),
        "two to two": pair.run(resume, SHARDED, kind, str(memory / "two")),
    }
    for name, ranks in results.items():
        for found in ranks:
            torch.testing.assert_close(
                found, expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
    resumed = zip(results["two"], results["two to two"], strict=True)
    assert all(left[0] == right[0] for left, right in resumed)
