"""The docs are true: every fenced block is run, loaded or applied, and the site builds without a warning."""

from __future__ import annotations

import html
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import typer.main

import accel_runtime.utils
from accel_cli.main import app
from accel_cli.profile import layers
from accel_cli.profile.schema import known_keys
from accel_runtime.env import HOME, PROFILE, Settings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OUTSIDE = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
]
PAGES = [*OUTSIDE, *sorted(DOCS.rglob("*.md"))]
SLOW = {
    "README.md",
    *(
        f"docs/{page}.md"
        for page in (
            "checkpoint-commands",
            "evaluation",
            "first-launch",
            "functions",
            "index",
            "install",
            "profile",
            "sagemaker",
            "sharding",
            "tracking",
            "when-it-fails",
        )
    ),
}


class Elsewhere(NamedTuple):
    """A command that cannot run here."""

    reason: str
    covered: str
    """The file that sees to it."""
    instead: str | None = None
    """What runs in its place, so that the page goes on as it would."""


ELSEWHERE = {
    "make demo": Elsewhere("makes an environment; the example itself runs there", "docs/first-launch.md"),
    "make test": Elsewhere("runs this test", ".ci/run"),
    "make check": Elsewhere("lints the repository", ".ci/run"),
    "git clone PATH_TO_ACCEL accel": Elsewhere("needs a place to clone from", ".ci/run"),
    "python -m pip install -e .": Elsewhere("changes the environment that runs this test", "Makefile"),
    "accel config": Elsewhere(
        "asks questions on a terminal",
        "tests/integration/test_wizard.py",
        "accel config set launcher.kind=torchrun launcher.nproc_per_node=2",
    ),
    "accel launch --profile pair train.py": Elsewhere(
        "waits for a second machine", "tests/integration/test_launch.py"
    ),
    **dict.fromkeys(
        (
            "accel launch --profile cluster train.py --epochs 3",
            "accel launch --profile cluster --detach train.py",
            "accel jobs logs 4711 -f",
            "accel launch --profile cluster --nnodes 500 train.py",
            "srun --nodes=2 --ntasks-per-node=1 accel launch --profile cluster train.py",
        ),
        Elsewhere("needs a Slurm cluster", "tests/integration/test_slurm.py"),
    ),
    'python -m pip install -e ".[sagemaker]"': Elsewhere(
        "changes the environment that runs this test", "pyproject.toml"
    ),
    **dict.fromkeys(
        (
            "accel launch --profile aws --dry-run train.py --epochs 3",
            "accel launch --profile aws --job-name first-try train.py --epochs 3",
            "accel jobs status first-try --profile aws",
            "accel jobs logs first-try --profile aws",
            "accel jobs download first-try --profile aws -o models",
            "accel test --profile aws",
        ),
        Elsewhere("needs an AWS", "tests/integration/test_sagemaker_docs.py"),
    ),
    'python -m pip install -e ".[tpu]"': Elsewhere("changes the environment that runs this test", "Makefile"),
    "accel launch --tpu-pod my-pod --zone us-central2-b --run-pod train.py --epochs 3": Elsewhere(
        "needs a pod", "tests/cli/test_pods.py"
    ),
    **dict.fromkeys(
        (
            "accel launch --profile tpu train.py",
            "PJRT_DEVICE=CPU accel launch --set launcher.kind=xla train.py",
            "PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 accel launch --profile tpu --set launcher.spmd=true train.py",
            "accel test --profile tpu",
        ),
        Elsewhere("needs torch_xla", "tests/xla/test_docs.py"),
    ),
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line that begins with `$ `, and what the page shows below it."""

    text: str
    code: int
    shown: tuple[str, ...]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fence = re.compile(r'^```(\w*)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2] or "", found[3])
        for found in fence.finditer(text)
    ]


def commands(block: Block) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        first, *shown = part.splitlines()
        text, _, code = first.partition("  # exit ")
        yield Command(text, int(code or 0), tuple(line for line in shown if line.strip()))


def sides(diff: str) -> tuple[str, str]:
    """The script before and after."""
    # An editor may have taken the space off an empty line.
    lines = [line or " " for line in diff.splitlines()]
    before = [line[1:] for line in lines if line[0] in " -"]
    after = [line[1:] for line in lines if line[0] in " +"]
    return "\n".join(before) + "\n", "\n".join(after) + "\n"


ALL = [block for page in PAGES for block in blocks(page)]
DIFFS = [block for block in ALL if block.language == "diff"]
COMMANDS = {command.text for block in ALL if block.language == "console" for command in commands(block)}


class Reader:
    """Somebody who does what a page says, from the top to the bottom."""

    def __init__(
        self,
        folder: Path,
        elsewhere: Mapping[str, Elsewhere] = MappingProxyType(ELSEWHERE),
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._elsewhere = elsewhere
        self.folder = folder / "work"
        # The search for a project file ends at a repository's root.
        (self.folder / ".git").mkdir(parents=True)
        shutil.copytree(
            ROOT / "examples", self.folder / "examples", ignore=shutil.ignore_patterns("__pycache__")
        )
        (self.folder / "train.py").write_text(sides(DIFFS[0].text)[1], encoding="utf-8")
        self._environ = {
            **os.environ,
            HOME: str(folder / "home"),
            "COLUMNS": "200",
            "CUDA_VISIBLE_DEVICES": "",
            "HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TERM": "xterm",
            **environ,
        }

    def console(self, block: Block) -> None:
        """Type the commands, and compare with what the page shows."""
        for command in commands(block):
            text = command.text
            if text in self._elsewhere:
                text = self._elsewhere[text].instead or "true"
            code, output = self._type(text)
            said = f"{block}: $ {text}\n{output}"
            assert code == command.code, said
            if text == command.text:
                self._compare(command.shown, output.splitlines(), said)

    def python(self, block: Block) -> None:
        """Run it here, where warnings are errors."""
        script = self.folder / "block.py"
        script.write_text(block.text, encoding="utf-8")
        runpy.run_path(str(script), run_name="__main__")

    def yaml(self, block: Block) -> None:
        """Load it as a profile."""
        profile = self.folder / "profile.yaml"
        profile.write_text(block.text, encoding="utf-8")
        layers.resolve([layers.file(profile, "file")])

    def diff(self, block: Block) -> None:
        """Run the script before and after."""
        for script in sides(block.text):
            self.python(Block(block.page, block.line, "python", "", script))

    def file(self, block: Block) -> None:
        """Put it where its title says, for the commands that follow."""
        (self.folder / block.title).write_text(block.text, encoding="utf-8")

    def _type(self, command: str) -> tuple[int, str]:
        """Run it on a pseudo-terminal, since that is what a reader has; code and output."""
        ours, theirs = os.openpty()
        with subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, env=self._environ, stdin=subprocess.DEVNULL,
            stdout=theirs, stderr=theirs,
        ) as process:  # fmt: skip
            os.close(theirs)
            output = b"".join(_chunks(ours))
        os.close(ours)
        return process.returncode, re.sub(r"\x1b\[[0-9;]*m", "", output.decode())

    @staticmethod
    def _compare(shown: tuple[str, ...], output: list[str], said: str) -> None:
        """Every line shown is there, in this order; `...` stands for anything."""
        rest = iter(" ".join(line.split()) for line in output)
        for line in shown:
            wanted = re.compile(".*".join(re.escape(" ".join(part.split())) for part in _around_dots(line)))
            assert any(wanted.fullmatch(found) for found in rest), f"{line!r} is not (or not here) in\n{said}"


def _around_dots(line: str) -> list[str]:
    # A space beside the dots is part of what they stand for.
    return re.split(r"\s*\.\.\.\s*", line)


def _chunks(terminal: int) -> Iterator[bytes]:
    """What comes from a pseudo-terminal until its other side is closed."""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux's way to say that nobody is there any more
            return
        if not chunk:
            return
        yield chunk


# The blocks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.slow] if name(page) in SLOW else [])
        for page in PAGES
        if blocks(page)
    ],
)
def test_what_a_page_shows_is_what_happens(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(tmp_path)
    monkeypatch.chdir(reader.folder)
    for block in blocks(page):
        follow = reader.file if block.title else getattr(reader, block.language)
        follow(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_block_escapes(page: Path) -> None:
    fences = re.findall(r"^\s*(?:```|~~~)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page))
    assert {block.language for block in blocks(page)} <= {"console", "diff", "python", "yaml"}


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "console"], ids=str)
def test_a_console_block_begins_with_a_command(block: Block) -> None:
    assert block.text.startswith("$ ")


@pytest.mark.parametrize("block", [block for block in ALL if block.title], ids=str)
def test_a_file_that_a_page_shows_is_used_by_a_command_below(block: Block) -> None:
    below = [other for other in blocks(block.page) if other.line > block.line and other.language == "console"]
    assert any(block.title in command.text for other in below for command in commands(other))


@pytest.mark.parametrize("command", ELSEWHERE)
def test_a_command_that_cannot_run_here_is_on_a_page(command: str) -> None:
    assert command in COMMANDS
    assert (ROOT / ELSEWHERE[command].covered).is_file()


def test_the_five_lines_are_five_and_the_same_everywhere() -> None:
    assert len({block.text for block in DIFFS}) == 1
    assert len(DIFFS) == 2
    added = [line for line in DIFFS[0].text.splitlines() if line.startswith("+")]
    assert len(added) == 5


# Around the blocks ---------------------------------------------------------------------


@pytest.mark.parametrize("page", OUTSIDE, ids=name)
def test_links_outside_the_site_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#\s]+)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")
    ):
        assert (page.parent / target).is_file(), target
        if anchor:
            titles = re.findall(
                r"^#+ (.+)$", (page.parent / target).read_text(encoding="utf-8"), re.MULTILINE
            )
            assert anchor in {re.sub(r"[^\w]+", "-", title.lower()).strip("-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_file_that_a_page_names_is_there(page: Path) -> None:
    rooms = r"`((?:accel_cli|accel_runtime|examples|benchmarks|configs|tests|docs)/[\w./-]*)`"
    for named in re.findall(rooms, page.read_text(encoding="utf-8")):
        assert (ROOT / named).exists(), named


def test_every_example_is_listed() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_no_page_knows_where_it_was_written() -> None:
    for file in [*PAGES, *DOCS.rglob("*.svg")]:
        assert str(ROOT) not in file.read_text(encoding="utf-8"), file


DRAWN = {DOCS / "img" / "layouts.svg"}
"""Pictures that are no screens."""


def test_the_pictures_are_what_the_screen_shows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "screenshots.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for picture in set((DOCS / "img").glob("*.svg")) - DRAWN:
        new = tmp_path / picture.name
        assert written(new) == written(picture), "run: python docs/screenshots.py"
        assert "https:" not in new.read_text(encoding="utf-8"), "a picture fetches nothing"


def written(picture: Path) -> str:
    """The words of a picture, without what says which machine drew it, and when."""
    lines: dict[float, str] = {}
    text = re.compile(r'<text [^>]*\by="([\d.]+)"[^>]*>(.*?)</text>')
    for height, part in text.findall(picture.read_text(encoding="utf-8")):
        lines[float(height)] = lines.get(float(height), "") + html.unescape(part)
    words = "".join(line for line in lines.values() if not line.startswith("This\N{NO-BREAK SPACE}machine"))
    # Numbers of other lengths break lines elsewhere.
    return re.sub(r"\s|\d|[─│]|(?<=on)\w+(?=\(pid)", "", re.sub(r"on\s\S+\s\(pid", "on (pid", words))


# The site ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make check` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def page(site: Path, where: str) -> str:
    """The words of a page, without its markup."""
    text = (site / where / "index.html").read_text(encoding="utf-8")
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for below, inner in getattr(command, "commands", {}).items():
        yield from walk(f"{path} {below}", inner)


def test_the_reference_has_every_command_and_option(site: Path) -> None:
    text = page(site, "reference/cli")
    found = list(walk("accel", typer.main.get_command(app)))
    assert len(found) > 10
    for path, command in found:
        # From this command's heading to the next one's.
        section = re.split(rf"^{path}¶", text, flags=re.MULTILINE)[1].split("¶")[0]
        assert " ".join(command.help.split()) in " ".join(section.split())
        for parameter in command.params:
            spelled = parameter.opts if parameter.opts[0].startswith("-") else [parameter.metavar]
            assert all(spelling in section for spelling in spelled), (path, spelled)


def test_the_reference_has_every_key_and_variable(site: Path) -> None:
    text = page(site, "reference/profile")
    for key, description in known_keys().items():
        assert key in text
        assert key == "launcher.kind" or description.replace("`", "") in text, key
    for variable in [*Settings().to_env(), HOME, PROFILE, "USE_FP16"]:
        assert variable in text


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "python-api" / "index.html").read_text(encoding="utf-8")
    beside = ["Accelerator.gather_for_metrics", "MismatchError", "PreparedLoader", "Sharding"]
    for public in [*accel_runtime.__all__, *accel_runtime.utils.__all__, *beside]:
        assert re.search(rf'id="accel_runtime[.\w]*\.{public}"', text), public


def test_the_site_has_no_sources_and_fetches_nothing(site: Path) -> None:
    assert not list(site.rglob("*.py"))
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"https?:", text), file
