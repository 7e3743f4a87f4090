"""Scripts in the usual styles, and in those of public examples, are converted as the golden files show, and train as before.

Those of `styles` are trained after the edits that their findings list.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib.util
import io
import os
import re
import runpy
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.cases import golden
from support.processes.children import free_port
from support.processes.ranks import Cluster

from accel_cli.extensions.migrate.conversion import migrate_script
from accel_cli.extensions.migrate.marks import add_marks, find_marks

FOLDER = Path(__file__).parent
CORPUS = sorted((FOLDER / "corpus").glob("*.py"))
STYLES = sorted((FOLDER / "styles").glob("*.py"))
REFUSED = {"loaders_in_a_dict", "layers_that_train", "shared_memory"}
"""Scripts that are left as they are, with findings: no place could prepare their objects together."""
OPEN = {
    "own_batches", "ddp_by_hand", "graph_network", "language_model", "policy_gradient", "polynomial", "sine_lbfgs",
    "spawned_workers", "style_transfer",
}  # fmt: skip
"""Scripts that are converted, and have findings."""
NEEDS_A_GPU = {"grad_scaler"}
UNEQUAL = {
    "functions", "gan", "own_batches", "mixed_precision", "autoencoder_globals", "language_model", "own_batches_steps",
    "policy_gradient", "polynomial", "translation", "two_networks",
}  # fmt: skip
"""Scripts that compute on two halves of a batch something else than on the batch: with noise, or sums in bfloat16."""
CONNECTED = {"ddp", "ddp_by_hand", "torchrun_trainer"}
"""Scripts that connect the processes of their launcher."""
QUICK = {"ddp", "dict_batches", "fabric_loop", "flat", "functions", "training_metrics"}
"""The scripts of the corpus that are trained outside of `make test-full` too."""
TRAINED = [
    pytest.param(
        path, id=path.stem, marks=pytest.mark.full if path in CORPUS and path.stem not in QUICK else ()
    )
    for path in CORPUS + STYLES
    if path.stem not in REFUSED | NEEDS_A_GPU
]
COUNTED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(torch.randn(32, 8), batch_size=8)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 2 * len(loader)
test = DataLoader(torch.randn(8, 8), batch_size=8)
step = 0
for epoch in range(2):
    for x in loader:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / total)
print(optimizer.param_groups[0]["lr"])
"""
IN_CYCLES = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(torch.randn(32, 8), batch_size=4)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 16)
for i, x in enumerate(loader):
    loss = model(x).pow(2).mean() / 2
    loss.backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
print(optimizer.param_groups[0]["lr"])
"""


@functools.cache
def convert(path):
    """Return the result for a script."""
    return migrate_script(path.read_text())


def describe_findings(path):
    result = convert(path)
    found = [f"{path.name}:{one.line}: {one.text}" for one in result.findings]
    return [*found, *(f"{path.name}:{one.line}: note: {one.text}" for one in result.notes)]


@pytest.mark.smoke
def test_the_corpus_is_converted_as_in_its_golden_file():
    lines = []
    for path in CORPUS:
        before, after = path.read_text().splitlines(), convert(path).text.splitlines()
        lines += difflib.unified_diff(before, after, path.name, path.name, lineterm="")
        lines += [*describe_findings(path), ""]
    golden.check("migrate/corpus.txt", "\n".join(lines))


def test_the_findings_of_public_styles_are_those_of_their_golden_file():
    golden.check(
        "migrate/styles.txt", "\n".join(line for path in STYLES for line in [*describe_findings(path), ""])
    )


def test_scripts_are_left_as_they_are_only_with_findings():
    scripts = CORPUS + STYLES
    assert {path.stem for path in scripts if convert(path).text == path.read_text()} == REFUSED
    assert {path.stem for path in scripts if convert(path).findings} == REFUSED | OPEN


def test_a_converted_script_is_not_converted_again_and_keeps_its_comments():
    for path in CORPUS:
        once, before = convert(path), path.read_text()
        comments = {line.strip() for line in before.splitlines() if line.strip().startswith("#")}
        assert comments <= {line.strip() for line in once.text.splitlines()}, path.stem
        if path.stem not in REFUSED:
            again = migrate_script(once.text)
            assert (again.text, again.findings, again.notes) == (once.text, (), ()), path.stem


@pytest.mark.slow
def test_the_comments_of_the_places_left_change_no_statement():
    for path in STYLES:
        if path.stem in REFUSED:
            continue
        result = convert(path)
        marked = add_marks(path.read_text(), result.text, result.findings)
        assert ast.dump(ast.parse(marked)) == ast.dump(ast.parse(result.text)), path.stem
        assert sorted(one.text for one in find_marks(marked)) == sorted(one.text for one in result.findings)
        assert migrate_script(marked).text == marked, path.stem


def apply_edits(text, path):
    """Apply the hunks of a file to a text: `-` and `+` before old and new lines, a space before lines that stay."""
    if not path.exists():
        return text
    for hunk in path.read_text().split("\n\n"):
        lines = hunk.strip("\n").splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in ("- ", "+ "))
        assert text.count(old) == 1, f"{path.name}: {old!r} is in the text {text.count(old)} times"
        text = text.replace(old, new)
    return text


def train(text, folder, environ):
    """Run a script as the main module; return its output, the weights it saved, and a hash of its prepared models."""
    import accel_runtime

    models = []
    prepare = accel_runtime.Accelerator.prepare

    def record(self, *objects, **options):
        result = prepare(self, *objects, **options)
        prepared = result if isinstance(result, tuple) else (result,)
        models.extend(one for one in prepared if isinstance(one, torch.nn.Module))
        return result

    utils = types.ModuleType("torchvision.utils")
    utils.save_image = lambda tensor, path, **_: Path(path).write_text(str(tuple(tensor.shape)))
    vision = types.ModuleType("torchvision")
    vision.utils = utils
    Path(folder).mkdir(parents=True, exist_ok=True)
    script = Path(folder) / f"train{os.environ['RANK']}.py"
    script.write_text(text)
    output = io.StringIO()
    with (
        free_port() as port,
        mock.patch.dict(os.environ, {"PORT": str(port)}),  # which a script may change
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
    ):
        for name in ("RANK", "LOCAL_RANK"):
            if environ is not None and name not in environ:
                patch.delenv(name)
        if "torchvision" in text:  # other packages look for it too
            patch.setitem(sys.modules, "torchvision", vision)
            patch.setitem(sys.modules, "torchvision.utils", utils)
        patch.setattr(sys, "argv", ["train.py"])
        patch.setattr(accel_runtime.Accelerator, "prepare", record)
        patch.setattr(torch.multiprocessing, "spawn", lambda worker, args=(), **_: worker(0, *args))
        patch.chdir(folder)
        runpy.run_path(str(script), run_name="__main__")
    values = [one.detach().double() for model in models for one in model.parameters()]
    digest = hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in values)).hexdigest()
    is_finite = all(bool(one.isfinite().all()) for one in values)
    saved = Path(folder) / "weights.pt"
    weights = torch.load(saved) if os.environ["RANK"] == "0" and saved.exists() else None
    return output.getvalue(), weights, digest, is_finite, len(models)


@pytest.fixture(scope="module")
def clusters():
    settings = {"RANK_WARNINGS": "ignore"}
    found = {
        name: Cluster(size, settings=settings) for name, size in {"before": 1, "one": 1, "two": 2}.items()
    }
    yield found
    for cluster in found.values():
        cluster.close()


def read_script(path):
    """Return a script as the packages here run it: Fabric is that of `lightning_fabric`."""
    text = path.read_text()
    if path.stem.startswith("fabric_"):
        if importlib.util.find_spec("lightning_fabric") is None:
            pytest.skip("lightning_fabric is not installed")
        text = text.replace("import lightning as", "import lightning_fabric as")
        text = text.replace("lightning.fabric", "lightning_fabric")
    return text


def read_numbers(text):
    return torch.tensor([float(one) for one in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)])


@pytest.mark.slow
@pytest.mark.parametrize("path", TRAINED)
def test_a_script_trains_as_before_on_one_process_and_on_two(path, clusters, tmp_path):
    edited = apply_edits(convert(path).text, path.with_suffix(".edits"))
    environ = {"RANK", "LOCAL_RANK"} if path.stem in CONNECTED else set()
    [before] = clusters["before"].run(train, read_script(path), str(tmp_path / "before"), environ)
    [one] = clusters["one"].run(train, edited, str(tmp_path / "one"), None)
    assert re.search(r"\d\.\d{3}", one[0])
    assert one[0] == before[0]
    torch.testing.assert_close(one[1], before[1], rtol=0, atol=0)
    is_equal, is_split = path.stem not in UNEQUAL, path.stem not in UNEQUAL | {"ddp"}
    text = edited.replace("Accelerator(", "Accelerator(split_batches=True, ") if is_split else edited
    ranks = clusters["two"].run(train, text, str(tmp_path / "two"), None)
    assert all(rank[3] and rank[4] for rank in ranks)
    assert len({rank[2] for rank in ranks}) == 1
    if is_equal:
        torch.testing.assert_close(ranks[0][1], one[1], rtol=1e-4, atol=1e-5)
    if is_equal and path in CORPUS:
        torch.testing.assert_close(read_numbers(ranks[0][0]), read_numbers(one[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [path for path in STYLES if path.stem not in UNEQUAL | REFUSED],
    ids=lambda path: path.stem,
)
def test_two_processes_train_on_batches_of_the_size_of_the_script(path, clusters, tmp_path):
    edited = apply_edits(convert(path).text, path.with_suffix(".edits"))
    ranks = clusters["two"].run(train, edited, str(tmp_path), None)
    assert all(rank[3] and rank[4] for rank in ranks)
    assert len({rank[2] for rank in ranks}) == 1


def test_a_schedule_of_batches_ends_on_two_processes_where_it_ends_on_one(clusters, tmp_path):
    text = convert(FOLDER / "styles" / "embeddings.py").text
    assert not any("batches" in one.text for one in convert(FOLDER / "styles" / "embeddings.py").findings)
    [one] = clusters["one"].run(train, text, str(tmp_path / "one"), None)
    two, _ = clusters["two"].run(train, text, str(tmp_path / "two"), None)
    rates = [re.findall(r"lr (\S+)", run[0]) for run in (one, two)]
    assert rates[0] == rates[1] == ["0.006667", "0.003333", "0.000000"]


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_rate_that_the_script_computes_ends_where_the_finding_puts_the_count(
    clusters, tmp_path, is_followed
):
    text = COUNTED
    result = migrate_script(text)
    assert [one.line for one in result.findings] == [9]
    assert "len(loader) after accelerator.prepare" in result.findings[0].text
    after = result.text
    if is_followed:
        line = "total = 2 * len(loader)\n"
        after = after.replace(line, "").replace("step = 0\n", f"{line}step = 0\n")
    two, _ = clusters["two"].run(train, after, str(tmp_path / "two"), None)
    assert float(two[0].split()[-1]) == (0 if is_followed else 0.05)


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_schedule_within_a_cycle_ends_on_two_processes_where_the_finding_puts_it(
    clusters, tmp_path, is_followed
):
    result = migrate_script(IN_CYCLES)
    [finding] = result.findings
    advice = finding.text.partition("Write ")[2]
    after = result.text.replace("scheduler.step()\n", f"{advice}\n") if is_followed else result.text
    [one] = clusters["one"].run(train, after, str(tmp_path / "one"), None)
    two, _ = clusters["two"].run(train, after, str(tmp_path / "two"), None)
    assert one[0] == "0.5\n"
    assert two[0] == ("0.5\n" if is_followed else "0.75\n")
