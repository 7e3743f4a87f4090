"""The bundle of a job, one folder: archives of the source and of accel, wheels, `entry.py` and `job.json`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import platformdirs

import accel_cli
from accel_cli import console
from accel_cli.errors import AccelError, UsageError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

__all__ = [
    "SECRETS",
    "SelectedFile",
    "Selection",
    "build_bundle",
    "check_selected",
    "check_size",
    "describe_selection",
    "fetch_wheels",
    "is_clutter",
    "list_requirements",
    "select_accel",
    "select_files",
    "write_archive",
]

SECRETS = (
    ".env", ".env.*", "*.env", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", ".aws", ".azure", ".boto", ".docker", ".gcloud", ".gnupg", ".kube", ".ssh", ".git-credentials",
    ".htpasswd", ".netrc", ".npmrc", ".pgpass", ".pypirc", ".s3cfg", "credentials.json", "kaggle.json",
    "secrets.json", "secrets.toml", "secrets.yaml", "secrets.yml", "service-account*.json", "service_account*.json",
    "token.json", "token.txt", "*.token",
)  # fmt: skip
"""Names of files and folders that are not sent unless a pattern of `include` names them."""
_CLUTTER = frozenset({
    ".DS_Store", ".eggs", ".git", ".hg", ".hypothesis", ".idea", ".ipynb_checkpoints", ".jj", ".mypy_cache", ".nox",
    ".pytest_cache", ".ruff_cache", ".svn", ".tox", ".venv", ".vscode", "__pycache__", "mlruns", "node_modules", "venv",
    "wandb",
})  # fmt: skip
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
_ALL = "all files but caches and environments"
_MB = 10**6
_NUM_SHOWN = 5
_LS_FILES = (
    # Git sets these for its hooks, where they would point to another repository.
    "env", "-uGIT_DIR", "-uGIT_WORK_TREE", "-uGIT_INDEX_FILE", "-uGIT_PREFIX", "-uGIT_COMMON_DIR",
    "git", "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard",
)  # fmt: skip
_PACKAGES = ("accel_cli", "accel_runtime")
_ENTRY = "accel_cli/sagemaker/entry.py"
_PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""Python versions to fetch wheels for, if that of the image is not known."""
_PIP_TIMEOUT_S = 120
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
"""Tags of wheels that run on AWS's images, whose glibc is 2.31 or newer; the first also means older ones."""


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
    """Files that are not sent, since they may hold secrets."""
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


def build_bundle(
    job_spec: Mapping[str, Any],
    source: Selection,
    folder: Path,
    python: str | None,
    architecture: str = "x86_64",
) -> str:
    """Write the bundle of a job, and return the reason if wheels are missing, else an empty string.

    Args:
        job_spec: The content of `job.json`.
        source: The files of the source.
        folder: An empty folder.
        python: The Python version of the container, such as `3.12`; None if it is not known.
        architecture: The container's processors, `x86_64` or `aarch64`.
    """
    accel, requirements = select_accel(), list_requirements()
    write_archive(source, folder / "source.tar.gz")
    write_archive(accel, folder / "accel.tar.gz")
    try:
        shutil.copyfile(accel.source / _ENTRY, folder / "entry.py")
        # Arguments need not be text: JSON escapes lone surrogates and brings them back.
        text = json.dumps({**job_spec, "packages": requirements}, indent=1)
        (folder / "job.json").write_text(text, encoding="ascii")
        return fetch_wheels(folder / "wheels", requirements, python, architecture)
    except OSError as error:
        raise AccelError(f"Cannot write {folder}: {error.strerror or error}.") from None


def select_files(source: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
    """Select the files of a folder: those git does not ignore and those of `include`, without `exclude` and secrets.

    A secret is sent if a pattern of `include` names it.
    """
    source = source.resolve()
    if not source.is_dir():
        raise UsageError(f"Folder not found: {source} (launcher.source_dir).")
    secret, excluded = _parse_patterns("include", SECRETS), _parse_patterns("exclude", exclude)
    allowed = _parse_patterns("include", [text for text in include if secret.match_file(text.lower())])
    names, method, notes = _list_files(source, excluded)
    names |= _find_included(source, include, excluded, names)
    names = {name for name in names if not excluded.match_file(name)}
    secrets = {name for name in names if secret.match_file(name.lower()) and not allowed.match_file(name)}
    if secrets:
        notes.append(
            f"not sent, since they may hold secrets: {_join_names(sorted(secrets))}; add to launcher.include what the job needs"
        )
    files = _stat_files(source, sorted(names - secrets, key=os.fsencode))
    sent = _collect_names(files)
    broken = [file.name for file in files if file.link and _resolve_name(source, file.name) not in sent]
    if broken:
        notes.append(f"links to files that are not sent, so broken in the job: {_join_names(broken)}")
    return Selection(source, tuple(files), method, tuple(sorted(secrets)), tuple(notes))


def check_selected(selection: Selection, path: str | Path) -> None:
    """Raise UsageError if a file or folder that the job needs is not sent; `path` is relative to the source."""
    name = os.path.normpath(path)
    if {name, _resolve_name(selection.source, name)} & _collect_names(selection.files):
        return
    reason = "it is ignored by git, a cache, empty, or matches launcher.exclude"
    if name in selection.secrets:
        reason = "it may hold secrets"
    raise UsageError(
        f"{_format_name(name)} is needed, but not sent: {reason}. Add it to launcher.include, or change launcher.exclude."
    )


def check_size(selection: Selection, limit_mb: int) -> None:
    """Raise UsageError, naming the largest files, if a selection is larger than a limit."""
    if selection.size <= limit_mb * _MB:
        return
    largest = ", ".join(
        f"{_format_name(file.name)} ({console.format_size(file.size)})" for file in selection.largest
    )
    raise UsageError(
        f"The {len(selection.files)} files in {selection.source} have {console.format_size(selection.size)}: "
        f"launcher.max_upload_size is {limit_mb} MB. The largest are {largest}. Add files to launcher.exclude or .gitignore, "
        "pass data as an input channel (launcher.inputs), or raise launcher.max_upload_size."
    )


def describe_selection(selection: Selection) -> Iterator[str]:
    """Yield lines that list which files are sent, and which are not since they may hold secrets."""
    yield (
        f"{len(selection.files)} files of {selection.source}, {console.format_size(selection.size)}: {selection.method}"
    )
    for file in selection.largest:
        yield f"  {console.format_size(file.size):>9}  {_format_name(file.name)}"
    if selection.secrets:
        yield f"not sent, may hold secrets: {_join_names(selection.secrets)}"


def is_clutter(path: Path) -> bool:
    """Return whether a file or folder is a cache, an environment, or a folder that ignores itself."""
    if path.name in _CLUTTER or path.suffix in {".pyc", ".pyo"}:
        return True
    if any(os.path.lexists(path / mark) for mark in _ENVIRONMENT_MARKS):
        return True
    try:  # as downloaded results do
        return (path / ".gitignore").read_bytes().strip() == b"*"
    except OSError:
        return False


def _parse_patterns(key: str, texts: Iterable[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # noqa: PLC0415 - it is a package of the extra

    try:
        return GitIgnoreSpec.from_lines(re.sub(r"^\./", "/", text) for text in texts)
    except (ValueError, re.error) as error:
        raise UsageError(f"Invalid pattern in launcher.{key}: {error}.") from None


def _list_files(source: Path, excluded: GitIgnoreSpec) -> tuple[set[str], str, list[str]]:
    """Return the names of files as git lists them, else of all but clutter; how they were listed; and notes."""
    notes: list[str] = []
    if any(os.path.lexists(folder / ".git") for folder in (source, *source.parents)):
        try:
            names = _list_with_git(source, "", notes)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").splitlines() or [f"exit code {error.returncode}"]
            notes = [f"git cannot list the files of {source}: {lines[0]}; {_ALL} are sent"]
        else:
            if names:
                return names, "tracked by git, or new and not ignored", notes
            notes = [f"git lists no file of {source}, and may ignore the folder; {_ALL} are sent"]
    return set(_walk(source, excluded)), f"{_ALL}, since git does not list them", notes


def _list_with_git(source: Path, subfolder: str, notes: list[str]) -> set[str]:
    """Return the files that git lists in a folder and in the repositories below it, without clutter that is new."""
    result = subprocess.run(
        _LS_FILES, cwd=source / subfolder, stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    names: set[str] = set()
    new: set[str] = set()
    for entry in filter(None, result.stdout.split(b"\0")):
        tag, name = entry[:1], str(PurePosixPath(subfolder, os.fsdecode(entry[2:])))
        path = source / name
        if path.is_symlink() or not path.is_dir():
            (new if tag == b"?" else names).add(name)
        elif os.path.lexists(path / ".git"):
            names |= _list_with_git(source, name, notes)
        else:
            notes.append(
                f"submodule {name} is not checked out, and not sent; run git submodule update --init"
            )
    parts = {part for name in new for part in (*_list_parents(name), name)}
    clutter = {part for part in parts if is_clutter(source / part)}
    return names | {name for name in new if clutter.isdisjoint((*_list_parents(name), name))}


def _walk(source: Path, excluded: GitIgnoreSpec, named: frozenset[str] = frozenset()) -> Iterator[str]:
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
            elif not excluded.match_file(f"{path}/"):
                entered.append(name)
        folders[:] = entered


def _find_included(
    source: Path, include: Sequence[str], excluded: GitIgnoreSpec, listed: set[str]
) -> set[str]:
    """Return the files that the patterns of `include` match, also in caches that a pattern names."""
    if not include:
        return set()
    named = frozenset(part for text in include for part in text.split("/"))
    everything = {*_walk(source, excluded, named), *listed}
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


def _stat_files(source: Path, names: Sequence[str]) -> list[SelectedFile]:
    """Return those of the names that exist and are files or links; refuse links that leave the source."""
    links = {name for name in names if os.path.islink(source / name)}  # noqa: PTH114 - no error for a closed folder
    files, broken = [], []
    for name in names:
        path = source / name
        if name in links:
            if (target := _resolve_name(source, name)) and path.exists():
                # Relative, so that it is the same wherever the source is.
                files.append(SelectedFile(name, link=os.path.relpath(source / target, path.parent)))
            else:
                broken.append(f"{_format_name(name)} -> {_format_name(str(path.readlink()))}")
            continue
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue  # git still lists a deleted file
        except OSError as error:
            raise UsageError(
                f"Cannot read {_format_name(str(path))}: {error.strerror}. Make it readable, or add it to launcher.exclude."
            ) from None
        # Git also still lists the files of a folder that became a link.
        if stat.S_ISREG(status.st_mode) and links.isdisjoint(_list_parents(name)):
            files.append(SelectedFile(name, status.st_size))
    if broken:
        raise UsageError(
            f"{len(broken)} link(s) in {source} leave it or are broken, and would be broken in the job: "
            f"{', '.join(broken[:_NUM_SHOWN])}. Add them to launcher.exclude, and pass large data as an input channel "
            "(launcher.inputs)."
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
    return ", ".join(map(_format_name, names[:_NUM_SHOWN])) + more


def _format_name(name: str) -> str:
    """Return a name with characters that cannot be printed escaped."""
    return name if name.isprintable() else ascii(name)


def list_requirements() -> list[str]:
    """Return the packages that accel needs besides torch and numpy, which an image has, as pip spells them."""
    texts = requires("accel-runtime") or []
    return [text for text in texts if "extra ==" not in text and not re.match(r"(torch|numpy)\b", text)]


def select_accel() -> Selection:
    """Return the files of the installation of accel that is running."""
    root = Path(str(accel_cli.__file__)).resolve().parent.parent
    for part in (*_PACKAGES, _ENTRY):
        if not (root / part).exists():
            raise AccelError(f"File not found: {root / part}. Install accel again.")
    nothing = _parse_patterns("exclude", ())
    names = sorted(f"{package}/{name}" for package in _PACKAGES for name in _walk(root / package, nothing))
    # Editors keep hidden files and broken links in the packages of an editable installation.
    names = [name for name in names if "/." not in name and (root / name).is_file()]
    return Selection(root, tuple(SelectedFile(name, (root / name).stat().st_size) for name in names))


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
                    # The size is that of the bytes that were read, also if the file grows meanwhile.
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
        raise UsageError(f"Cannot read {_format_name(str(path))}: {error.strerror}.") from None


def fetch_wheels(
    folder: Path,
    requirements: Sequence[str],
    python: str | None,
    architecture: str = "x86_64",
    *,
    cache: Path | None = None,
) -> str:
    """Put wheels of packages, and of those that they need, into a folder: from the user's cache, else by pip.

    Args:
        folder: The folder; it is created if there are wheels.
        requirements: The packages, as pip spells them.
        python: The Python version of the container, such as `3.12`; None fetches wheels for every version.
        architecture: The container's processors, `x86_64` or `aarch64`.
        cache: The folder of the cache; None takes that of the user.

    Returns:
        The reason if there are none, else an empty string. The container's own pip is then the fallback.
    """
    base = cache or platformdirs.user_cache_path("accel") / "wheels"
    pythons, reasons = [python] if python else _PYTHONS, []
    for number, each in enumerate(pythons, 1):
        key = hashlib.sha256("\n".join([*requirements, each, architecture]).encode()).hexdigest()[:16]
        if not (base / key).is_dir():
            count = f", {number} of {len(pythons)} since that of the image is not known" if not python else ""
            console.note(f"downloading the packages of accel for Python {each} (about 8 MB, once{count})")
        reasons.append(_copy_or_download(folder, base / key, requirements, each, architecture))
    return reasons[-1] if all(reasons) else ""


def _copy_or_download(
    folder: Path, cached: Path, requirements: Sequence[str], python: str, architecture: str
) -> str:
    """Fetch the wheels for one Python version, and return the reason if that failed."""
    with suppress(OSError):  # a cache that cannot be read counts as empty
        shutil.copytree(cached, folder, dirs_exist_ok=True)
        return ""
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
    parent = cached.parent if cached.parent.is_dir() and os.access(cached.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix=".new-") as scratch:
        wheels = Path(scratch, "wheels")
        if reason := _download_wheels(wheels, requirements, python, architecture):
            return reason
        shutil.copytree(wheels, folder, dirs_exist_ok=True)
        with suppress(OSError):  # another launch was faster, or the cache cannot be written
            wheels.replace(cached)
    return ""


def _download_wheels(folder: Path, requirements: Sequence[str], python: str, architecture: str) -> str:
    """Run `pip download` with the user's own pip configuration, and return the reason if it failed."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_{architecture}")]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--retries", "1",
        "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms,
        "--dest", str(folder), *requirements,
    ]  # fmt: skip
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"pip took longer than {_PIP_TIMEOUT_S} s"
    except OSError as error:
        return f"pip cannot be run: {error.strerror}"
    if result.returncode == 0:
        return ""
    # The last line only: lines before it may show addresses of private indexes, with logins.
    lines = result.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {result.returncode}"]
    return console.mask_secrets("", lines[-1].removeprefix("ERROR: "))
