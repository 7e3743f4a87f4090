"""Counts that a script reduces itself: each sample is counted once on two processes, in each form, or the place is a finding."""

import os
import re
import subprocess
import sys

import pytest
from support.processes.children import free_port

from accel_cli.extensions.migrate.conversion import migrate_script

HEAD = """\
import types

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
device = torch.device("cpu")
torch.manual_seed(0)
xs = torch.randn(SIZE, 4)
data = TensorDataset(xs, xs.argmax(1))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOADER = "test_{name} = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))\n"
HITS = "(model(x).argmax(1) == y).sum()"
PRINT = "a, b = count_{name}()\nif rank == 0:\n    print('{name}', float(a), float(b))\n"


def write_form(name, start, body, end, result):
    """Return a function that evaluates: statements before its loop, in it and after it, and the two values that it returns."""
    lines = [f"    {line}\n" for line in start]
    lines += [f"    for x, y in test_{name}:\n", *(f"        {line}\n" for line in body)]
    lines += [f"    {line}\n" for line in [*end, f"return {result}"]]
    return f"@torch.no_grad()\ndef count_{name}():\n{''.join(lines)}"


COUNT = [f"correct += {HITS}.item()", "total += len(y)"]
ZERO = ["correct = 0", "total = 0"]
STATS = ["stats = torch.zeros(2, device=device)"]
PAIR = "stats[0], stats[1]"
SUMMED = ["dist.all_reduce(stats)"]
TENSOR = ["stats = torch.tensor([correct, total], dtype=torch.float32)", *SUMMED]
GATHERED = {
    "index": (STATS, [f"stats[0] += {HITS}", "stats[1] += len(y)"], SUMMED, PAIR),
    "slice": (STATS, [f"stats[:1] += {HITS}", "stats[1:] += y.size(0)"], SUMMED, PAIR),
    "negative": (STATS, ["out = model(x)", "stats[-2] += (out.argmax(1) == y).sum()", "stats[-1] += y.shape[0]"], SUMMED, PAIR),
    "stack": (STATS, ["out = model(x)", "stats += torch.stack([(out.argmax(1) == y).sum(), torch.tensor(len(y))])"], SUMMED, PAIR),
    "inplace": (["stats = torch.zeros(1)"], [f"stats.add_({HITS})"], SUMMED, "stats, 0"),
    "tensors": (["correct = torch.zeros(1)", "total = torch.zeros(1)"], [f"correct += {HITS}", "total += len(y)"], ["dist.all_reduce(correct)", "dist.all_reduce(total)"], "correct, total"),
    "numbers": (ZERO, COUNT, TENSOR, PAIR),
    "numbers_back": (ZERO, COUNT, [*TENSOR, "correct, total = stats.tolist()"], "correct / total, total"),
    "listed": (["parts = [0.0, 0]"], [f"parts[0] += {HITS}.item()", "parts[1] += len(y)"], ["stats = torch.tensor(parts)", *SUMMED], PAIR),
    "keyed": (["totals = {'correct': 0, 'seen': 0}"], [f"totals['correct'] += {HITS}.item()", "totals['seen'] += len(y)"], ["stats = torch.tensor([totals['correct'], totals['seen']])", *SUMMED], PAIR),
    "losses": (ZERO, ["out = model(x)", "value = torch.nn.functional.cross_entropy(out, y)", "correct += value.item() * y.size(0)", "total += y.size(0)"], TENSOR, PAIR),
    "assigned": (ZERO, [f"correct = correct + {HITS}.item()", "total = total + len(y)"], TENSOR, PAIR),
}  # fmt: skip
REDUCED = {
    "batches": (ZERO, [f"correct += {HITS}.item()", "total += 1"], TENSOR, PAIR),
    "means": (ZERO, ["out = model(x)", "value = torch.nn.functional.cross_entropy(out, y)", "correct += value.item()", "total += 1"], TENSOR, "stats[0] / stats[1], 0"),
    "divided": (STATS, [f"stats[0] += {HITS}", "stats[1] += len(y)"], [*SUMMED, "stats /= dist.get_world_size()"], PAIR),
    "divided_later": (ZERO, COUNT, [*TENSOR, "correct = stats[0] / dist.get_world_size()"], "correct, stats[1]"),
    "averaged": (STATS, [f"stats[0] += {HITS}", "stats[1] += len(y)"], [*SUMMED, "stats = stats / dist.get_world_size()"], PAIR),
    "in_loop": (ZERO, [f"hits = {HITS}", "dist.all_reduce(hits)", "correct += hits.item()"], [], "correct, 0"),
    "collected": (["hits = []"], [f"hits.append({HITS}.item())"], ["stats = torch.tensor(hits).sum()", *SUMMED], "stats, 0"),
    "with_local": (ZERO, COUNT, ["stats = torch.tensor([correct, 3])", *SUMMED], PAIR),
    "started": (["stats = torch.ones(2)"], [f"stats[0] += {HITS}"], SUMMED, PAIR),
    "two_columns": (["stats = torch.zeros(8, 4)"], ["stats += model(x).abs()"], SUMMED, "stats.sum() * 0 + stats.numel(), 0"),
}  # fmt: skip
HELPERS = """\
def reduce_sum(tensor):
    dist.all_reduce(tensor)
    return tensor
class Counts:
    def __init__(self):
        self.correct = torch.zeros(1)
"""
KEPT = {
    "helper": (STATS, [f"stats[0] += {HITS}", "stats[1] += len(y)"], ["stats = reduce_sum(stats)"], PAIR),
    "attribute": (["counts = Counts()"], [f"counts.correct += {HITS}"], ["dist.all_reduce(counts.correct)"], "counts.correct, 0"),
    "namespace": (["counts = types.SimpleNamespace(correct=torch.zeros(1))"], [f"counts.correct += {HITS}"], ["dist.all_reduce(counts.correct)"], "counts.correct, 0"),
    "element": (["totals = {'correct': torch.zeros(1)}"], [f"totals['correct'] += {HITS}"], ["dist.all_reduce(totals['correct'])"], "totals['correct'], 0"),
    "gathered": (STATS, [f"stats[0] += {HITS}"], ["parts = [torch.zeros(2), torch.zeros(2)]", "dist.all_gather(parts, stats)", "stats = sum(parts)"], PAIR),
    "objects": (ZERO, COUNT, ["parts = [None, None]", "dist.all_gather_object(parts, [correct, total])"], "sum(one[0] for one in parts), sum(one[1] for one in parts)"),
    "of_nn": (STATS, [f"stats[0] += {HITS}"], ["stats = torch.distributed.nn.functional.all_reduce(stats)"], PAIR),
    "asynchronous": (STATS, [f"stats[0] += {HITS}"], ["work = dist.all_reduce(stats, async_op=True)", "work.wait()"], PAIR),
}  # fmt: skip


def write_script(forms, size=64, helpers=""):
    text = HEAD.replace("SIZE", str(size)) + helpers
    if "of_nn" in forms:
        text = text.replace("import torch\n", "import torch\nimport torch.distributed.nn\n", 1)
    text += "".join(LOADER.format(name=name) for name in forms)
    text += "".join(write_form(name, *form) for name, form in forms.items())
    return text + "".join(PRINT.format(name=name) for name in forms)


def run(text, folder, processes=2):
    """Run a script on several processes over gloo; return the values that the first one prints, by their names."""
    path = folder / "script.py"
    path.write_text(text)
    with free_port() as port:
        environ = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes), "ACCEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        started = [
            subprocess.Popen(
                [sys.executable, path],
                env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(processes)
        ]
        outputs = [one.communicate(timeout=120)[0] for one in started]
    assert [one.returncode for one in started] == [0] * processes, outputs
    found = re.findall(r"^(\w+) (-?[\d.e+]+) (-?[\d.e+]+)$", outputs[0], re.MULTILINE)
    return {name: pytest.approx([float(first), float(second)], rel=1e-5) for name, first, second in found}


def values(found):
    return {name: list(one.expected) for name, one in found.items()}


def list_found(text, forms):
    """Return the forms whose evaluation has a finding about its count."""
    result = migrate_script(text)
    lines = [one.line for one in result.findings if "the script reduces the count itself" in one.text]
    source = text.splitlines()
    return {name for name in forms if any(f" in test_{name}:" in source[line - 1] for line in lines)}


@pytest.mark.slow
def test_sums_that_the_script_reduces_are_those_of_all_samples_once(tmp_path):
    text = write_script(GATHERED)
    result = migrate_script(text)
    assert not result.findings
    assert not result.notes
    assert "reduce(" not in result.text
    assert result.text.count("gather_for_metrics") == len(GATHERED)
    before = run(text, tmp_path)
    assert before.keys() == GATHERED.keys()
    assert values(run(result.text, tmp_path)) == before
    # padding is not counted: 61 samples are no whole number of batches
    uneven = write_script(GATHERED, size=61)
    assert values(run(migrate_script(uneven).text, tmp_path)) == run(uneven, tmp_path, processes=1)


@pytest.mark.slow
@pytest.mark.parametrize(("forms", "helpers"), [(REDUCED, ""), (KEPT, HELPERS)], ids=["reduced", "kept"])
def test_other_reductions_stay_and_their_loops_are_not_gathered(forms, helpers, tmp_path):
    text = write_script(forms, helpers=helpers)
    result = migrate_script(text)
    assert list_found(text, forms) == forms.keys()
    assert "gather_for_metrics" not in result.text
    before = run(text, tmp_path)
    assert before.keys() == forms.keys()
    assert values(run(result.text, tmp_path)) == before


@pytest.mark.parametrize("name", [*GATHERED, *REDUCED, *KEPT])
def test_a_loop_is_gathered_or_reduced_and_never_both(name):
    form = (GATHERED | REDUCED | KEPT)[name]
    text = write_script({name: form}, helpers=HELPERS if name in KEPT else "")
    is_found = bool(list_found(text, [name]))
    after = migrate_script(text).text.partition(f"def count_{name}")[2]
    assert is_found == (name not in GATHERED)
    assert ("gather_for_metrics" in after) == (name in GATHERED)
    assert not (name in GATHERED and re.search(r"reduce|all_gather", after))
