"""The files of a folder that are copied to where a script runs: source and configuration, without caches, data and secrets.

Each rule is overridden by those after it: what git lists and what is source, `.accelignore`, `include`, `exclude`.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.launchers import git
from accel_cli.launchers.secret_files import FoundToken, find_tokens, is_secret_file, names_secret
from accel_cli.runs.run_dir import is_run_folder
from accel_runtime.environment.engines import list_engines
from accel_runtime.environment.settings import variable_name

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

__all__ = [
    "IGNORE_FILE",
    "SOURCE_NAMES",
    "SOURCE_SUFFIXES",
    "LeftOutFile",
    "SelectedFile",
    "Selection",
    "check_engine_files",
    "check_selected",
    "describe_selection",
    "format_name",
    "is_clutter",
    "is_source_file",
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
SOURCE_SUFFIXES: Final = frozenset({
    # Python, notebooks and compiled extensions' sources
    ".ipynb", ".pxd", ".pxi", ".py", ".pyi", ".pyx", ".typed",
    # C, C++, CUDA, HIP, Metal, Triton's intermediate languages
    ".c", ".cc", ".cl", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hh", ".hip", ".hpp", ".hxx", ".inc", ".inl", ".m", ".metal", ".mlir",
    ".mm", ".ptx", ".s", ".td",
    # other languages
    ".clj", ".cs", ".css", ".dart", ".ex", ".exs", ".f", ".f90", ".for", ".go", ".groovy", ".gvy", ".hs", ".html", ".java", ".jl", ".js",
    ".jsx", ".kt", ".kts", ".lua", ".mjs", ".ml", ".mojo", ".php", ".pl", ".pm", ".r", ".rb", ".rmd", ".rs", ".sbt", ".scala", ".sol", ".sql",
    ".sv", ".swift", ".ts", ".tsx", ".v", ".vhd", ".vue", ".zig",
    # shells, batch jobs and builds
    ".am", ".awk", ".bash", ".bat", ".bazel", ".bzl", ".cmake", ".cmd", ".def", ".fish", ".gradle", ".ksh", ".mk", ".nix", ".pbs", ".ps1",
    ".psm1", ".sbatch", ".sed", ".sh", ".slurm", ".smk", ".star", ".zsh",
    # configuration
    ".cfg", ".cnf", ".conf", ".config", ".cue", ".gin", ".hcl", ".hocon", ".ini", ".json", ".json5", ".jsonc", ".jsonnet",
    ".libsonnet", ".lock", ".properties", ".rules", ".tf", ".toml", ".xml", ".yaml", ".yml",
    # schemas and templates
    ".avsc", ".fbs", ".graphql", ".in", ".j2", ".jinja", ".jinja2", ".mako", ".mustache", ".proto", ".service", ".tera", ".thrift", ".tmpl",
    ".tpl", ".xsd",
    # files that show what to write, such as `.env.example`
    ".default", ".dist", ".example", ".sample", ".template",
    # text
    ".adoc", ".bib", ".diff", ".markdown", ".md", ".mdx", ".org", ".patch", ".prompt", ".rst", ".tex", ".txt",
    # tokenizers, which are small and without which a script does not start; the limit of size keeps out weights of the same suffix
    ".bpe", ".codes", ".merges", ".model", ".spm", ".tiktoken", ".vocab",
})  # fmt: skip
"""Endings of source and configuration files, in lower case. Tables, images, arrays, weights and archives are data."""
SOURCE_NAMES: Final = frozenset({
    # builds
    "build", "cakefile", "configure", "containerfile", "dockerfile", "earthfile", "gemfile", "gnumakefile", "jenkinsfile", "justfile",
    "kbuild", "kconfig", "makefile", "meson_options", "pipfile", "procfile", "rakefile", "sconscript", "sconstruct", "singularity",
    "snakefile", "tiltfile", "vagrantfile", "workspace",
    # text
    "authors", "changelog", "changes", "citation", "codeowners", "contributors", "copying", "copyright", "hostfile",
    "licence", "license", "maintainers", "manifest", "news", "notice", "readme", "requirements", "todo", "version",
    # tools
    ".accelignore", ".bazelignore", ".bazelrc", ".bazelversion", ".buckconfig", ".clang-format", ".clang-tidy", ".clangd", ".coveragerc",
    ".dockerignore", ".dvcignore", ".editorconfig", ".eslintrc", ".flake8", ".gcloudignore", ".gitattributes", ".gitignore", ".gitkeep", ".gitmodules",
    ".helmignore", ".mailmap", ".node-version", ".nvmrc", ".prettierrc", ".pylintrc", ".python-version", ".rayignore", ".skyignore",
    ".style.yapf", ".tool-versions", ".yamllint",
})  # fmt: skip
"""Names of source and configuration files without an ending, in lower case."""
_VARIANTS: Final = frozenset({"containerfile", "dockerfile", "license", "makefile", "notice", "requirements"})
"""Names of which there are variants, such as `Dockerfile.gpu`, `LICENSE-MIT` and `requirements-dev`."""
IGNORE_FILE: Final = ".accelignore"
_MAX_FILE_BYTES = 20_000_000
"""Limit of a file that git does not track; tokenizers and notebooks with images have a few megabytes."""
_MAX_BYTES = 100_000_000
"""Limit of all such files: those of a project are smaller, and a folder of JSON files with data is larger."""
_KINDS = "source and configuration files"
_ALL = f"all {_KINDS}"
_LEFT_OUT = (
    f"Files that git does not track are sent if they are source or configuration of up to {_MAX_FILE_BYTES // 10**6} MB, and "
    f"{_MAX_BYTES // 10**6} MB together. Add those that the script needs to launcher.include"
)
_NUM_SHOWN = 5
_NUM_LISTED = 100
_MAX_SINGLE = 3
"""More files of a folder that are left out are shown as one."""


@dataclass(frozen=True)
class SelectedFile:
    """A file or link that is sent."""

    name: str
    """Its path relative to the source folder."""
    size: int = 0
    link: str = ""
    """Target of a link."""


@dataclass(frozen=True)
class LeftOutFile:
    """A file that is not sent, since it is data or too large."""

    name: str
    """Its path relative to the source folder."""
    size: int
    reason: str
    """Why it is not sent, as a clause."""


@dataclass(frozen=True)
class Selection:
    """The files of a folder that are sent."""

    source: Path
    files: tuple[SelectedFile, ...]
    method: str = ""
    """How the files were selected."""
    left_out: tuple[LeftOutFile, ...] = ()
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
    """Select the files of a folder: those git tracks, and source and configuration up to a size that git does not ignore.

    `.accelignore` in the folder removes files, and adds those of patterns with `!`. `include` adds files, and `exclude` removes them.
    A secret is sent if a pattern of `include` names it. Links that leave the folder or are broken are refused, unless
    `keep_links` keeps all links as they are.

    Raises:
        UsageError: Also if source code contains a token: without it the job would fail.
    """
    source = source.resolve()
    if not source.is_dir():
        raise UsageError(f"Folder not found: {source} (launcher.source_dir).")
    excluded = _parse_patterns("launcher.exclude", exclude)
    ignored = _read_ignore_file(source)
    listing = _list_files(source, [excluded, ignored.spec])
    added = _find_added(source, include, ignored, excluded, listing.tracked | listing.new)
    names = {name for name in listing.tracked | listing.new if not ignored.spec.match_file(name)} | added
    names = {name for name in names if not excluded.match_file(name)}
    allowed = _parse_patterns("launcher.include", [text for text in include if names_secret(text)])
    secrets = {name for name in names if not allowed.match_file(name) and is_secret_file(source, name)}
    left_out = _find_left_out(source, (names & listing.new) - added - secrets)
    names -= secrets | {file.name for file in left_out}
    notes = list(listing.notes)
    tokens = _find_tokens(source, names, include, notes)
    secrets |= {token.name for token in tokens}
    if secrets:
        notes.append(
            f"{_describe_secrets(secrets, tokens)}. Add those that the script needs to launcher.include"
        )
    if left_out:
        notes.append(_describe_left_out(left_out))
    files = _stat_files(source, sorted(names - secrets, key=os.fsencode), keep_links=keep_links)
    sent = _collect_names(files)
    links = [] if keep_links else [file.name for file in files if file.link]
    broken = [name for name in links if _resolve_name(source, name) not in sent]
    if broken:
        notes.append(f"links that will be broken, since their targets are not sent: {_join_names(broken)}")
    return Selection(
        source, tuple(files), listing.method, tuple(left_out), tuple(sorted(secrets)), tokens, tuple(notes)
    )


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
            f"{_count_files(search.num_unread)} {'was' if search.num_unread == 1 else 'were'} not searched for tokens, after "
            f"{console.format_size(search.num_bytes)}"
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


def _describe_left_out(files: Sequence[LeftOutFile]) -> str:
    """Return the largest files that are left out, or the folders at the top that have several of them."""
    groups: dict[str, list[LeftOutFile]] = {}
    for file in files:
        groups.setdefault(file.name.partition("/")[0], []).append(file)
    entries = []
    for top, members in groups.items():
        if len(members) > _MAX_SINGLE:
            entries.append((sum(file.size for file in members), f"{top}/", len(members)))
        else:
            entries += [(file.size, file.name, 1) for file in members]
    entries.sort(key=lambda entry: (-entry[0], entry[1]))
    shown = [
        f"{format_name(name)} ({f'{count} files, ' if count > 1 else ''}{console.format_size(size)})"
        for size, name, count in entries[:_NUM_SHOWN]
    ]
    more = ""
    if rest := entries[_NUM_SHOWN:]:
        size = console.format_size(sum(size for size, _, _ in rest))
        more = f" and {sum(count for _, _, count in rest)} more ({size})"
    return f"left out: {', '.join(shown)}{more}. {_LEFT_OUT}"


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
    spellings = {name, _resolve_name(selection.source, name)}
    if spellings & _collect_names(selection.files):
        return
    reason = f"git ignores it, it is a cache or empty, or launcher.exclude or {IGNORE_FILE} matches it"
    if spellings.intersection(selection.secrets):
        reason = "it may hold secrets"
    reason = next((file.reason for file in selection.left_out if file.name in spellings), reason)
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
        f"{_count_files(len(selection.files))} of {selection.source}, {console.format_size(selection.size)}: {selection.method}"
    )
    for file in sorted(selection.files, key=lambda file: (-file.size, file.name)):
        link = f" -> {format_name(file.link)}" if file.link else ""
        yield f"  {console.format_size(file.size):>9}  {format_name(file.name)}{link}"
    if selection.left_out:
        yield f"left out: {_count_files(len(selection.left_out))}. {_LEFT_OUT}"
        largest = sorted(selection.left_out, key=lambda file: (-file.size, file.name))
        for left in largest[:_NUM_LISTED]:
            yield f"  {console.format_size(left.size):>9}  {format_name(left.name)}"
        if rest := largest[_NUM_LISTED:]:
            yield f"  {console.format_size(sum(file.size for file in rest)):>9}  in {_count_files(len(rest), 'more ')}"
    if selection.secrets:
        yield _describe_secrets(selection.secrets, selection.tokens)


def _count_files(count: int, kind: str = "") -> str:
    return f"{count} {kind}file{'' if count == 1 else 's'}"


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


def is_source_file(path: Path) -> bool:
    """Return whether a file is source or configuration: by its name, or as a script without an ending that begins with `#!`."""
    name = path.name.lower()
    if name in SOURCE_NAMES or path.suffix.lower() in SOURCE_SUFFIXES:
        return True
    if re.split(r"[._-]", name, maxsplit=1)[0] in _VARIANTS:
        return True
    return not path.suffix and _read_start(path) == b"#!"


def _read_start(path: Path) -> bytes:
    """Return the first two bytes of a regular file; none if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(2)
    except OSError:
        return b""


def _find_left_out(source: Path, names: Iterable[str]) -> list[LeftOutFile]:
    """Return the files that are not sent although git does not ignore them: data, large files, and the largest of too many."""
    left_out: list[LeftOutFile] = []
    kept: list[tuple[int, str]] = []
    for name in names:
        try:
            status = (source / name).lstat()
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        if not is_source_file(source / name):
            left_out.append(LeftOutFile(name, status.st_size, "it is neither source nor configuration"))
        elif status.st_size > _MAX_FILE_BYTES:
            reason = f"it is larger than {_MAX_FILE_BYTES // 10**6} MB"
            left_out.append(LeftOutFile(name, status.st_size, reason))
        else:
            kept.append((status.st_size, name))
    total = 0
    for size, name in sorted(kept):
        total += size
        if total > _MAX_BYTES:
            reason = f"it is one of the largest files, which have more than {_MAX_BYTES // 10**6} MB together"
            left_out.append(LeftOutFile(name, size, reason))
    return sorted(left_out, key=lambda file: file.name)


def _parse_patterns(origin: str, texts: Iterable[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # noqa: PLC0415 - only launches that send files need it

    try:
        return GitIgnoreSpec.from_lines(re.sub(r"^(!?)\./", r"\1/", text) for text in texts)
    except (ValueError, re.error) as error:
        raise UsageError(f"Invalid pattern in {origin}: {error}.") from None


class _IgnoreFile(NamedTuple):
    """The patterns of `.accelignore`."""

    spec: GitIgnoreSpec
    negations: tuple[str, ...]
    """The patterns that begin with `!`, without it: they add files."""


def _read_ignore_file(source: Path) -> _IgnoreFile:
    path, lines = source / IGNORE_FILE, []
    if path.is_file():  # not a pipe
        try:
            lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
        except OSError as error:
            raise UsageError(
                f"Cannot read {path}: {error.strerror}. Make it readable, or remove it."
            ) from None
    negations = tuple(line[1:] for line in lines if line.startswith("!"))
    return _IgnoreFile(_parse_patterns(str(path), lines), negations)


class _Listing(NamedTuple):
    """The files of a folder before rules apply."""

    tracked: set[str]
    new: set[str]
    """Files that git does not track, without those that it ignores, and without clutter."""
    method: str
    notes: tuple[str, ...] = ()


def _list_files(source: Path, skipped: Sequence[GitIgnoreSpec]) -> _Listing:
    """Return the names of files as git lists them, else of all but clutter."""
    notes: list[str] = []
    try:
        listed = _list_with_git(source, "", notes)
    except git.GitError as error:
        notes = [f"git cannot list the files of {source}: {error}. So {_ALL} are sent"]
    else:
        if listed and any(listed):
            return _Listing(*listed, f"tracked by git, or {_KINDS} that it does not ignore", tuple(notes))
        if listed is not None:
            notes = [
                f"git lists no files of {source}, perhaps since it ignores the folder. So {_ALL} are sent"
            ]
    return _Listing(
        set(), set(walk_files(source, skipped)), f"{_ALL}, since git does not list them", tuple(notes)
    )


def _list_with_git(source: Path, subfolder: str, notes: list[str]) -> tuple[set[str], set[str]] | None:
    """Return the tracked and the new files of a folder and of the repositories below it; of the new ones, those without clutter.

    None if the folder is in no repository.
    """
    entries = git.list_files(source / subfolder, "-t", "--cached")
    if entries is None:
        return None
    tracked: set[str] = set()
    new: set[str] = set()
    nested: list[tuple[set[str], set[str]]] = []
    for entry in entries:
        tag, listed = entry[0], entry[2:]
        if not _is_below(listed):
            continue
        name = str(PurePosixPath(subfolder, listed))
        path = source / name
        if path.is_symlink() or not path.is_dir():
            (new if tag == "?" else tracked).add(name)
        elif os.path.lexists(path / ".git"):
            nested.append(_list_with_git(source, name, notes) or (set(), set()))
        else:
            notes.append(
                f"submodule {name} is not checked out, so its files are not sent. Run git submodule update --init"
            )
    parts = {part for name in new for part in (*_list_parents(name), name)}
    clutter = {part for part in parts if is_clutter(source / part)}
    new = {name for name in new if clutter.isdisjoint((*_list_parents(name), name))}
    return tracked.union(*(one for one, _ in nested)), new.union(*(one for _, one in nested))


def _is_below(name: str) -> bool:
    """Return False for a name that git itself does not store, but that may be written into its index."""
    parts = name.removesuffix("/").lower().split("/")
    return {"", ".", "..", ".git"}.isdisjoint(parts)


def walk_files(
    source: Path, skipped: Sequence[GitIgnoreSpec] = (), named: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the files and links of a folder, without `skipped` folders and clutter that is not `named`; links are not followed."""

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
            elif not any(spec.match_file(f"{path}/") for spec in skipped):
                entered.append(name)
        folders[:] = entered


def _find_added(
    source: Path, include: Sequence[str], ignored: _IgnoreFile, excluded: GitIgnoreSpec, listed: set[str]
) -> set[str]:
    """Return the files that patterns of `include` and patterns with `!` match, also in caches that a pattern names.

    Only `include` adds files of `.git`: it may hold tokens, and `.accelignore` may come with the folder of somebody else.
    """
    if not include and not ignored.negations:
        return set()
    named = frozenset(part for text in include for part in text.split("/"))
    named |= {part for text in ignored.negations for part in text.split("/") if _is_below(part)}
    everything = {*walk_files(source, [excluded], named), *listed}
    added = {
        name for name in everything if _is_below(name) and ignored.spec.check_file(name).include is False
    }
    for text in include:
        matches = set(_parse_patterns("launcher.include", [text]).match_files(everything))
        if not matches:
            raise UsageError(
                f"launcher.include {text!r} matches no file in {source}. Links are not followed; correct or remove the "
                "pattern."
            )
        added |= matches
    return added


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
