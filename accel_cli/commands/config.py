"""`accel config`: create, show, edit and check profiles."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from accel_cli import console
from accel_cli.errors import ProfileError, UsageError
from accel_cli.profile.options import complete_assignments, complete_keys, complete_profile_names
from accel_runtime.environment.engines import ENGINES, list_engines

if TYPE_CHECKING:
    from accel_cli.accelerate.config_conversion import Imported
    from accel_cli.planning.machine import Machine
    from accel_cli.profile.layers import Resolved
    from accel_cli.profile.store import ProfileStore
    from accel_runtime.environment.accelerate.sharding import EngineWords

__all__ = ["app", "edit_interactively"]

_SHOW = "Show and check"
_CHANGE = "Create and change"
_SHARDING = ["fully_shard", *ENGINES.names]

_ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME", help="Use the named profile.", autocompletion=complete_profile_names
    ),
]
_Project = Annotated[bool, typer.Option("--project", help="Use the project file, accel.yaml.")]
_Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]


class ProfileLocation(NamedTuple):
    """The file of a command: the user's default profile, a named one, or the project file."""

    profile: str | None = None
    project: bool = False

    def find_file(self) -> Path:
        """Return the path of the file, which need not exist."""
        from accel_cli.profile.store import DEFAULT, PROJECT_FILE

        store = _get_store()
        if self.project and self.profile is not None:
            raise UsageError("Pass either --profile or --project, not both.")
        if self.project:
            return store.find_project_file() or store.cwd / PROJECT_FILE
        return store.get_path(DEFAULT if self.profile is None else self.profile)

    def find_writable_file(self) -> Path:
        """Return the path of the file, to be changed.

        Raises:
            UsageError: Another user could have written the project file.
        """
        from accel_cli.profile.store import find_distrust
        from accel_runtime.environment import settings as env

        path = self.find_file()
        if self.project and path.exists() and (distrust := find_distrust(path, os.environ)):
            raise UsageError(
                f"Cannot change {path}: {distrust}. Set {env.TRUSTED_PROJECTS}={path.parent} to trust it."
            )
        return path


app = typer.Typer(
    rich_help_panel="Set up",
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    epilog="Example: accel config set mixed_precision=bf16",
)


@app.callback()
def config(context: typer.Context, profile: _ProfileName = None, project: _Project = False) -> None:
    """Create and manage profiles. Run without a subcommand to start the interactive wizard."""
    location = ProfileLocation(profile, project)
    if context.invoked_subcommand:
        if location != ProfileLocation():
            command = f"accel config {context.invoked_subcommand}"
            raise UsageError(f"Options belong after the subcommand: {command} --profile NAME.")
        return
    path = location.find_writable_file()
    if not _has_terminal():
        raise UsageError(
            "The wizard needs a terminal. Without one, use accel config default to write defaults for this machine, "
            "and accel config set KEY=VALUE to change single values."
        )
    from accel_cli.wizard.session import run_wizard

    raise typer.Exit(run_wizard(path))


@app.command("show", rich_help_panel=_SHOW, epilog="Example: accel config show --profile gpu")
def show(profile: _ProfileName = None) -> None:
    """Print the effective value of every key and the layer that sets it."""
    resolved, values = _resolve(profile)
    # On a terminal, a row is a line: the files are named once, below.
    files = {
        layer.name: layer.where[""] for layer in resolved.layers if layer.where.get("", "").endswith(".yaml")
    }
    files = files if sys.stdout.isatty() else {}
    rows = []
    for key, (value, origin) in values.items():
        source = origin
        for name, path in files.items():
            source = source.replace(f"{name}: {path}:", f"{name}:")
        rows.append((key, console.mask_secrets(key, _format_value(value)), console.abbreviate_home(source)))
    console.table(("KEY", "VALUE", "FROM"), rows)
    for name, path in files.items():
        console.plain(f"{name}: {console.abbreviate_home(path)}")


@app.command("get", rich_help_panel=_SHOW, epilog="Example: accel config get launcher.nproc_per_node")
def get(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="Print this key, named as in accel config show.", autocompletion=complete_keys
        ),
    ],
    profile: _ProfileName = None,
) -> None:
    """Print the effective value of a key, for scripts; nothing if it is unset."""
    from accel_cli.profile.validation_errors import unknown_key

    _, values = _resolve(profile)
    if key not in values and not key.startswith("env."):
        raise ProfileError([unknown_key(key, "get", values["launcher.kind"][0])])
    console.plain(_format_value(values.get(key, (None, ""))[0]))


@app.command("list", rich_help_panel=_SHOW, epilog="Example: accel config list")
def list_() -> None:
    """List all profiles."""
    store = _get_store()
    rows = [(name, str(store.get_path(name))) for name in store.list_names()]
    if project := store.find_project_file():
        rows.append(("(project)", str(project)))
    if rows:
        console.table(("NAME", "FILE"), rows)
    else:
        console.note("no profiles yet; run accel config to create one")


@app.command("path", rich_help_panel=_SHOW, epilog="Example: accel config path --project")
def path(profile: _ProfileName = None, project: _Project = False) -> None:
    """Print the path of a profile, even if it does not exist."""
    console.plain(str(ProfileLocation(profile, project).find_file()))


@app.command("validate", rich_help_panel=_SHOW, epilog="Example: accel config validate accel.yaml")
def validate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Check this file.")] = None,
    profile: _ProfileName = None,
    project: _Project = False,
) -> None:
    """Check a profile and report every mistake at once."""
    location = ProfileLocation(profile, project)
    if file and location != ProfileLocation():
        raise UsageError("Pass only one of FILE, --profile and --project.")
    target = file or location.find_file()
    _check(target, _require_file(target, None if file else location)).complete_engine()
    console.note(f"{target} is valid")


@app.command("schema", rich_help_panel=_SHOW, epilog="Example: accel config schema > accel.schema.json")
def schema() -> None:
    """Print the JSON schema of a profile, for editors."""
    from accel_cli.profile.schema import json_schema

    console.print_json(json_schema())


@app.command(
    "set",
    rich_help_panel=_CHANGE,
    epilog="Example: accel config set mixed_precision=bf16 env.NCCL_DEBUG=INFO",
)
def set_(
    assignments: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE",
            help="Set these values; an empty value removes the key.",
            autocompletion=complete_assignments,
        ),
    ],
    profile: _ProfileName = None,
    project: _Project = False,
) -> None:
    """Set values in a profile and keep its comments. The profile is created if it does not exist."""
    from accel_cli.profile import layers
    from accel_cli.profile.edit import read_layers_below, update_profile

    store, target = _get_store(), ProfileLocation(profile, project).find_writable_file()
    stack = read_layers_below(store, target)
    if target.is_file():
        stack.append(layers.read_file(target, "file"))
    kind = layers.find_value(stack, "launcher.kind")
    assigned = layers.parse_assignments(assignments, "set", kind=kind).values
    updates = layers.relate_files(assigned, target)
    _, removed = update_profile(store, target, updates, "set")
    for key in removed:
        console.note(f"removed {key}: launcher.kind {updates['launcher.kind']} does not have it")
    console.note(f"{target}: set {', '.join(assignments)}")


@app.command(
    "unset",
    rich_help_panel=_CHANGE,
    epilog="Example: accel config unset launcher.max_restarts env.NCCL_DEBUG",
)
def unset(
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY",
            help="Remove these keys, or sections such as fully_shard.",
            autocompletion=complete_keys,
        ),
    ],
    profile: _ProfileName = None,
    project: _Project = False,
) -> None:
    """Remove values from a profile, so that lower layers apply, and keep its comments."""
    from accel_cli.profile import layers
    from accel_cli.profile.edit import remove_keys

    location = ProfileLocation(profile, project)
    target = _require_file(location.find_writable_file(), location)
    if "schema_version" in keys:
        raise UsageError("Cannot remove schema_version: every profile needs it.")
    values = layers.read_file(target, "file").values
    names = {key: [name for name in values if name == key or name.startswith(f"{key}.")] for key in keys}
    if missing := [key for key in keys if not names[key]]:
        raise UsageError(
            f"{target} does not set {', '.join(missing)}. It sets: {', '.join(values) or 'no keys'}."
        )
    problems = remove_keys(
        _get_store(), target, [name for section in names.values() for name in section], "unset"
    )
    console.note(f"{target}: removed {', '.join(keys)}")
    for problem in problems:
        console.note(f"remaining mistake: {problem}")


@app.command("default", rich_help_panel=_CHANGE, epilog="Example: accel config default --profile gpu")
def default(profile: _ProfileName = None, project: _Project = False, force: _Force = False) -> None:
    """Write defaults for this machine without questions."""
    from accel_cli.planning import machine
    from accel_cli.profile import store

    target = ProfileLocation(profile, project).find_writable_file()
    if target.exists() and not force:
        raise UsageError(f"{target} already exists. Use --force to replace it.")
    detected = machine.detect(os.environ)
    console.print_notes(detected.problems)
    store.write(target, _render_default(detected))
    console.note(f"wrote {target} for {detected.summary}")


@app.command("edit", rich_help_panel=_CHANGE, epilog="Example: EDITOR=nano accel config edit")
def edit(profile: _ProfileName = None, project: _Project = False) -> None:
    """Edit a profile in $VISUAL or $EDITOR, and save it only if it is valid."""
    location = ProfileLocation(profile, project)
    target = _require_file(location.find_writable_file(), location)
    _write(target, edit_interactively(target))


@app.command(
    "import", rich_help_panel=_CHANGE, epilog="Example: accel config import default_config.yaml --profile gpu"
)
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Read a config file of Accelerate, a JSON file of an engine, or a profile of accel.",
        ),
    ],
    profile: _ProfileName = None,
    project: _Project = False,
    force: _Force = False,
    sharding: Annotated[
        str | None,
        typer.Option(
            "--sharding",
            metavar=f"<{'|'.join(_SHARDING)}>",
            help="Convert settings of an engine to this section of the profile.",
            autocompletion=lambda: _SHARDING,
        ),
    ] = None,
) -> None:
    """Create a profile from a config file of Accelerate or of an engine, or from another profile.

    Values without an equivalent in accel are listed.
    """
    from accel_cli.accelerate.config_conversion import (
        convert,
        find_engine,
        find_engine_file,
        read_engine_file,
        wrap_engine_file,
    )
    from accel_cli.profile import layers, store, yaml_io
    from accel_cli.profile.edit import edit_text

    if sharding is not None and (sharding := sharding.replace("-", "_")) not in _SHARDING:
        raise UsageError(f"Invalid --sharding {sharding!r}: expected {' or '.join(_SHARDING)}.")
    target = ProfileLocation(profile, project).find_writable_file()
    text = store.read_text(file)
    wrapped = wrap_engine_file(file)
    data = wrapped or yaml_io.parse(text, str(file)).data
    if not data:
        raise UsageError(f"Cannot import {file}: it is empty.")
    if sharding and not find_engine(data):
        titles = " or ".join(engine.title for engine in list_engines())
        raise UsageError(
            f"Cannot use --sharding {sharding}: {file} does not use {titles}. Leave out the option."
        )
    if not store.is_accelerate_config(data):
        layer = layers.read_file(file, "file")
        layers.resolve([layer])
        if layer.values.keys() & {*layers.FILE_KEYS}:
            text = edit_text(text, layers.to_data(layers.relate_files(layer.values, target)))
        _write(target, text if _may_replace(target, text, force=force) else None)
        return
    imported = convert(
        data,
        str(file),
        read_engine_file(data, file.parent),
        engine_path=find_engine_file(data, file.parent),
        section=_choose_sharding(data, file, sharding),
    )
    _write_imported(imported, file, target, force=force, engine=find_engine(wrapped) if wrapped else None)


def _write_imported(
    imported: Imported, file: Path, target: Path, *, force: bool, engine: EngineWords | None
) -> None:
    """Write the profile of a config file of Accelerate, or of an engine, and print what its values became."""
    from accel_cli.accelerate.config_conversion import name_keys_of_engine_file
    from accel_cli.profile import layers, store
    from accel_cli.profile.edit import build_layer
    from accel_cli.profile.schema import describe

    for options in list_engines():
        section = imported.data.get(options.name, {})
        if path := section.get(options.file):
            section[options.file] = layers.relate_path(path, target)
    layers.resolve([build_layer(imported.data, target)])
    text = store.render(imported.data, describe(imported.data["launcher"]["kind"]))
    if not _may_replace(target, text, force=force):
        _write(target, None)
        return
    mapped, left = imported.mapped, imported.left
    if engine:
        mapped, left = name_keys_of_engine_file(mapped, file), name_keys_of_engine_file(left, file)
    console.table((engine.title.upper() if engine else "ACCELERATE", "ACCEL"), mapped)
    if left:
        console.note(f"{len(left)} value(s) of {file} have no equivalent in this profile:")
        console.table(("VALUE", "REASON"), left)
    _write(target, text)


def _choose_sharding(data: dict[str, Any], file: Path, sharding: str | None) -> str:
    """Return the section that the settings of an engine become: that of the option, of the answer, or `fully_shard`."""
    from accel_cli.accelerate.config_conversion import find_engine

    engine = find_engine(data)
    if not engine or sharding == "fully_shard":
        return "fully_shard"
    if sharding and sharding != engine.name:
        raise UsageError(
            f"Cannot use --sharding {sharding}: {file} uses {engine.title}. Use fully_shard or {engine.name}."
        )
    if sharding:
        return sharding
    if not _has_terminal():
        console.note(
            f"the settings of {engine.title} in {file} become fully_shard; use --sharding {engine.name} to keep {engine.title}"
        )
        return "fully_shard"
    from accel_cli.wizard.session import ask_sharding

    return ask_sharding(file, engine)


@app.command("delete", rich_help_panel=_CHANGE, epilog="Example: accel config delete gpu")
def delete(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Delete this profile.", autocompletion=complete_profile_names),
    ],
    yes: _Yes = False,
) -> None:
    """Delete a profile after confirmation."""
    target = _require_file(_get_store().get_path(name))
    if not yes and not _has_terminal():
        raise UsageError(f"Cannot ask before deleting {target}: no terminal. Use --yes to delete it.")
    if not yes and not console.confirm(f"Delete {target}?"):
        console.note(f"{target} is unchanged")
        return
    try:
        target.unlink()
    except OSError as error:
        raise UsageError(f"Cannot delete {target}: {error.strerror}.") from None
    console.note(f"deleted {target}")


def _get_store() -> ProfileStore:
    from accel_cli.profile.store import ProfileStore

    return ProfileStore.from_env(os.environ, Path.cwd())


def _require_file(target: Path, location: ProfileLocation | None = None) -> Path:
    """Return a file, or raise UsageError if it does not exist; `location` are the options that select it."""
    if not target.exists():
        store = _get_store()
        project = store.find_project_file() if location == ProfileLocation() else None
        hint = f" Use --project for {project}." if project else ""
        raise UsageError(
            f"Profile not found: {target}. Existing profiles: {', '.join(store.list_names()) or 'none'}.{hint}"
        )
    return target


def _resolve(profile: str | None) -> tuple[Resolved, dict[str, tuple[Any, str]]]:
    """Return the effective profile, and its values with their sources by dotted key."""
    from accel_cli.planning.launch_options import Request
    from accel_cli.profile import planner

    request = Request("", options={} if profile is None else {"profile": profile})
    resolved = planner.resolve(request, os.environ)
    console.print_notes(resolved.notes)
    values = resolved.effective_values
    del values["schema_version"]  # of a file, not of a run
    return resolved, values


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _may_replace(target: Path, text: str, *, force: bool) -> bool:
    """Return whether a profile may be replaced; ask on a terminal, unless it holds only defaults.

    Raises:
        UsageError: There is no terminal.
    """
    from accel_cli.planning import machine
    from accel_cli.profile import store

    if force or not target.exists():
        return True
    if store.read_text(target) in {text, _render_default(machine.detect(os.environ))}:
        return True
    if not _has_terminal():
        raise UsageError(
            f"{target} already exists. Use --force to replace it, or --profile NAME to write another profile."
        )
    return console.confirm(f"Replace {target}?")


def _render_default(machine: Machine) -> str:
    """Return the text of the default profile of a machine."""
    from accel_cli.profile import layers, store
    from accel_cli.profile.schema import describe
    from accel_cli.wizard.questions import suggest_values

    values = suggest_values(machine)
    return store.render(layers.to_data(values), describe(values["launcher.kind"]))


def _check(target: Path, file: Path) -> Resolved:
    """Return the profile `target` with the content of `file`; raise ProfileError if it would be invalid."""
    from accel_cli.profile import layers
    from accel_cli.profile.edit import resolve_file

    return resolve_file(_get_store(), target, layers.read_file(file, "file"))


def _write(target: Path, text: str | None) -> None:
    """Write a profile, and print that; None leaves it unchanged."""
    from accel_cli.profile import store

    if text is None:
        console.note(f"{target} is unchanged")
        return
    store.write(target, text)
    console.note(f"wrote {target}")


def _format_value(value: object) -> str:
    """Return a value as text that `accel config set` reads."""
    from accel_cli.profile import yaml_io

    return value if isinstance(value, str) else "" if value is None else yaml_io.inline(value)


def edit_interactively(target: Path) -> str | None:
    """Open a copy of a profile in an editor until it is valid; the profile itself is not changed.

    Returns:
        The new text, or None if nothing was changed or the user gave up.

    Raises:
        UsageError: The editor failed, or the text is invalid and there is no terminal.
    """
    import tempfile

    from accel_cli.profile import store

    before = store.read_text(target)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / target.name
        scratch.write_text(before, encoding="utf-8")
        while True:
            _open_editor(scratch)
            try:
                after = store.read_text(scratch)
                if after == before:
                    return None
                _check(target, scratch)
            except UsageError as error:
                message = str(error).replace(str(scratch), target.name)
                if not sys.stdin.isatty():
                    raise UsageError(f"{message}\n{target} is unchanged.") from None
                console.error(message)
                if not console.confirm("Edit again?", default=True):
                    return None
            else:
                return after


def _open_editor(path: Path) -> None:
    import shlex
    import subprocess

    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"Cannot start the editor {editor!r}: {reason}. Set VISUAL or EDITOR to another one."
        ) from None
    if code:
        raise UsageError(f"The editor {editor!r} exited with code {code}. The profile is unchanged.")
