"""Completion in the shell: its options, and the values of options and arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accel_cli import console
from accel_cli.errors import AccelError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = [
    "complete_assignments",
    "complete_checkpoints",
    "complete_files",
    "complete_keys",
    "complete_profile_names",
    "complete_runs",
    "install_completion",
    "prepare_bash",
    "show_completion",
]


def complete_files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return an item for which the shell completes names of files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_profile_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the profiles that start with a text."""
    from accel_cli.profile.store import ProfileStore

    names = ProfileStore.from_env(os.environ, Path.cwd()).list_names()
    return [name for name in names if name.startswith(incomplete)]


def complete_keys(
    _ctx: click.Context, _param: click.Parameter, incomplete: str, end: str = ""
) -> list[CompletionItem]:
    """Return the keys of a profile that start with a text, each with an end, and their descriptions."""
    from click.shell_completion import CompletionItem

    from accel_cli.profile.schema import known_keys

    keys = {f"{key}{end}": text for key, text in known_keys().items()}
    return [CompletionItem(key, help=text) for key, text in keys.items() if key.startswith(incomplete)]


def complete_assignments(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the keys of a profile that start with a text, each with `=`; after a key and `=`, its values."""
    from click.shell_completion import CompletionItem

    from accel_cli.profile.schema import list_values

    key, assigned, text = incomplete.partition("=")
    if not assigned:
        return complete_keys(_ctx, _param, incomplete, "=")
    return [CompletionItem(f"{key}={value}") for value in list_values(key) if value.startswith(text)]


def complete_runs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of runs that start with a text, the newest first."""
    from accel_cli.runs.run_dir import find_recent_runs, get_log_home

    runs = find_recent_runs(get_log_home(os.environ, ctx.params.get("log_dir")))
    return [run.path.name for run in runs if run.path.name.startswith(incomplete)]


def complete_checkpoints(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the directories that start with a text: checkpoints, and their parents."""
    # Keep the text unchanged, with `./` in front too.
    head, _, rest = incomplete.rpartition("/")
    parent = f"{head}/" if "/" in incomplete else ""
    try:
        names = sorted(path.name for path in Path(parent or ".").iterdir() if path.is_dir())
    except OSError:
        return []
    return [f"{parent}{name}" for name in names if name.startswith(rest) and not name.startswith(".")]


def install_completion(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Install completion for the current shell, and exit."""
    if not value or ctx.resilient_parsing:
        return
    shell, script = _render_script(ctx.command)
    home = Path.home()
    if shell == "bash":
        path = home / ".bash_completions" / "accel.sh"
        _add_line(home / ".bashrc", f"source '{path}'")
    elif shell == "zsh":
        path = home / ".zfunc" / "_accel"
        _add_line(home / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    else:
        path = home / ".config" / "fish" / "completions" / "accel.fish"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    console.plain(f"{shell} completion installed in {path}")
    console.plain("Completion will take effect once you restart the terminal")
    ctx.exit()


def show_completion(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Print the completion script of the current shell, and exit."""
    if value and not ctx.resilient_parsing:
        console.plain(_render_script(ctx.command)[1].strip())
        ctx.exit()


def _render_script(command: click.Command) -> tuple[str, str]:
    """Return the shell that runs this process, and its completion script.

    Raises:
        AccelError: There is no completion for the shell.
    """
    import shellingham
    from click.shell_completion import get_completion_class

    try:
        shell = shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        raise AccelError(
            "Cannot find the current shell: no parent of this process is one. Run this command in a terminal."
        ) from None
    complete = get_completion_class(shell)
    if complete is None or shell not in _SHELLS:
        raise AccelError(
            f"Completion is not available in the shell {shell}: it is for {', '.join(_SHELLS)} only. Start one of them first."
        )
    return shell, complete(command, {}, "accel", "_ACCEL_COMPLETE").source()


_SHELLS = ("bash", "zsh", "fish")


def prepare_bash() -> None:
    """Make completion in bash join the parts of `KEY=VALUE`, which are three words for its function."""
    if os.environ.get("_ACCEL_COMPLETE") != "bash_complete":
        return
    from click.shell_completion import BashComplete, add_completion_class

    class Bash(BashComplete):
        joined = False

        def get_completion_args(self) -> tuple[list[str], str]:
            args, incomplete = super().get_completion_args()
            words: list[str] = []
            for word in (*args, incomplete):
                self.joined = bool(words) and (word == "=" or words[-1].endswith("="))
                words[-1:] = [words[-1] + word] if self.joined else [*words[-1:], word]
            return words[:-1], words[-1]

        def format_completion(self, item: CompletionItem) -> str:
            # bash replaces the part behind the last `=`.
            value = item.value.rpartition("=")[2] if self.joined else item.value
            return f"{item.type},{value}"

    add_completion_class(Bash)


def _add_line(file: Path, line: str) -> None:
    """Append a line, unless the file has it."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if line not in text:
        start = text if not text or text.endswith("\n") else f"{text}\n"
        file.write_text(f"{start}{line}\n", encoding="utf-8")
