"""The files of a folder that are copied to where a script runs: those git does not ignore, without caches and secrets."""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers import git
from accel_cli.launchers.secret_files import FoundToken, find_tokens, is_secret_name
from accel_cli.runs.run_dir import is_run_folder
from accel_runtime.environment.engines import list_engines
from accel_runtime.environment.settings import variable_name

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

__all__ = [
    "SelectedFile",
    "Selection",
    "check_engine_files",
    "check_selected",
    "describe_selection",
    "format_name",
    "is_clutter",
    "locate_target",
    "select_files",
    "walk_files",
    "write_archive",
]

_CLUTTER = frozenset({
    ".DS_Store", ".eggs", ".git", ".hg", ".hypothesis", ".idea", ".ipynb_checkpoints", ".jj", ".mypy_cache", ".nox",
    ".pytest_cache", ".ruff_cache", ".svn", ".tox", ".venv", ".vscode", "__pycache__", "mlruns", "node_modules", "venv",
    "wandb",
})  # fmt: skip
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
_ALL = "all files except caches and environments"
_NUM_SHOWN = 5


@dataclass(frozen=True)
class SelectedFile:
    """A file or link that is sent."""

    name: str
    """Its path relative to the source folder."""
    size: int = 0
    link: str = ""
    """Target of a link."""


@dataclass(frozen=True)
class Selection:
    """The files of a folder that are sent."""

    source: Path
    files: tuple[SelectedFile, ...]
    method: str = ""
    """How the files were selected."""
    secrets: tuple[str, ...] = ()
    """Files that are not sent, since their names are those of credentials or they contain tokens."""
    tokens: tuple[FoundToken, ...] = ()
    """The tokens in files that are not sent."""
    notes: tuple[str, ...] = ()
    """Lines for the user to read before the files are sent."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def largest(self) -> list[SelectedFile]:
        """The five largest files, the largest first."""
        return sorted(self.files, key=lambda file: (-file.size, file.name))[:_NUM_SHOWN]


def select_files(
    source: Path, include: Sequence[str] = (), exclude: Sequence[str] = (), *, keep_links: bool = False
) -> Selection:
    """Select the files of a folder: those git does not ignore and those of `include`, without `exclude` and secrets.

    A secret is sent if a pattern of `include` names it. Links that leave the folder or are broken are refused, unless
    `keep_links` keeps all links as they are.

    Raises:
        UsageError: Also if source code contains a token: without it the job would fail.
    """
    source = source.resolve()
    if not source.is_dir():
        raise UsageError(f"Folder not found: {source} (launcher.source_dir).")
    excluded = _parse_patterns("exclude", exclude)
    names, method, notes = _list_files(source, excluded)
    names |= _find_included(source, include, excluded, names)
    names = {name for name in names if not excluded.match_file(name)}
    allowed = _parse_patterns("include", [text for text in include if is_secret_name(text)])
    secrets = {name for name in names if is_secret_name(name) and not allowed.match_file(name)}
    tokens = _find_tokens(source, names - secrets, include, notes)
    secrets |= {token.name for token in tokens}
    if secrets:
        notes.append(
            f"{_describe_secrets(secrets, tokens)}. Add those that the script needs to launcher.include"
        )
    files = _stat_files(source, sorted(names - secrets, key=os.fsencode), keep_links=keep_links)
    sent = _collect_names(files)
    links = [] if keep_links else [file.name for file in files if file.link]
    broken = [name for name in links if _resolve_name(source, name) not in sent]
    if broken:
        notes.append(f"links that will be broken, since their targets are not sent: {_join_names(broken)}")
    return Selection(source, tuple(files), method, tuple(sorted(secrets)), tokens, tuple(notes))


def _find_tokens(
    source: Path, names: Iterable[str], include: Sequence[str], notes: list[str]
) -> tuple[FoundToken, ...]:
    """Return the tokens in files that are not code, and raise UsageError for those in code.

    A file whose name ends a pattern of `include` is sent on purpose.
    """
    chosen = {text.rstrip("/").rpartition("/")[2] for text in include}
    search = find_tokens(source, (name for name in names if name.rpartition("/")[2] not in chosen))
    if search.num_unread:
        notes.append(
            f"{search.num_unread} files were not searched for tokens, after {console.format_size(search.num_bytes)}"
        )
    code = [token for token in search.found if token.is_code]
    if code:
        places = ", ".join(f"{format_name(token.name)}:{token.line} ({token.kind})" for token in code)
        raise UsageError(
            f"Cannot send {source}: {len(code)} file(s) of source code contain a token or a password: {places}. Read it from "
            "a variable, or add the file by its name to launcher.include to send it, or to launcher.exclude."
        )
    return search.found


def _describe_secrets(secrets: Iterable[str], tokens: Iterable[FoundToken]) -> str:
    """Return the names of all files that are not sent, those with tokens with the line and the kind of the first."""
    reasons = {token.name: f" (line {token.line}: {token.kind})" for token in tokens}
    listed = ", ".join(f"{format_name(name)}{reasons.get(name, '')}" for name in sorted(secrets))
    return f"not sent, since they may hold secrets: {listed}"


def locate_target(target: str, kind: str, source_dir: str, cure: str) -> tuple[str, str]:
    """Return a target and the current directory, by their paths in the folder that is sent.

    Raises:
        UsageError: One of them is not in that folder; the message ends with `cure`.
    """
    source, here = Path(source_dir).resolve(), Path.cwd().resolve()
    paths = {"The current directory": here}
    if kind == "script":
        paths[f"The script {target}"] = Path(target).resolve()
    for what, path in paths.items():
        if not path.is_relative_to(source):
            raise UsageError(
                f"{what} is not in {source}, the folder that is sent. Launch from that folder, set launcher.source_dir, or {cure}."
            )
    if kind == "script" and Path(target).is_absolute():
        target = os.path.relpath(Path(target).resolve(), here)
    return target, str(here.relative_to(source))


def check_selected(selection: Selection, path: str | Path) -> None:
    """Raise UsageError if a file or folder that the job needs is not sent; `path` is relative to the source."""
    name = os.path.normpath(path)
    if {name, _resolve_name(selection.source, name)} & _collect_names(selection.files):
        return
    reason = "git ignores it, it is a cache or empty, or launcher.exclude matches it"
    if name in selection.secrets:
        reason = "it may hold secrets"
    raise UsageError(
        f"{format_name(name)} is needed, but is not sent: {reason}. Add it to launcher.include, or change launcher.exclude."
    )


def check_engine_files(selection: Selection, folder: str | Path, env: Mapping[str, str]) -> None:
    """Raise UsageError if the file of an engine, relative to the working folder in the source, is not sent."""
    for engine in list_engines():
        name = env.get(variable_name(f"{engine.name}_{engine.file}"), "")
        if name and not Path(name).is_absolute():
            check_selected(selection, Path(folder, name))


def describe_selection(selection: Selection) -> Iterator[str]:
    """Yield lines about all files that are sent, the largest first, and those that are not, since they may hold secrets."""
    yield (
        f"{len(selection.files)} files of {selection.source}, {console.format_size(selection.size)}: {selection.method}"
    )
    for file in sorted(selection.files, key=lambda file: (-file.size, file.name)):
        link = f" -> {format_name(file.link)}" if file.link else ""
        yield f"  {console.format_size(file.size):>9}  {format_name(file.name)}{link}"
    if selection.secrets:
        yield _describe_secrets(selection.secrets, selection.tokens)


def is_clutter(path: Path) -> bool:
    """Return True for a cache, an environment, a run of accel, and a folder whose `.gitignore` excludes all of its files."""
    if is_run_folder(path):
        return True
    if path.name in _CLUTTER or path.suffix in {".pyc", ".pyo"}:
        return True
    if any(os.path.lexists(path / mark) for mark in _ENVIRONMENT_MARKS):
        return True
    try:  # as downloaded results do
        return (path / ".gitignore").read_bytes().strip() == b"*"
    except OSError:
        return False


def _parse_patterns(key: str, texts: Iterable[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # noqa: PLC0415 - only launches that send files need it

    try:
        return GitIgnoreSpec.from_lines(re.sub(r"^\./", "/", text) for text in texts)
    except (ValueError, re.error) as error:
        raise UsageError(f"Invalid pattern in launcher.{key}: {error}.") from None


def _list_files(source: Path, excluded: GitIgnoreSpec) -> tuple[set[str], str, list[str]]:
    """Return the names of files as git lists them, else of all but clutter; how they were listed; and notes."""
    notes: list[str] = []
    try:
        names = _list_with_git(source, "", notes)
    except git.GitError as error:
        notes = [f"git cannot list the files of {source}: {error}. So {_ALL} are sent"]
    else:
        if names:
            return names, "tracked by git, or new and not ignored", notes
        if names is not None:
            notes = [
                f"git lists no files of {source}, perhaps since it ignores the folder. So {_ALL} are sent"
            ]
    return set(walk_files(source, excluded)), f"{_ALL}, since git does not list them", notes


def _list_with_git(source: Path, subfolder: str, notes: list[str]) -> set[str] | None:
    """Return the files that git lists in a folder and in the repositories below it, without clutter that is new.

    None if the folder is in no repository.
    """
    entries = git.list_files(source / subfolder, "-t", "--cached")
    if entries is None:
        return None
    names: set[str] = set()
    new: set[str] = set()
    for entry in entries:
        tag, listed = entry[0], entry[2:]
        if not _is_below(listed):
            continue
        name = str(PurePosixPath(subfolder, listed))
        path = source / name
        if path.is_symlink() or not path.is_dir():
            (new if tag == "?" else names).add(name)
        elif os.path.lexists(path / ".git"):
            names |= _list_with_git(source, name, notes) or set()
        else:
            notes.append(
                f"submodule {name} is not checked out, so its files are not sent. Run git submodule update --init"
            )
    parts = {part for name in new for part in (*_list_parents(name), name)}
    clutter = {part for part in parts if is_clutter(source / part)}
    return names | {name for name in new if clutter.isdisjoint((*_list_parents(name), name))}


def _is_below(name: str) -> bool:
    """Return False for a name that git itself does not store, but that may be written into its index."""
    parts = name.removesuffix("/").lower().split("/")
    return {"", ".", "..", ".git"}.isdisjoint(parts)


def walk_files(
    source: Path, excluded: GitIgnoreSpec | None = None, named: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the files and links of a folder, without clutter that is not `named`; links are not followed."""

    def refuse(error: OSError) -> None:
        raise UsageError(
            f"Cannot read folder {error.filename}: {error.strerror}. Make it readable, or add it to launcher.exclude."
        )

    for folder, folders, files in os.walk(source, onerror=refuse):
        base, entered = PurePosixPath(os.path.relpath(folder, source)), []
        for name in (*folders, *files):
            path = str(base / name)
            if name not in named and is_clutter(source / path):
                continue
            if name not in folders or (source / path).is_symlink():
                yield path
            elif excluded is None or not excluded.match_file(f"{path}/"):
                entered.append(name)
        folders[:] = entered


def _find_included(
    source: Path, include: Sequence[str], excluded: GitIgnoreSpec, listed: set[str]
) -> set[str]:
    """Return the files that the patterns of `include` match, also in caches that a pattern names."""
    if not include:
        return set()
    named = frozenset(part for text in include for part in text.split("/"))
    everything = {*walk_files(source, excluded, named), *listed}
    included = set()
    for text in include:
        matches = set(_parse_patterns("include", [text]).match_files(everything))
        if not matches:
            raise UsageError(
                f"launcher.include {text!r} matches no file in {source}. Links are not followed; correct or remove the "
                "pattern."
            )
        included |= matches
    return included


def _stat_files(source: Path, names: Sequence[str], *, keep_links: bool) -> list[SelectedFile]:
    """Return the files and links among the names; refuse links that leave the source, unless `keep_links` is set."""
    # No error for a closed folder, unlike Path.is_symlink.
    folders = {folder for name in names for folder in _list_parents(name)}
    linked = {folder for folder in folders if os.path.islink(source / folder)}  # noqa: PTH114
    # Git also lists the files of a folder that became a link, which may lead out of the source.
    names = [name for name in names if linked.isdisjoint(_list_parents(name))]
    links = {name for name in names if os.path.islink(source / name)}  # noqa: PTH114
    files, broken = [], []
    for name in names:
        path = source / name
        if name in links:
            if keep_links:
                files.append(SelectedFile(name, link=str(path.readlink())))
            elif (target := _resolve_name(source, name)) and path.exists():
                # Relative, so that it is the same wherever the source is.
                files.append(SelectedFile(name, link=os.path.relpath(source / target, path.parent)))
            else:
                broken.append(f"{format_name(name)} -> {format_name(str(path.readlink()))}")
            continue
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue  # git still lists a deleted file
        except OSError as error:
            raise UsageError(
                f"Cannot read {format_name(str(path))}: {error.strerror}. Make it readable, or add it to launcher.exclude."
            ) from None
        if stat.S_ISREG(status.st_mode):
            files.append(SelectedFile(name, status.st_size))
    if broken:
        raise UsageError(
            f"{len(broken)} link(s) in {source} lead out of it or to missing files, and would be broken in the job: "
            f"{', '.join(broken[:_NUM_SHOWN])}. Add them to launcher.exclude, and pass large data as an input channel "
            "(launcher.inputs) or on a volume (launcher.volumes)."
        )
    return files


def _collect_names(files: Sequence[SelectedFile]) -> set[str]:
    """Return the names of files and of the folders they are in."""
    return {file.name for file in files}.union(*(_list_parents(file.name) for file in files), {"."})


def _list_parents(name: str) -> list[str]:
    """Return the folders that a file is in, the outermost first."""
    return [name[:index] for index, character in enumerate(name) if character == "/"]


def _resolve_name(source: Path, name: str) -> str | None:
    """Return the real path of a file relative to the source, or None if it is outside."""
    # Unlike Path.resolve, realpath accepts links that form a circle.
    relative = os.path.relpath(os.path.realpath(source / name), source)
    return None if relative == ".." or relative.startswith("../") else relative


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(map(format_name, names[:_NUM_SHOWN])) + more


def format_name(name: str) -> str:
    """Return a name with characters that cannot be printed escaped."""
    return name if name.isprintable() else ascii(name)


def write_archive(selection: Selection, path: Path) -> None:
    """Write files to a `.tar.gz`, without their owners and times."""
    try:
        with tarfile.open(
            path,
            "w:gz",
            compresslevel=6,
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
        ) as archive:
            for file in selection.files:
                member, data = tarfile.TarInfo(file.name), b""
                if file.link:
                    member.type, member.linkname = tarfile.SYMTYPE, file.link
                else:
                    # The size is that of the bytes that were read, even if the file grows meanwhile.
                    data, member.mode = _read_file(selection.source / file.name)
                    member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    except OSError as error:
        raise AccelError(f"Cannot write {path}: {error.strerror or error}.") from None


def _read_file(path: Path) -> tuple[bytes, int]:
    """Return the content of a file, and its mode in an archive."""
    try:
        return path.read_bytes(), 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
    except OSError as error:
        raise UsageError(f"Cannot read {format_name(str(path))}: {error.strerror}.") from None
