"""Every pair of axes does, or refuses, each operation that `support.cases.axes` lists, and the page has the same table.

A program trains on the ranks of a layout and on one process, in float64: losses, norms and parameters agree to 1e-9. In
bf16 they agree to 2**-7.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases.axes import LAYOUTS, OPERATIONS, find_refusal, write_table
from support.runs.sharded_runs import build_accelerator, to_full
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import DataLoaderConfiguration, TorchDynamoPlugin

PAGE = Path(__file__).parents[3] / "docs" / "which-axis.md"
WORDS, WIDTH, LENGTH, BATCH, STEPS = 16, 8, 8, 4, 3
PLAN = {"layer.q": "colwise", "layer.k": "colwise", "layer.v": "colwise", "layer.o": "rowwise"}
PLAN |= {"layer.up": "colwise", "layer.down": "rowwise"}
PLAN |= {"norm": "sequence_parallel"}
ROWS = {"embed": "embedding_rowwise", "head": "colwise_rep"}
"""Tied layers, which are not compiled."""


class Layer(nn.Module):
    """Attention with four heads, and a feed-forward network."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # Softmax does not see a bias of the keys: its gradient is rounding errors, which Adam makes whole steps of.
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        inside = self.first(x)
        heads = [part(inside).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Words(nn.Module):
    """A causal language model whose head is tied to its embedding."""

    _no_split_modules = ("Layer",)

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer, self.norm = Layer(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, positions):
        return self.head(self.norm(self.layer(self.embed(tokens) / 4 + self.places(positions))))


class Run:
    """The prepared objects of a script in a layout, and what it has computed."""

    def __init__(self, sizes, *, seed=1, dtype=torch.float64, plan=PLAN | ROWS, **options):
        torch.manual_seed(seed)
        plan = (
            {"tp_plan": ",".join(f"{name}={style}" for name, style in plan.items())} if "tp" in sizes else {}
        )
        config = DataLoaderConfiguration(split_batches=True)
        self.accelerator = build_accelerator(sizes | plan, dataloader_config=config, **options)
        model = Words().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if dtype is torch.float32:
            # Adam makes whole steps of gradients that are all but rounding errors in bf16.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        words = torch.randint(WORDS, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
        loader = DataLoader(TensorDataset(words[:, :-1], words[:, 1:]), batch_size=BATCH)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.losses, self.norms = [], []

    def train(self, batches=None, *, stop=None, clip=None):
        """Train on the next batches; return losses, norms and parameters."""
        accelerator, batches = self.accelerator, self.loader if batches is None else batches
        for number, (tokens, labels) in enumerate(batches, 1):
            positions = torch.arange(LENGTH).expand_as(tokens).contiguous()
            with (
                accelerator.accumulate(self.model),
                accelerator.maybe_context_parallel([tokens, labels, positions], [1, 1, 1]),
            ):
                logits = self.model(tokens, positions)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).to(self.precise), labels.flatten())
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    self.norms.append(
                        accelerator.clip_grad_norm_(self.model.parameters(), clip).double().item()
                    )
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if number == stop:
                break
        return self.losses, self.norms, self.gather()

    @property
    def precise(self):
        """The dtype of the loss."""
        return next(self.model.parameters()).dtype

    def gather(self):
        """Return the full parameters."""
        model = self.accelerator.unwrap_model(self.model)
        return {name: to_full(value.detach()).clone() for name, value in model.named_parameters()}


def save_and_continue(sizes, folder, *, stop=1, **options):
    """Save after some batches and train on; return the results of the uninterrupted run."""
    run = Run(sizes, **options)
    batches = iter(run.loader)
    run.train(batches, stop=stop)
    run.accelerator.save_state(folder)
    run.accelerator.wait_for_checkpoint()
    return run.train(batches)


def resume(sizes, folder, **options):
    """Load a checkpoint into other values and train on."""
    run = Run(sizes, seed=2, **options)
    run.accelerator.resume(folder)
    return run.train()


def export(sizes, folder):
    """Export weights; return the state dict of all ranks and the parameters."""
    run = Run(sizes)
    run.train(stop=1)
    run.accelerator.save_model(run.model, folder)
    return [], [], dict(run.accelerator.get_state_dict(run.model, everywhere=True))


PROGRAMS = {
    "save": lambda sizes, folder: [
        save_and_continue(sizes, f"{folder}/ranks"),
        resume(sizes, f"{folder}/ranks"),
    ],
    "save within a cycle": lambda sizes, folder: [
        save_and_continue(sizes, f"{folder}/cycle", gradient_accumulation_steps=2),
        resume(sizes, f"{folder}/cycle", gradient_accumulation_steps=2),
    ],
    "load at another layout": lambda sizes, folder: [resume(sizes, f"{folder}/one")],
    "export": lambda sizes, folder: [export(sizes, f"{folder}/export")],
    "clip": lambda sizes, _: [Run(sizes).train(clip=0.1)],
    "accumulation": lambda sizes, _: [Run(sizes, gradient_accumulation_steps=2).train()],
    # With `cp` and `sp` each graph takes seconds, so that their pairs are traced and not compiled; each alone is.
    "compile": lambda sizes, _: [
        Run(
            sizes,
            plan=PLAN,
            dynamo_backend="eager" if len(sizes) > 1 and {"cp", "sp"} & sizes.keys() else "aot_eager",
        ).train(stop=2)
    ],
    "bf16": lambda sizes, _: [Run(sizes, mixed_precision="bf16", dtype=torch.float32).train()],
}
"""The results of each operation on the ranks of a layout."""


def run_row(sizes, operations, folder, one):
    """Return the results of the operations on this rank, or the message of the error of each."""
    # Warnings of torch about its own tracing and hooks.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message=".* should not be instantiated", category=DeprecationWarning)
    results = {}
    for operation in operations:
        torch._dynamo.reset()
        try:
            is_loaded = operation == "load at another layout"
            results[operation] = PROGRAMS[operation](sizes, one if is_loaded else folder)
        except Exception as error:  # noqa: BLE001 - each cell has its own
            results[operation] = f"{error}"
    return results


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return a function that returns the results of an operation on one process, and the folder with a checkpoint of it."""
    folder, known = tmp_path_factory.mktemp("axes"), {}

    def compute(operation):
        if operation not in known:
            if operation == "load at another layout":
                save_and_continue({}, f"{folder}/one")
                known[operation] = PROGRAMS[operation]({}, folder)
            elif operation == "compile":
                known[operation] = [Run({}).train(stop=2)]
            else:
                known[operation] = PROGRAMS[operation]({}, f"{folder}/{len(known)}")
        return known[operation]

    return compute, folder


def compare(operation, ranks, expected):
    """Compare the results of all ranks with those of one process."""
    bar = 2**-7 if operation == "bf16" else 1e-9
    for rank, results in enumerate(ranks):
        assert not isinstance(results, str), results
        for result, alone in zip(results, expected, strict=True):
            torch.testing.assert_close(
                result, alone, rtol=bar, atol=bar, msg=lambda text, rank=rank: f"rank {rank}: {text}"
            )


def check_row(cluster, one_process, layout, operations, folder):
    """Run operations on the ranks of a layout; return the failure of each that does not do what its cell says."""
    compute, one = one_process
    expected = {operation: compute(operation) for operation in operations}
    ranks = cluster.run(run_row, layout.sizes, operations, folder, one)
    failures = {}
    for operation in operations:
        results = [rank[operation] for rank in ranks]
        refusal = find_refusal(layout, operation)
        try:
            if refusal:
                # The keys of the profile are variables here.
                named = [
                    re.sub(r"ACCEL_PARALLEL_(\w+)", lambda found: f"parallel.{found[1].lower()}", text)
                    for text in results
                ]
                assert named == [refusal.sentence] * layout.world_size, results
                assert not (folder / "cycle").exists()
            else:
                compare(operation, results, expected[operation])
                AFTERWARDS.get(operation, lambda *_: None)(folder, expected[operation], results)
        except AssertionError as error:
            failures[operation] = str(error)
    return failures


def check_resumed(_folder, _expected, ranks):
    """A resumed run continues bit for bit."""
    for uninterrupted, resumed in ranks:
        assert resumed[0] == uninterrupted[0][1:]
        torch.testing.assert_close(resumed[2], uninterrupted[2], rtol=0, atol=0)


def check_saved(folder, expected, ranks):
    """A resumed run continues bit for bit, and one process continues a checkpoint of the ranks."""
    check_resumed(folder, expected, ranks)
    compare("save", [[resume({}, f"{folder}/ranks")]], expected[1:])


def check_exported(folder, expected, _):
    """The file has the parameters, tied ones once."""
    stored = load_file(folder / "export" / "model.safetensors")
    ((_, _, parameters),) = expected
    assert parameters.keys() - stored.keys() in ({"head.weight"}, {"embed.weight"})
    torch.testing.assert_close(stored, {name: parameters[name] for name in stored}, rtol=1e-9, atol=1e-9)


AFTERWARDS = {"save": check_saved, "save within a cycle": check_resumed, "export": check_exported}
"""What this process checks after the ranks."""


# The table -----------------------------------------------------------------------------

QUICK = {"dp_shard-cp", "dp_shard-sp", "dp_shard-tp"}
"""Layouts of which `make test` runs every operation but `compile`, which takes seconds."""
COMPILED = [operation for operation in OPERATIONS if operation == "compile"]
OTHERS = [operation for operation in OPERATIONS if operation not in COMPILED]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=str(layout), marks=[pytest.mark.slow] * (str(layout) not in QUICK))
        for layout in LAYOUTS
    ],
)
def test_a_layout_does_what_its_row_says(clusters, one_process, layout, tmp_path):
    assert not check_row(clusters[layout.world_size], one_process, layout, OTHERS, tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        # Replicas beside another axis compile what that axis does.
        pytest.param(layout, id=str(layout), marks=pytest.mark.full if is_full else pytest.mark.slow)
        for layout in LAYOUTS
        for is_full in [len(layout.axes) == 2 and layout.axes[0] == "dp_replicate"]
    ],
)
def test_a_layout_compiles_as_its_row_says(clusters, one_process, layout, tmp_path):
    assert not check_row(clusters[layout.world_size], one_process, layout, COMPILED, tmp_path)


def train_on_lengths(sizes, dynamo):
    """Return the losses of batches of several lengths."""
    torch._dynamo.reset()
    run, losses = Run(sizes, plan=PLAN, dynamo_plugin=dynamo), []
    for batch, length in zip(run.loader, (8, 6), strict=False):
        tokens, labels = (part[:, :length].contiguous() for part in batch)
        logits = run.model(tokens, torch.arange(length).expand_as(tokens).contiguous())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_compiled_tensor_parallel_model_takes_batches_of_several_lengths(pair):
    expected = train_on_lengths({}, TorchDynamoPlugin())
    for losses in pair.run(train_on_lengths, {"tp": 2}, TorchDynamoPlugin("aot_eager")):
        assert losses == pytest.approx(expected, abs=1e-9)


REFUSED = {
    "tensor parallel model with dynamic=True: torch cannot trace": (PLAN, {"dynamic": True}),
    "torch cannot trace embed, whose rows": (PLAN | ROWS, {}),
    "Cannot compile Words": (PLAN | ROWS, {"use_regional_compilation": True}),
}
"""Plans and options that torch cannot compile under tensor parallelism."""


def refuse_compilation():
    for message, (plan, options) in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            Run({"tp": 2}, plan=plan, dynamo_plugin=TorchDynamoPlugin("aot_eager", **options))


def test_layers_that_torch_cannot_compile_under_tensor_parallelism_are_refused(pair):
    pair.run(refuse_compilation)


def save_without_partial_gradients(sizes, folder):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    options = {"gradient_accumulation_steps": 2, "plan": {**PLAN, **ROWS, "norm": "replicate"}}
    return [save_and_continue(sizes, folder, **options), resume(sizes, folder, **options)]


def test_a_cycle_under_tensor_parallelism_is_saved_if_no_gradient_is_a_partial_sum(
    clusters, one_process, tmp_path
):
    sizes = {"dp_shard": 2, "tp": 2}
    (layout,) = (layout for layout in LAYOUTS if layout.sizes == sizes)
    assert find_refusal(layout, "save within a cycle")
    ranks = clusters[4].run(save_without_partial_gradients, sizes, str(tmp_path))
    compare("save within a cycle", ranks, one_process[0]("save within a cycle"))
    check_resumed(None, None, ranks)


def test_the_page_has_the_table_of_the_tests():
    before, heading, after = PAGE.read_text(encoding="utf-8").partition("## Pairs of axes\n")
    # A table without a name of its first column, and the sentences below it.
    table = r"^\| \|.*\n(?:\|.*\n)*(?:\n(?:\d+\. `.*\n)+)?"
    expected, count = re.subn(table, lambda _: write_table(), after, count=1, flags=re.MULTILINE)
    assert count == 1
    if os.environ.get("WRITE_GOLDEN"):
        PAGE.write_text(before + heading + expected, encoding="utf-8")
    elif after != expected:
        pytest.fail(
            f"The table changed. Run this test with WRITE_GOLDEN=1 to rewrite {PAGE.name}.\n{expected}"
        )
