"""The picture of docs/reports.md: a real run with a slow rank and a restart, as Chromium shows its report.

python docs/report_picture.py [FILE]
"""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver

from accel_runtime.environment.settings import HOME

__all__ = ["main"]

FILE = Path(__file__).parent / "img" / "report.png"
WIDTH, HEIGHT = 1280, 2000
_SCRIPT = """\
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, ProjectConfiguration, set_seed

project = ProjectConfiguration("project", automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project)
set_seed(0)
inputs = torch.randn(4096, 16)
targets = inputs.sum(1, keepdim=True) / 4 + 0.1 * torch.randn(4096, 1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 640 * accelerator.num_processes)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
accelerator.resume()
step = loader.epoch * len(loader)
for epoch in range(loader.epoch, 10):
    for batch, labels in loader:
        time.sleep(0.06 if accelerator.process_index == 2 else 0.03)
        loss = nn.functional.mse_loss(model(batch), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        accelerator.log({"train/loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]}, step=step)
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if step == 300 and is_first and accelerator.process_index == 3:
            raise ValueError("invalid label in shard 17")
    with torch.no_grad():
        accelerator.log({"eval/loss": nn.functional.mse_loss(model(inputs), targets).item()}, step=step)
    accelerator.save_state()
"""


def write_report(folder: Path) -> Path:
    """Run the script on four processes, and report the run."""
    (folder / "train.py").write_text(_SCRIPT, encoding="utf-8")
    environ = {**os.environ, HOME: str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    accel = [sys.executable, "-m", "accel_cli"]
    options = ["--cpu", "--nproc-per-node", "4", "--max-restarts", "1"]
    subprocess.run([*accel, "launch", *options, "train.py"], cwd=folder, env=environ, check=True)
    subprocess.run([*accel, "report", "-o", "report.html"], cwd=folder, env=environ, check=True)
    return folder / "report.html"


def take_picture(page: Path) -> bytes:
    """Return the top of the page as a PNG image."""
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    with webdriver.Chrome(options) as browser:
        screen = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get(page.as_uri())
        browser.execute_async_script("setTimeout(arguments[0], 3000)")
        data = base64.b64decode(browser.get_screenshot_as_base64())
    picture = io.BytesIO()
    # Plots and text have few colours, so that a palette shows them in a third of the bytes.
    Image.open(io.BytesIO(data)).convert("RGB").quantize(128).save(picture, "png", optimize=True)
    return picture.getvalue()


def main(arguments: list[str]) -> None:
    """Write the picture to the file named, or where the docs have it."""
    target = Path(arguments[0]) if arguments else FILE
    with tempfile.TemporaryDirectory() as folder:
        target.write_bytes(take_picture(write_report(Path(folder))))
    print(f"{target} is written")


if __name__ == "__main__":
    main(sys.argv[1:])
