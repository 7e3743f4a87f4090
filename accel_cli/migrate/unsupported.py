"""Scripts that are not converted: those with collectives of torch or Lightning Fabric, with what to write."""

from __future__ import annotations

import libcst as cst

from accel_cli.migrate.distributed import CONVERTED
from accel_cli.migrate.raw import Finding
from accel_cli.migrate.script import Script

__all__ = ["find_unsupported"]

_PROCESS_GROUPS = {
    "torch.distributed.all_reduce": "Write accelerator.reduce(tensor), or gather_for_metrics for an evaluation",
    "torch.distributed.all_gather": "Write accelerator.gather(tensor)",
    "torch.multiprocessing.spawn": "Call the function once, and start the script with accel launch",
}
_FABRIC = {
    "setup": "accelerator.prepare(model, optimizer)",
    "setup_module": "accelerator.prepare(model)",
    "setup_optimizers": "accelerator.prepare(optimizer)",
    "setup_dataloaders": "accelerator.prepare(loader)",
    "backward": "accelerator.backward(loss)",
    "clip_gradients": "accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    "no_backward_sync": "accelerator.accumulate(model)",
    "all_gather": "accelerator.gather_for_metrics(tensor)",
    "all_reduce": 'accelerator.reduce(tensor, "mean")',
    "barrier": "accelerator.wait_for_everyone()",
    "save": "accelerator.save(accelerator.get_state_dict(model), path), or accelerator.save_state()",
    "load": "accelerator.resume()",
    "seed_everything": "set_seed(seed)",
    "print": "accelerator.print(...)",
    "to_device": "x.to(accelerator.device)",
    "autocast": "accelerator.autocast()",
}


def find_unsupported(text: str) -> tuple[Finding, ...]:
    """Return the places of a script that use process groups of torch or Fabric; nothing for other scripts."""
    is_distributed = any(
        word in text
        for word in (
            "torch.distributed",
            "DistributedDataParallel",
            "DistributedSampler",
            "torch.multiprocessing",
        )
    )
    is_fabric = "lightning.fabric" in text or "lightning_fabric" in text
    if not (is_distributed or is_fabric):
        return ()
    script = Script(text)
    found = (
        [finding for call in script.calls if (finding := _check_process_group(script, call))]
        if is_distributed
        else []
    )
    found += _find_fabric(script) if is_fabric else []
    return tuple(sorted(set(found)))


def _check_process_group(script: Script, call: cst.Call) -> Finding | None:
    name = script.qualified_name(call.func)
    if name in CONVERTED:
        return None
    advice = _PROCESS_GROUPS.get(name, "")
    if not advice and not name.startswith("torch.distributed."):
        return None
    advice = (
        advice
        or "It works after Accelerator() on several processes; guard it with if accelerator.num_processes > 1:"
    )
    return Finding(script.line(call), f"This use of process groups is not converted: {name}. {advice}.")


def _find_fabric(script: Script) -> list[Finding]:
    names = {
        variable
        for variable, entries in script.assigned.items()
        for _, value in entries
        if isinstance(value, cst.Call)
        and script.qualified_name(value.func).endswith(("fabric.Fabric", "fabric.fabric.Fabric"))
    }
    found = [
        Finding(script.line(call), "Scripts for Fabric are not converted: Fabric(...). Write Accelerator().")
        for call in script.calls
        if script.qualified_name(call.func).endswith("fabric.Fabric")
    ]
    for call in script.calls:
        if isinstance(call.func, cst.Attribute) and script.variable(call.func.value) in names:
            method = call.func.attr.value
            advice = f"Write {_FABRIC[method]}" if method in _FABRIC else "See the page Migrate from Fabric"
            found.append(
                Finding(
                    script.line(call), f"Scripts for Fabric are not converted: fabric.{method}. {advice}."
                )
            )
    return found
