"""Scripts put together of usual parts in any combination print the same numbers after their conversion."""

from __future__ import annotations

import contextlib
import io
import textwrap

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.migrate.conversion import migrate_script
from accel_runtime.backends import set_current_backend

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

"""
DEVICES = {
    "conditional": ('device = torch.device("cuda" if torch.cuda.is_available() else "cpu")', "device"),
    "assigned twice": ('device = "cpu"\nif torch.cuda.is_available():\n    device = "cuda"', "device"),
    "constant": ('dev = torch.device("cpu")', "dev"),
    "none": ("", ""),
}
SCHEDULERS = {
    "none": ("", ""),
    "batch": (
        "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)",
        "scheduler.step()",
    ),
    "epoch": ("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "scheduler.step()"),
}
EVALUATIONS = {
    "none": "",
    "loss": "losses = 0.0\nfor x, y in test_loader:\n    with torch.no_grad():\n        losses += nn.functional.mse_loss(model(MOVE_X), MOVE_Y).item()\nprint(losses / len(test_loader))",
    "counts": "hits = total = 0\nwith torch.no_grad():\n    for x, y in test_loader:\n        out = model(MOVE_X)\n        hits += ((out > 0) == (MOVE_Y > 0)).sum().item()\n        total += len(y)\nprint(hits, total)",
    "lists": "found = []\nfor x, y in test_loader:\n    with torch.no_grad():\n        out = model(MOVE_X)\n    found.extend(out.view(-1).tolist())\nprint(sum(found))",
}

PARTS = {
    "device": st.sampled_from(sorted(DEVICES)),
    "scheduler": st.sampled_from(sorted(SCHEDULERS)),
    "evaluation": st.sampled_from(sorted(EVALUATIONS)),
    "steps": st.sampled_from([1, 2, 4]),
    "clips": st.booleans(),
    "is_function": st.booleans(),
}


def build(parts):
    """Return a script of these parts."""
    scheduler, steps = parts["scheduler"], parts["steps"]
    choice, name = DEVICES[parts["device"]]
    move = f".to({name})" if name else ""
    create, advance = SCHEDULERS[scheduler]
    step = [
        *(["nn.utils.clip_grad_norm_(model.parameters(), 0.5)"] if parts["clips"] else []),
        "optimizer.step()",
        *([advance] if scheduler == "batch" else []),
        "optimizer.zero_grad()",
    ]
    if steps > 1:
        step = [f"if (i + 1) % {steps} == 0:", *(f"    {line}" for line in step)]
    scale = f" / {steps}" if steps > 1 else ""
    batch = [
        *([f"x, y = x{move}, y{move}"] if move else []),
        f"loss = nn.functional.mse_loss(model(x), y){scale}",
        "loss.backward()",
        *step,
        'print("loss", loss.item())',
    ]
    epoch = ["for i, (x, y) in enumerate(loader):", *(f"    {line}" for line in batch)]
    epoch += [advance] if scheduler == "epoch" else []
    epoch += (
        EVALUATIONS[parts["evaluation"]]
        .replace("MOVE_X", f"x{move}")
        .replace("MOVE_Y", f"y{move}")
        .splitlines()
    )
    body = [
        "torch.manual_seed(0)",
        *choice.splitlines(),
        "x = torch.randn(48, 4)",
        "y = x.sum(dim=1, keepdim=True)",
        "loader = DataLoader(TensorDataset(x[:32], y[:32]), batch_size=8, shuffle=True)",
        "test_loader = DataLoader(TensorDataset(x[32:], y[32:]), batch_size=6)",
        f"model = nn.Linear(4, 1){move}",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
        *([create] if create else []),
        "for epoch in range(2):",
        *(f"    {line}" for line in epoch),
    ]
    text = "\n".join(body) + "\n"
    return HEAD + (
        f"def main():\n{textwrap.indent(text, '    ')}\n\nmain()\n" if parts["is_function"] else text
    )


FABRIC = {
    "torch.manual_seed(0)": 'fabric = Fabric(accelerator="cpu", devices=1)\nfabric.launch()\nfabric.seed_everything(0)',
    "for epoch in range(2):": "model, optimizer = fabric.setup(model, optimizer)\nloader, test_loader = fabric.setup_dataloaders(loader, test_loader)\nfor epoch in range(2):",
    "loss.backward()": "with fabric.no_backward_sync(model, enabled=i % 2 == 0):\n    fabric.backward(loss)",
    "nn.utils.clip_grad_norm_(model.parameters(), 0.5)": "fabric.clip_gradients(model, optimizer, max_norm=0.5)",
    "found.extend(out.view(-1).tolist())": "found.append(fabric.all_gather(out).sum().item())",
}


def use_fabric(text):
    """Return a script that trains with Fabric, from one that `build` returns."""
    lines = [HEAD + "from lightning_fabric import Fabric\n"]
    for line in text.removeprefix(HEAD).splitlines():
        code = line.strip()
        lines += [textwrap.indent(FABRIC.get(code, code), line[: len(line) - len(code)])]
    return "\n".join(lines) + "\n"


def run(text):
    output = io.StringIO()
    set_current_backend(None)
    with contextlib.redirect_stdout(output):
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - the script of a test
    return output.getvalue()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    yield
    set_current_backend(None)


@pytest.mark.full
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(parts=st.fixed_dictionaries(PARTS))
def test_a_script_of_usual_parts_prints_the_same_numbers(parts):
    text = build(parts)
    result = migrate_script(text)
    assert not result.findings
    assert "accelerator.backward(loss)" in result.text
    assert migrate_script(result.text).text == result.text
    assert run(result.text) == run(text)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(parts=st.fixed_dictionaries(PARTS | {"device": st.just("none")}))
def test_a_script_for_fabric_prints_the_same_numbers(parts):
    pytest.importorskip("lightning_fabric")
    text = use_fabric(build(parts))
    result = migrate_script(text)
    assert not result.findings
    assert "accelerator.backward(loss)" in result.text
    assert migrate_script(result.text).text == result.text
    assert run(result.text) == run(text)
