"""`accel config`: say once how scripts run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel_cli.commands import options
from accel_cli.commands.options import ForeignGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cli.planning.machine import Machine
    from accel_cli.profile.layers import Resolved
    from accel_cli.profile.store import Store
__all__ = ["app", "edit_interactively"]


app = typer.Typer(
    cls=ForeignGroup,
    help="Say once how scripts run on this machine; without a subcommand, by a few questions.",
    epilog="Example: accel config set mixed_precision=bf16",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
_LOOK = "Look"
_CHANGE = "Change"

Name = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME", help="The named profile.", autocompletion=options.complete_profile_names
    ),
]
Project = Annotated[bool, typer.Option("--project", help="The project file, accel.yaml.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")]


@app.callback(invoke_without_command=True)
def config(
    ctx: typer.Context,
    profile: Name = None,
    project: Project = False,
    default: Annotated[
        bool, typer.Option("--default", help="Ask nothing: write what suits this machine.")
    ] = False,
    force: Force = False,
) -> None:
    """Say once how scripts run on this machine; without a subcommand, by a few questions."""
    from accel_cli.errors import UsageError

    if ctx.invoked_subcommand:
        if profile or project or default or force:
            raise UsageError(
                f"options stand after the subcommand: accel config {ctx.invoked_subcommand} --profile NAME"
            )
        return
    if force and not default:
        raise UsageError("--force belongs to --default; the wizard shows what it will replace, and asks")
    path = _writable_target(profile, project=project)
    if default:
        _write_default(path, force=force)
    else:
        _ask(path)


@app.command(rich_help_panel=_LOOK, epilog="Example: accel config show --profile gpu")
def show(profile: Name = None) -> None:
    """Print every value in force, with the layer it came from."""
    import sys

    from accel_cli import console
    from accel_cli.console import mask_secrets

    resolved, values = _in_force(profile)
    # On a terminal, a row is a line: the files are named once, below.
    files = {
        layer.name: layer.where[""] for layer in resolved.layers if layer.where.get("", "").endswith(".yaml")
    }
    files = files if sys.stdout.isatty() else {}
    rows = []
    for key, value in values.items():
        source = resolved.source(key)
        for name, path in files.items():
            source = source.replace(f"{name}: {path}:", f"{name}:")
        rows.append((key, mask_secrets(key, _text(value)), console.short(source)))
    console.table(("KEY", "VALUE", "FROM"), rows)
    for name, path in files.items():
        console.plain(f"{name}: {console.short(path)}")


@app.command(rich_help_panel=_LOOK, epilog="Example: accel config get launcher.nproc_per_node")
def get(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="The key, as config show prints it.", autocompletion=options.complete_keys
        ),
    ],
    profile: Name = None,
) -> None:
    """Print one value in force, for scripts; nothing if it is unset."""
    from accel_cli import console
    from accel_cli.errors import ProfileError
    from accel_cli.profile.validation_errors import unknown_key

    _, values = _in_force(profile)
    if key not in values and not key.startswith("env."):
        raise ProfileError([unknown_key(key, "get", values["launcher.kind"])])
    console.plain(_text(values.get(key)))


@app.command("list", rich_help_panel=_LOOK, epilog="Example: accel config list")
def list_() -> None:
    """List the profiles there are."""
    from accel_cli import console

    store = _store()
    rows = [(name, str(store.path(name))) for name in store.names()]
    if found := store.project():
        rows.append(("(project)", str(found)))
    if rows:
        console.table(("NAME", "FILE"), rows)
    else:
        console.note("there is no profile yet: accel config writes one")


@app.command(rich_help_panel=_LOOK, epilog="Example: accel config path --project")
def path(profile: Name = None, project: Project = False) -> None:
    """Print where a profile lives, whether it exists or not."""
    from accel_cli import console

    console.plain(str(_target(profile, project=project)))


@app.command(rich_help_panel=_LOOK, epilog="Example: accel config validate accel.yaml")
def validate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Any profile file.")] = None,
    profile: Name = None,
    project: Project = False,
) -> None:
    """Check a profile and report every mistake at once."""
    from accel_cli import console
    from accel_cli.errors import UsageError
    from accel_cli.profile import layers

    if file and (profile or project):
        raise UsageError("give FILE or --profile or --project, not two of them")
    target = file or _target(profile, project=project)
    _check([*_below(target), layers.file(_existing(target), "file")])
    console.note(f"{target} is fine")


@app.command(rich_help_panel=_LOOK, epilog="Example: accel config schema > accel.schema.json")
def schema() -> None:
    """Print the JSON schema of a profile, for editors."""
    import json

    from accel_cli import console
    from accel_cli.profile.schema import json_schema

    console.plain(json.dumps(json_schema(), indent=2))


@app.command(
    "set",
    rich_help_panel=_CHANGE,
    epilog="Example: accel config set mixed_precision=bf16 env.NCCL_DEBUG=INFO",
)
def set_(
    assignments: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE", help="Values to set; an empty one takes a key out.",
            autocompletion=options.complete_assignments,
        ),
    ],
    profile: Name = None,
    project: Project = False,
) -> None:  # fmt: skip
    """Set values in a profile, which is made if there is none; comments stay."""
    from accel_cli import console
    from accel_cli.profile import layers
    from accel_cli.profile.edit import update_profile

    target = _writable_target(profile, project=project)
    updates = layers.assigned(assignments, "set", kind=_find_kind(target)).values
    _, lost = update_profile(_store(), target, updates, "set")
    for key in lost:
        console.note(f"taken out, since launcher.kind: {updates['launcher.kind']} does not have it: {key}")
    console.note(f"{target} now says {', '.join(assignments)}")


@app.command(
    rich_help_panel=_CHANGE, epilog="Example: accel config unset launcher.max_restarts env.NCCL_DEBUG"
)
def unset(
    keys: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY",
            help="Keys to take out, or a section such as fully_shard.",
            autocompletion=options.complete_keys,
        ),
    ],
    profile: Name = None,
    project: Project = False,
) -> None:
    """Take values out of a profile, so that what holds without it holds again; comments stay."""
    from accel_cli import console
    from accel_cli.errors import UsageError
    from accel_cli.profile import layers
    from accel_cli.profile.edit import remove_keys

    target = _existing(_writable_target(profile, project=project))
    if "schema_version" in keys:
        raise UsageError(
            "schema_version cannot be taken out: every profile has it. Leave it out of the command."
        )
    there = layers.file(target, "file").values
    gone = {key: [name for name in there if name == key or name.startswith(f"{key}.")] for key in keys}
    if missing := [key for key, names in gone.items() if not names]:
        raise UsageError(
            f"{target} does not say {', '.join(missing)}. Use one of: {', '.join(there) or 'none, it says nothing'}."
        )
    left = remove_keys(_store(), target, [name for names in gone.values() for name in names], "unset")
    console.note(f"{target} no longer says {', '.join(keys)}")
    for problem in left:
        console.note(f"a mistake is left: {problem}")


@app.command(rich_help_panel=_CHANGE, epilog="Example: accel config default --profile gpu")
def default(profile: Name = None, project: Project = False, force: Force = False) -> None:
    """Write what suits this machine, without questions."""
    _write_default(_writable_target(profile, project=project), force=force)


@app.command(rich_help_panel=_CHANGE, epilog="Example: EDITOR=nano accel config edit")
def edit(profile: Name = None, project: Project = False) -> None:
    """Open a profile in $VISUAL or $EDITOR; it is replaced only by one without mistakes."""
    from accel_cli import console
    from accel_cli.profile import layers, store

    target = _existing(_writable_target(profile, project=project))

    def check(scratch: Path) -> None:
        _check([*_below(target), layers.file(scratch, "file")])

    text = edit_interactively(target, check)
    if text is None:
        console.note(f"{target} was left as it is")
        return
    store.write(target, text)
    console.note(f"{target} is written")


@app.command(
    "import", rich_help_panel=_CHANGE, epilog="Example: accel config import default_config.yaml --profile gpu"
)
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An Accelerate config file, or a profile of accel.")
    ],
    profile: Name = None,
    project: Project = False,
    force: Force = False,
) -> None:
    """Make a profile from an Accelerate config file, or from a profile someone gave you.

    What has a place in accel is mapped; everything else is listed by name.
    """
    from accel_cli import console, import_accelerate
    from accel_cli.profile import layers, store, yaml_io
    from accel_cli.profile.edit import layer
    from accel_cli.profile.schema import describe

    target = _writable_target(profile, project=project)
    text = store.read_text(file)
    found = yaml_io.parse(text, str(file))
    if not import_accelerate.is_accelerate_config(found.data):
        _check([layers.file(file, "file")])
        _ask_to_replace(target, text, force=force)
        store.write(target, text)
        console.note(f"{target} is written")
        return
    imported = import_accelerate.convert(
        found.data, str(file), import_accelerate.named(found.data, file.parent)
    )
    _check([layer(imported.data, target)])
    rendered = store.render(imported.data, describe(imported.data["launcher"]["kind"]))
    _ask_to_replace(target, rendered, force=force)
    store.write(target, rendered)
    console.table(("IN THE FILE", "IN ACCEL"), imported.mapped)
    if imported.left:
        console.note(f"{len(imported.left)} value(s) of {file} have no place in this profile:")
        console.table(("LEFT OUT", "WHY"), imported.left)
    console.note(f"{target} is written")


@app.command(rich_help_panel=_CHANGE, epilog="Example: accel config delete gpu")
def delete(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The profile.", autocompletion=options.complete_profile_names),
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a profile, after a question."""
    from accel_cli import console
    from accel_cli.errors import UsageError

    target = _existing(_store().path(name))
    if not yes and not _has_terminal():
        raise UsageError(
            f"{target} is not deleted: the question needs a terminal. Give --yes to delete it without one."
        )
    if not yes and not console.confirm(f"Delete {target}?"):
        console.note(f"{target} was left as it is")
        return
    try:
        target.unlink()
    except OSError as error:
        raise UsageError(f"{target} cannot be deleted: {error.strerror}") from None
    console.note(f"{target} is deleted")


def _store() -> Store:
    import os

    from accel_cli.profile.store import Store

    return Store.from_env(os.environ, Path.cwd())


def _target(profile: str | None, *, project: bool) -> Path:
    """The file that the options mean."""
    from accel_cli.errors import UsageError
    from accel_cli.profile.store import DEFAULT, PROJECT_FILE

    store = _store()
    if project and profile:
        raise UsageError("--profile and --project mean different files; give one")
    if project:
        return store.project() or store.cwd / PROJECT_FILE
    return store.path(profile or DEFAULT)


def _writable_target(profile: str | None, *, project: bool) -> Path:
    """Return the file that the options mean, to be changed.

    Raises:
        UsageError: It is a project file that another user could have written.
    """
    import os

    from accel_cli.errors import UsageError
    from accel_cli.profile.store import find_distrust
    from accel_runtime import env

    target = _target(profile, project=project)
    if project and target.exists() and (distrust := find_distrust(target, os.environ)):
        raise UsageError(
            f"{target} is not changed: {distrust}. Set {env.TRUSTED_PROJECTS}={target.parent} to use it."
        )
    return target


def _existing(target: Path) -> Path:
    from accel_cli.errors import UsageError

    if not target.is_file():
        there = ", ".join(_store().names()) or "none yet"
        raise UsageError(f"there is no profile at {target}. Profiles there are: {there}.")
    return target


def _in_force(profile: str | None) -> tuple[Resolved, dict[str, Any]]:
    """Return the profile in force, and its values by dotted key."""
    import os

    from accel_cli.planning import planner
    from accel_cli.profile.layers import flat

    found = planner.detect_machine(os.environ, cpu=False)
    resolved = planner.resolve(planner.Request("", profile=profile), os.environ, found)
    values = flat(resolved.profile.model_dump())
    del values["schema_version"]  # of a file, not of a run
    return resolved, values


def _has_terminal() -> bool:
    import sys

    return sys.stdin.isatty() and sys.stdout.isatty()


def _free(target: Path, *, force: bool) -> None:
    from accel_cli.errors import UsageError

    if target.exists() and not force:
        raise UsageError(f"{target} exists already; --force replaces it")


def _ask_to_replace(target: Path, text: str, *, force: bool) -> None:
    """Ask on a terminal before a profile is replaced, unless nothing is lost by it.

    Raises:
        UsageError: There is no terminal.
        typer.Exit: The answer was no.
    """
    from accel_cli import console
    from accel_cli.errors import UsageError

    if force or not target.exists() or _holds_only_defaults(target, text):
        return
    if not _has_terminal():
        raise UsageError(
            f"{target} exists already. Give --force to replace it, or --profile NAME to write another profile."
        )
    if not console.confirm(f"Replace {target}?"):
        console.note(f"{target} was left as it is")
        raise typer.Exit


def _holds_only_defaults(target: Path, text: str) -> bool:
    """Return True if a file is the new text, or what `accel config default` writes on this machine."""
    import os

    from accel_cli.planning import machine
    from accel_cli.profile import store

    there = store.read_text(target)
    return there == text or there == _render_default(machine.detect(os.environ))


def _render_default(found: Machine) -> str:
    """Return the text of the profile that suits a machine."""
    from accel_cli.profile import layers, store
    from accel_cli.profile.schema import describe
    from accel_cli.wizard.steps import suggested_values

    values = suggested_values(found)
    return store.render(layers.to_data(values), describe(values["launcher.kind"]))


def _below(target: Path) -> list[Any]:
    """The layers a file stands on."""
    from accel_cli.profile.edit import below

    return list(below(_store(), target))


def _find_kind(target: Path) -> Any:
    """Return the `launcher.kind` that holds with a file, None where none is said."""
    from accel_cli.profile import layers

    stack = [*_below(target), *([layers.file(target, "file")] if target.is_file() else [])]
    return next(
        (layer.values["launcher.kind"] for layer in stack[::-1] if "launcher.kind" in layer.values), None
    )


def _check(stack: list[Any]) -> None:
    """Refuse a profile that could not be used."""
    from accel_cli.profile import layers

    layers.resolve(stack)


def _write_default(target: Path, *, force: bool) -> None:
    import os

    from accel_cli import console
    from accel_cli.planning import machine
    from accel_cli.profile import store

    _free(target, force=force)
    found = machine.detect(os.environ)
    for problem in found.problems:
        console.note(problem)
    store.write(target, _render_default(found))
    console.note(f"{target} is written for {found.summary}")


def _ask(target: Path) -> None:
    """The wizard, which needs a terminal."""
    from accel_cli.errors import UsageError

    if not _has_terminal():
        raise UsageError(
            "the questions need a terminal. Without one: `accel config --default` writes what suits this machine, "
            "and `accel config set KEY=VALUE` changes single values."
        )
    from accel_cli.wizard.session import run_wizard

    raise typer.Exit(run_wizard(target))


def _text(value: object) -> str:
    """Return a value as it would be typed behind its key."""
    from accel_cli.profile import yaml_io

    return value if isinstance(value, str) else "" if value is None else yaml_io.inline(value)


def edit_interactively(path: Path, check: Callable[[Path], None]) -> str | None:
    """The new text of a file, or None if the person changed nothing or gave up.

    Args:
        path: The file; it is not touched.
        check: Raises UsageError for a text that may not be kept.

    Raises:
        UsageError: There is no editor, it failed, or without a terminal the text has mistakes.
    """
    import tempfile

    from accel_cli.errors import UsageError

    before = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / path.name
        scratch.write_text(before, encoding="utf-8")
        while True:
            _open(scratch)
            after = scratch.read_text(encoding="utf-8")
            if after == before:
                return None
            try:
                check(scratch)
            except UsageError as error:
                reason = str(error).replace(str(scratch), path.name)
                if not _again(reason):
                    return None
            else:
                return after


def _open(path: Path) -> None:
    import os
    import shlex
    import subprocess

    from accel_cli.errors import UsageError

    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    command = [*shlex.split(editor), str(path)]
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UsageError(f"the editor {editor!r} cannot be started ({error.strerror}); set EDITOR") from None
    if code:
        raise UsageError(f"the editor {editor!r} ended with code {code}; nothing was changed")


def _again(reason: str) -> bool:
    """Show what is wrong and ask whether to go on editing."""
    import sys

    from accel_cli import console
    from accel_cli.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError(f"{reason}\nThe file was left as it was.")
    console.error(reason)
    console.drop_typed()
    answer = input("Edit again? [Y/n] ")
    return not answer.strip().lower().startswith("n")
