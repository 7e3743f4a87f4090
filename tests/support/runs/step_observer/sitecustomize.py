"""Record the steps of any script in a file for each rank, without a change of the script; Python imports this file at its start.

A line is the losses of the backward passes since the step before, and the norm of the weights of the optimizer after its step. With
`OBSERVE_STEPS=N`, the process exits after N steps.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path

WATCHED = "torch.optim.optimizer"


class Observer:
    """What this process has computed since the last step."""

    def __init__(self, folder):
        self.folder, self.losses, self.steps = folder, [], 0

    def install(self):
        """Wrap the backward pass, and add a hook to all optimizers."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        backward = torch.Tensor.backward

        def record_backward(tensor, *args, **options):
            if tensor.numel() == 1:
                self.losses.append(tensor.detach().double().item())
            return backward(tensor, *args, **options)

        torch.Tensor.backward = record_backward
        register_optimizer_step_post_hook(self.record_step)

    def record_step(self, optimizer, _args, _options):
        """Write a line."""
        total = 0.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                values = parameter.detach()
                values = values.to_local() if hasattr(values, "to_local") else values
                total += values.double().square().sum().item()
        line = {"losses": self.losses, "weights": total**0.5}
        self.losses = []
        with Path(self.folder, f"rank{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.steps += 1
        if str(self.steps) == os.environ.get("OBSERVE_STEPS"):
            raise SystemExit(0)


class Finder(importlib.abc.MetaPathFinder):
    """Install the observer as soon as torch has its optimizers."""

    def find_spec(self, name, path, target=None):
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_watch(module):
            execute(module)
            sys.meta_path.insert(0, Late())

        spec.loader.exec_module = execute_and_watch
        return spec


class Late(importlib.abc.MetaPathFinder):
    """Wait for the first import after torch is complete: its modules import each other."""

    def find_spec(self, *_):
        torch = sys.modules.get("torch")
        if getattr(torch, "__spec__", None) and not getattr(torch.__spec__, "_initializing", False):
            sys.meta_path.remove(self)
            define_operators(torch)
            Observer(os.environ["OBSERVE"]).install()


def define_operators(torch):
    """Declare the operators without which torchvision is not imported beside a torch without CUDA; nobody calls them."""
    boxes = "Tensor dets, Tensor scores, float iou_threshold"
    torch.library.define("torchvision::nms", f"({boxes}) -> Tensor")
    torch.library.define("torchvision::qnms", f"({boxes}) -> Tensor")


if "OBSERVE" in os.environ:
    sys.meta_path.insert(0, Finder())
