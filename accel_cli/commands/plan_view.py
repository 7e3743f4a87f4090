"""The output of `accel launch` before it runs: the line that describes the launch, the dry run, and the sources of values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accel_cli import console
from accel_cli.planning.plan import Plan, join_for_bash
from accel_cli.profile import store
from accel_cli.profile.layers import CONFIG_FILE, Resolved
from accel_runtime.environment.settings import Settings

if TYPE_CHECKING:
    from accel_cli.profile.planner import ResolvedLaunch

__all__ = ["format_headline", "format_plan", "show_plan"]


def show_plan(plan: Plan, resolved: ResolvedLaunch) -> bool:
    """Print the plan instead of running it if an option asks for it; return True if it is not to be run."""
    launcher, options = resolved.profile.launcher, resolved.request.options
    if any(option.only_prints and option.name in options for option in launcher.launch_options):
        console.plain(launcher.preview(plan, options))
        return True
    if "dry_run" in options or "explain" in options:
        console.plain(format_plan(plan, resolved if "explain" in options else None))
        if "dry_run" in options and (preview := launcher.preview(plan, options)):
            console.plain(preview)
        return True
    return False


def format_headline(plan: Plan, resolved: Resolved) -> str:
    """Return the line that describes a launch: launcher, processes, device, precision, profile and rendezvous."""
    files = [
        f"{layer.name} ({console.abbreviate_home(layer.where[''])})"
        for layer in resolved.layers
        if layer.name in {"user", "project", CONFIG_FILE} or layer.name.startswith("profile ")
    ]
    profile = " + ".join(files) or "none"
    if not files and resolved.get_source("launcher.kind") != "--set":
        default = store.find_accelerate_file(os.environ)
        command = (
            f"accel config import {console.abbreviate_home(str(default))}" if default else "accel config"
        )
        profile = f"none, detected defaults ({command} writes one)"
    parts = [
        plan.launcher,
        _format_processes(plan),
        plan.device,
        f"mixed precision {resolved.profile.mixed_precision}",
    ]
    if plan.layout:
        parts.append(plan.layout)
    nodes = plan.node_summary
    if not nodes and plan.agent and plan.nnodes > 1:
        nodes = f"rendezvous at {plan.agent.rdzv_endpoint}"
    return "; ".join([", ".join(parts), f"profile: {profile}", *([nodes] if nodes else [])])


def _format_processes(plan: Plan) -> str:
    count, nodes = plan.nproc_per_node, plan.nnodes
    processes = "1 process" if count == 1 else f"{count} processes"
    if plan.process_description:
        return plan.process_description if nodes == 1 else f"{plan.process_description}, on {nodes} nodes"
    if plan.agent and plan.agent.min_nodes != nodes:
        return f"{processes} on each of {plan.agent.min_nodes} to {nodes} nodes"
    return processes if nodes == 1 else f"{nodes * count} processes ({count} on each of {nodes} nodes)"


_DEFAULT, _DETECTED = "default", "detected"
"""Sources of values that nobody has set."""


def _format_values(title: str, values: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    """Yield the values of a profile with their sources, and a star before those that are set."""
    yield f"{title}:" if values else f"{title}: none"
    for key, (value, source) in values.items():
        shown = console.mask_secrets(key, str(value)) if key.startswith("env.") else value
        mark = " " if source in {_DEFAULT, _DETECTED} else "*"
        yield f"{mark} {key}: {shown}  [{source}]"


def format_plan(plan: Plan, resolved: Resolved | None) -> str:
    """Return the plan as text; with `resolved` also the source of every value of the profile, and variables with default values.

    Values that a file, a variable or an option has set come first, each with a star; the defaults come last.
    """
    values = resolved.effective_values if resolved else {}
    given = {key: entry for key, entry in values.items() if entry[1] != _DEFAULT}
    lines = [*_format_values("set", given)] if resolved else []
    lines += [f"launcher: {plan.launcher}", f"start: {_format_processes(plan)}", f"device: {plan.device}"]
    if plan.layout:
        lines.append(f"layout: {plan.layout}")
    if plan.agent:
        reason = f" ({plan.agent.start_method_reason})" if plan.agent.start_method_reason else ""
        lines.append(f"start method: {plan.agent.start_method}{reason}")
    lines += [f"command: {join_for_bash(plan.argv)}", "environment:"]
    defaults = {} if resolved else Settings().to_env()
    shown = {name: value for name, value in sorted(plan.env.items()) if defaults.get(name) != value}
    lines += [f"  {name}={console.mask_secrets(name, value)}" for name, value in shown.items()]
    if hidden := len(plan.env) - len(shown):
        lines.append(f"  and {hidden} variables with default values, which --explain prints")
    if plan.agent:
        settings = {**asdict(plan.agent), "start_method": None, "start_method_reason": None}
        lines.append("elastic agent:")
        lines += [
            f"  {name}: {value}"
            for name, value in settings.items()
            if value is not None and value is not False
        ]
    if plan.job:
        lines += plan.job.describe()
    if resolved:
        lines += _format_values("defaults", {key: entry for key, entry in values.items() if key not in given})
    if resolved and (section := resolved.profile.engine) and resolved.engine:
        lines.append(f"configuration of {section.settings.title}:")
        for path, (value, source) in section.list_configuration(resolved.engine).items():
            lines.append(f"  {path}: {value}  [{source}]")
    return "\n".join(lines)
