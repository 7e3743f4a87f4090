"""Makes tests/data/accelerate: run with Accelerate 1.15.0 on two processes."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Best:
    """A registered object."""

    def __init__(self):
        self.state = {"score": 0.75, "epochs": [0, 1], "weights": torch.arange(3.0)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    project_config=ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True),
)
set_seed(0, device_specific=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
x = torch.arange(24.0).view(12, 2) / 24
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=1, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
accelerator.register_for_checkpointing(Best())
torch.manual_seed(accelerator.process_index)
for step, (inputs, targets) in enumerate(loader):
    if step == 5:  # the sixth: half-way through a window
        break
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
# no gradients are held: they are no part of such a checkpoint
accelerator.save_state()
drawn = {"torch": torch.rand(2).tolist(), "python": random.random(), "numpy": float(np.random.rand())}  # noqa: NPY002
every = accelerator.gather_for_metrics([drawn], use_gather_object=True)
if accelerator.is_main_process:
    bare = accelerator.unwrap_model(model)
    expected = {
        "step": accelerator.step,
        "output": bare(x).flatten().tolist(),
        "weights": {name: value.tolist() for name, value in bare.state_dict().items()},
        "exp_avg": {str(k): v["exp_avg"].tolist() for k, v in optimizer.state_dict()["state"].items()},
        "optimizer_step": optimizer.state_dict()["state"][0]["step"].item(),
        "last_epoch": scheduler.scheduler.last_epoch,
        "lr": scheduler.get_last_lr(),
        "drawn": every,
    }
    (Path(sys.argv[1]) / "expected.json").write_text(json.dumps(expected, indent=1))
accelerator.end_training()
