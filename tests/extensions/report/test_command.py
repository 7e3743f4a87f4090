"""`accel report` of a real run that logs values, saves, fails, is restarted and continues."""

from __future__ import annotations

import html
import json
import re

import pytest

from accel_cli.extensions.report.page import unpack

pytestmark = pytest.mark.slow

SCRIPT = """
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, ProjectConfiguration

project = ProjectConfiguration("project", automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project, log_with=["jsonl"] if "TRACK" in os.environ else None)
if "TRACK" in os.environ:
    accelerator.init_trackers("digits", config={"lr": 0.1})
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(128, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
step = loader.epoch * len(loader)
for epoch in range(loader.epoch, 3):
    for (batch,) in loader:
        time.sleep(0.1 * accelerator.process_index)
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.log({"loss": loss.item(), "step": step}, step=step)
        if step == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and accelerator.process_index == 1:
            raise ValueError("bad <label>")
    accelerator.save_state()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "tracked", [pytest.param(False, marks=pytest.mark.full), True], ids=["run-folder", "tracker"]
)
def test_the_report_of_a_restarted_run_has_all_its_attempts(accel, script, cwd, monkeypatch, tracked):
    if tracked:
        monkeypatch.setenv("TRACK", "1")
    script(SCRIPT)
    result = accel("launch", "--cpu", "--nproc-per-node", 2, "--max-restarts", 1, "train.py")
    assert result.returncode == 0, result.stderr
    result = accel("report", "-o", "report.html")
    assert (result.returncode, result.stdout, result.stderr) == (0, "report.html\n", "")
    source = (cwd / "report.html").read_text(encoding="utf-8")
    titles = map(html.unescape, re.findall(r'role="img" aria-label="([^"]+)"', source))
    figures = json.loads(unpack(re.search(r'id="figures">(.*?)</script>', source)[1]))
    plots = {title: figure["data"] for title, figure in zip(titles, figures, strict=True)}
    assert {"loss", "step", "Step time by rank", "Own time by rank"} <= set(plots)
    (step,) = plots["step"]
    assert step["x"] == step["y"] == list(range(1, 49)), (
        "one curve, from step 17 on that of the second attempt"
    )
    page_data = {
        trace["name"]: [y for y in trace["y"] if y is not None]
        for trace in plots["Own time by rank"]
        if "name" in trace
    }
    assert len(page_data) == 2
    assert min(page_data["rank 1"]) > 0.09, "the time that it sleeps is its own"
    text = html.unescape(source.partition("<body>")[2])
    for sentence in (
        "has the longest own time", "ValueError: bad <label>", "checkpoint saved", "checkpoint loaded",
        "world size 2, ranks 0 and 1 on this host", "Dashed lines are restarts", "exit code 0",
    ):  # fmt: skip
        assert sentence in text, sentence
    assert 'class="note"' not in source, "nothing is missing"
