"""However a transformer is divided, training is that of one process: losses, norms and parameters after ten steps of AdamW.

`../test_training_equality.py` compares accumulation, weights, tails and clipping, with SGD in float64.

The bar is 1e-5 in fp32, absolute and relative: sums are taken in another order, and nothing else differs. In bf16 what
is computed is rounded to 8 bits, so that one operation differs by 2**-8 of its value between two orders; with SGD, which
makes steps as large as gradients are, ten steps stay within 2**-7. (Adam makes a whole step of a gradient that is all
but cancelled, whatever its sign.)
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, DataLoaderConfiguration, ParallelismConfig

BAR = 1e-5
STEPS = 10
WORDS, WIDTH, LENGTH, BATCH = 32, 16, 6, 8
PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.q": "colwise",
    "layers.*.k": "colwise",
    "layers.*.v": "colwise",
    "layers.*.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_rep",
}
LAYOUTS = {
    "replicated": {},
    "sharded": {"dp_shard_size": "auto"},
    "tensor": {"tp_size": 2},
    "hybrid": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "tensor, sharded": {"dp_shard_size": 2, "tp_size": 2},
    "tensor, replicated": {"dp_replicate_size": 2, "tp_size": 2},
    "tensor by four": {"tp_size": 4},
}
ON_TWO = ("replicated", "sharded", "tensor")
ON_FOUR = ("replicated", "sharded", "hybrid", "tensor, sharded", "tensor, replicated", "tensor by four")


@dataclass(frozen=True)
class Case:
    """A training run, except for its layout."""

    accumulate: int = 1
    mixed_precision: str = "no"
    clip: float | None = None
    tie: bool = True
    frozen: bool = False
    batch_norm: bool = False
    dynamo: str = "no"
    optimizer_first: bool = True
    schedule: bool = False
    whole: frozenset = frozenset()


CASES = {
    "plain": Case(),
    "accumulated, clipped, scheduled": Case(accumulate=2, clip=0.1, schedule=True),
    "not tied": Case(tie=False, optimizer_first=False),
    "frozen": Case(frozen=True),
    "batch norm": Case(batch_norm=True),
    "optimizer made after": Case(optimizer_first=False),
    "bf16, accumulated, clipped": Case(mixed_precision="bf16", accumulate=2, clip=0.1),
    # torch 2.13 cannot compile an embedding whose rows are divided: its mask keeps a tensor of the first tracing.
    "compiled": Case(dynamo="aot_eager", tie=False, whole=frozenset({"embed"})),
}


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        # Softmax does not see a bias of the keys: its gradient is rounding errors, which Adam makes whole steps of.
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        inside = self.first(x)
        heads = [
            part(inside).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Words(nn.Module):
    """A small language model whose positions are a buffer."""

    def __init__(self, case):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("places", torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer(WIDTH, 4) for _ in range(2))
        self.normal = nn.BatchNorm1d(WIDTH) if case.batch_norm else nn.Identity()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if case.tie:
            self.head.weight = self.embed.weight
        if case.frozen:
            self.layers[0].requires_grad_(False)

    def forward(self, words):
        # Not behind a layer: a norm takes away what is the same for all, and such a bias learns from rounding errors.
        x = self.normal((self.embed(words) / 4 + self.places).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build_loader(case):
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(WORDS, (STEPS * BATCH, LENGTH + 1), generator=generator)
    if case.batch_norm:
        # Statistics of a rank equal those of all ranks only if all have the same rows.
        words = words.reshape(STEPS, 4, BATCH // 4, LENGTH + 1)[:, :1].expand(-1, 4, -1, -1).flatten(0, 2)
    return DataLoader(words, batch_size=BATCH)


def create_accelerator(case, layout):
    sizes = LAYOUTS[layout]
    plan = {name: style for name, style in PLAN.items() if name not in case.whole}
    parallel = ParallelismConfig(**sizes, tp_plan=plan if "tp_size" in sizes else None) if sizes else None
    return Accelerator(
        mixed_precision=case.mixed_precision,
        gradient_accumulation_steps=case.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        dynamo_backend=case.dynamo,
        parallelism_config=parallel,
        step_scheduler_with_optimizer=False,
    )


def train(case, layout):
    """Return losses, norms, and all parameters and buffers after the steps on this rank."""
    torch._dynamo.reset()
    # A warning of torch about its own hooks.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    accel = create_accelerator(case, layout)
    torch.manual_seed(1)
    model = Words(case)
    if case.optimizer_first:
        optimizer = build_optimizer(model, case)
        model, optimizer, loader = accel.prepare(model, optimizer, build_loader(case))
    else:
        model, loader = accel.prepare(model, build_loader(case))
        optimizer = accel.prepare(build_optimizer(model, case))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, STEPS) if case.schedule else None
    losses, norms = [], []
    for words in loader:
        with accel.accumulate(model):
            each = nn.functional.cross_entropy(
                model(words[:, :-1]).float().transpose(1, 2), words[:, 1:], reduction="none"
            ).mean(-1)
            accel.backward(each.mean())
            losses += accel.gather_for_metrics(each.detach()).tolist()
            if accel.sync_gradients:
                norms.append(accel.clip_grad_norm_(model.parameters(), case.clip or 1e9).item())
            optimizer.step()
            if scheduler and accel.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
    return losses, norms, gather_state(accel.unwrap_model(model))


def build_optimizer(model, case):
    learning = [p for p in model.parameters() if p.requires_grad]
    if case.mixed_precision == "bf16":
        return torch.optim.SGD(learning, lr=1e-2, momentum=0.5)
    return torch.optim.AdamW(learning, lr=1e-2)


def gather_state(model):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    # The running variance depends on the rows of the rank.
    tensors_to_compare = {
        name: tensor.detach() for name, tensor in tensors.items() if "running_var" not in name
    }
    return {
        name: tensor_value.full_tensor() if isinstance(tensor_value, DTensor) else tensor_value.clone()
        for name, tensor_value in tensors_to_compare.items()
    }


def compare(ranks, alone, case):
    """Compare every rank with the single process."""
    losses, norms, parameters = alone
    exact = case.mixed_precision == "no"
    bar = BAR if exact else 2**-7
    for number, rank in enumerate(ranks):
        torch.testing.assert_close(
            rank[0], losses, rtol=bar, atol=bar, msg=lambda m, n=number: f"rank {n}, losses: {m}"
        )
        torch.testing.assert_close(
            rank[1], norms, rtol=bar, atol=bar, msg=lambda m, n=number: f"rank {n}, norms: {m}"
        )
        torch.testing.assert_close(
            rank[2], parameters, rtol=bar, atol=bar, msg=lambda m, n=number: f"rank {n}, parameters: {m}"
        )


@pytest.fixture(scope="module")
def references():
    """Results of one process, computed on first use."""
    return {}


@pytest.fixture
def equal(references, alone):
    """Compare training on several processes with training on this process."""

    def check(cluster, name, layout):
        if name not in references:
            references[name] = alone.run(train, CASES[name], "replicated")[0]
        compare(cluster.run(train, CASES[name], layout), references[name], CASES[name])

    return check


QUICK = {
    (2, "sharded"): ("accumulated, clipped, scheduled", "bf16, accumulated, clipped"),
    (2, "tensor"): ("accumulated, clipped, scheduled", "bf16, accumulated, clipped"),
    (4, "hybrid"): ("accumulated, clipped, scheduled",),
}
"""Cases that `make test` runs, by world size and layout."""


def list_trainings():
    """Yield every case in every layout: some run in `make test`, a seventh of the others in `make test-slow`.

    Each case has other layouts there than the case before, so that all of them have each layout.
    """
    layouts = [(2, layout) for layout in ON_TWO] + [(4, layout) for layout in ON_FOUR]
    for number, (size, layout) in enumerate(layouts):
        for index, case in enumerate(CASES):
            # `test_axes.py` compiles in each layout.
            slow = case != "compiled" and number % 7 == index % 7
            marks = [pytest.mark.slow if slow else pytest.mark.full]
            yield pytest.param(
                size, layout, case, marks=[] if case in QUICK.get((size, layout), ()) else marks
            )


@pytest.mark.parametrize(("size", "layout", "case"), list(list_trainings()))
def test_training_on_several_processes_equals_training_on_one(equal, clusters, size, layout, case):
    equal(clusters[size], case, layout)
