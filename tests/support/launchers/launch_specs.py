"""Specs of launches, with the values that most tests of launchers do not depend on."""

from dataclasses import replace

from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning.machine import Machine
from accel_runtime.environment.settings import Settings


def build_spec(*args, kind="script", env=None, environ=None, **options):
    """Return the spec of a launch on a machine without accelerators; options are settings, or fields of the spec."""
    fields = {name: options.pop(name) for name in ("target", "nodes", "is_builtin") if name in options}
    settings, python = Settings(**options), "/venv/bin/python"
    spec = LaunchSpec("train.py", args, kind, settings, env or {}, environ or {}, Machine(2), python)
    return replace(spec, **fields)
