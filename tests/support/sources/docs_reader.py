"""The pages of the docs: their fenced blocks, checks of what a block says, and a reader who does what a page says."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import typer
from support.processes.commands import Accel

import accel_runtime
from accel_cli.main import accel
from accel_cli.profile import layers
from accel_cli.profile.schema import known_keys
from accel_runtime.environment.settings import HOME, PROFILE, Settings

__all__ = [
    "ALL",
    "COMMANDS",
    "DIFFS",
    "DOCS",
    "ELSEWHERE",
    "MIGRATIONS",
    "OF_ANOTHER_DISTRIBUTION",
    "OUTSIDE",
    "PAGES",
    "ROOT",
    "Block",
    "Reader",
    "blocks",
    "check_command",
    "check_python",
    "commands",
    "load_profile",
    "name",
    "sides",
]

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
OUTSIDE = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
]
PAGES = [*OUTSIDE, *sorted(DOCS.rglob("*.md"))]


class Elsewhere(NamedTuple):
    """A command that cannot run here."""

    reason: str
    covered: str
    """The file that sees to it."""
    instead: str | None = None
    """What runs in its place, so that the page goes on as it would."""


OF_ANOTHER_DISTRIBUTION = "tests/integration/test_third_party_launcher.py"
"""The test of the page whose options and keys are those of another distribution."""
ELSEWHERE = {
    "git clone REPOSITORY_URL accel && cd accel": Elsewhere("needs a place to clone from", ".ci/run"),
    "make demo": Elsewhere("makes an environment; the example itself runs there", "docs/install.md"),
    "source .venv/bin/activate": Elsewhere("this test's environment is on the PATH", "Makefile"),
    "make test": Elsewhere("runs this test", ".ci/run"),
    "make test-gpu PYTHON=python3": Elsewhere("needs a GPU", "tests/test_gpu.py"),
    "python docs/gpu_page.py build/gpu-report.json": Elsewhere("needs a GPU's report", "tests/test_gpu.py"),
    "make check": Elsewhere("lints the repository", ".ci/run"),
    "git clone PATH_TO_ACCEL accel": Elsewhere("needs a place to clone from", ".ci/run"),
    "python -m pip install git+REPOSITORY_URL": Elsewhere(
        "changes the environment that runs this test", "tests/integration/test_fresh_environment.py"
    ),
    "python -m pip install torch --index-url https://download.pytorch.org/whl/cpu": Elsewhere(
        "needs the index of PyTorch", "constraints.txt"
    ),
    **dict.fromkeys(
        (
            "uv run --no-project --with ACCEL accel launch --nproc-per-node 2 train.py",
            "uv run --no-project --with ACCEL --with-requirements train.py accel launch train.py",
            "uv add ACCEL",
            "uv run accel launch train.py",
        ),
        Elsewhere("makes an environment with torch of a package index", "pyproject.toml"),
    ),
    'python -m pip install -e ".[cloud]"': Elsewhere(
        "changes the environment that runs this test", "pyproject.toml"
    ),
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
            "accel launch --profile cluster --array 0-9 train.py",
            "accel jobs status 4711_1",
            "accel jobs logs 4711 -f",
            "accel top 4711 --profile cluster",
            "srun --nodes=2 --ntasks-per-node=1 accel launch --profile cluster train.py",
        ),
        Elsewhere("needs a Slurm cluster", "tests/extensions/slurm/test_service.py"),
    ),
    **dict.fromkeys(
        (
            "accel launch --hosts node1,node2 train.py --epochs 3",
            "accel launch --hosts node1,node2 --sync train.py",
        ),
        Elsewhere("needs two hosts with sshd", "tests/extensions/ssh/test_ssh.py"),
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
            "aws iam create-role --role-name accel-training --assume-role-policy-document file://trust.json",
            (
                "aws iam put-role-policy --role-name accel-training --policy-name accel-training --policy-document "
                "file://policy.json"
            ),
        ),
        Elsewhere("needs an AWS", "tests/extensions/sagemaker/test_docs.py"),
    ),
    "python -m pip install .": Elsewhere(
        "changes the environment that runs this test", OF_ANOTHER_DISTRIBUTION
    ),
    **dict.fromkeys(
        (
            "accel config set launcher.kind=background launcher.level=5 --project",
            "accel launch --dry-run train.py --epochs 3",
            "accel launch --level 15 train.py --epochs 3",
            "accel launch --detach train.py",
            "accel jobs list",
        ),
        Elsewhere("needs the distribution of its page", OF_ANOTHER_DISTRIBUTION),
    ),
    "accel launch --gpu-ids 0,2 train.py": Elsewhere("needs three GPUs", "tests/cli/launchers/test_gpus.py"),
    'python -m pip install -e ".[kubernetes]"': Elsewhere(
        "changes the environment that runs this test", "pyproject.toml"
    ),
    "accel launch --profile kube train.py --epochs 3": Elsewhere(
        "needs a Kubernetes cluster", "tests/extensions/kubernetes/test_kubernetes.py"
    ),
    'python -m pip install -e ".[ray]"': Elsewhere("changes the environment that runs this test", "Makefile"),
    "accel launch --profile sky train.py --epochs 3": Elsewhere(
        "needs SkyPilot and a cloud", "tests/extensions/skypilot/test_skypilot.py"
    ),
    "accel launch --profile ray train.py --epochs 3": Elsewhere(
        "needs a Ray cluster", "tests/extensions/ray/cluster/test_service.py"
    ),
    'python -m pip install -e ".[tpu]"': Elsewhere("changes the environment that runs this test", "Makefile"),
    "accel xla pod my-pod --zone us-central2-b --run -- train.py --epochs 3": Elsewhere(
        "needs a pod", "tests/extensions/xla/test_tpu_pod.py"
    ),
    **dict.fromkeys(
        (
            "accel launch --profile tpu train.py",
            "PJRT_DEVICE=CPU accel launch --set launcher.kind=xla train.py",
            "PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 accel launch --profile tpu --set launcher.spmd=true train.py",
            "accel test --profile tpu",
        ),
        Elsewhere("needs torch_xla", "tests/extensions/xla/device/test_docs.py"),
    ),
    **dict.fromkeys(
        (
            "accel launch --profile zero train.py",
            "accel launch --cpu --nproc-per-node 2 --set deepspeed.stage=auto --set deepspeed.config_file=ds.json zero.py",
        ),
        Elsewhere("needs deepspeed", "tests/extensions/deepspeed/zero/test_docs.py"),
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
DIFFS = [block for block in ALL if block.language == "diff" and not block.title]
MIGRATIONS = [block for block in ALL if block.language == "diff" and block.title]
"""Changes of a file, whose name is the title; the commands below them run the changed file."""
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
        """Run it here, where warnings are errors; in a process of its own, if it forks others."""
        script = self.folder / "block.py"
        script.write_text(block.text, encoding="utf-8")
        if "debug_launcher(" in block.text:
            command = [sys.executable, "-W", "error", script]
            subprocess.run(command, cwd=self.folder, env=self._environ, check=True)
        else:
            runpy.run_path(str(script), run_name="__main__")

    def yaml(self, block: Block) -> None:
        """Load it as a profile."""
        load_profile(block, self.folder)

    def toml(self, block: Block) -> None:
        """Parse its tables and keys, which a file of simple values shares with INI."""
        configparser.ConfigParser().read_string(block.text)

    def diff(self, block: Block) -> None:
        """Run the script before and after."""
        for script in sides(block.text):
            self.python(Block(block.page, block.line, "python", "", script))

    def file(self, block: Block) -> None:
        """Put it where its title says, for the commands that follow; of a change, the file after it."""
        text = sides(block.text)[1] if block.language == "diff" else block.text
        (self.folder / block.title).write_text(text, encoding="utf-8")

    def _type(self, command: str) -> tuple[int, str]:
        """Run it on a pseudo-terminal, since that is what a reader has; code and output."""
        ours, theirs = os.openpty()
        options = {"cwd": self.folder, "stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs}
        environ, words = _of_accel(command)
        if words:
            process = Accel(*words, env=self._environ | environ, **options)
        else:
            process = subprocess.Popen(["bash", "-c", command], env=self._environ, **options)
        with process:
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


# What a command and a script say, without running them ----------------------------------

_GROUP = accel
_SHELL = re.compile(r"[|&;<>()$`*?~]")
_VARIABLES = {*Settings().to_env(), HOME, PROFILE}


def _of_accel(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables and arguments of an `accel` command that needs no shell; none of another command."""
    if _SHELL.search(command):
        return {}, []
    environ, (program, *words) = _assignments(shlex.split(command))
    return (environ, words) if program == "accel" else ({}, [])


def _assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The `NAME=VALUE` before a command, and the rest of it."""
    number = next((n for n, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    return dict(word.split("=", 1) for word in words[:number]), words[number:]


def check_command(command: Command) -> None:
    """Raise if a command has an option, key, variable or example that does not exist; nothing is run."""
    lexer = shlex.shlex(command.text, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "|"]:
        if not set(word) <= set("|&;<>()"):
            words.append(word)
            continue
        if words:
            _check_words(words, fails=command.code != 0)
        words = []


def _check_words(words: list[str], *, fails: bool) -> None:
    environ, words = _assignments(words)
    if not fails:
        unknown = {name for name in environ if name.startswith("ACCEL_")} - _VARIABLES
        assert not unknown, f"no variable {unknown}"
    for number, word in enumerate(words):
        if word == "accel" and words[0] not in {"cd", "git"}:
            _check_accel(_GROUP, "accel", words[number + 1 :], fails=fails)
        elif word.startswith("examples/"):
            source = (ROOT / word).read_text(encoding="utf-8")
            for option in [one for one in words[number:] if one.startswith("--")]:
                assert f'"{option}"' in source, f"{word} has no option {option}"


def _check_accel(command: Any, name: str, words: list[str], *, fails: bool, parent: Any = None) -> None:
    """Parse as the command would, and each subcommand in turn."""
    try:
        context = command.make_context(name, list(words), parent=parent)
    except typer.Exit:  # --version
        return
    if hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        if rest:
            name, below, rest = command.resolve_command(context, rest)
            _check_accel(below, name, rest, fails=fails, parent=context)
        return
    target = context.params.get("script")
    if target and target.startswith("examples/"):
        _check_words([target, *(context.params["args"] or [])], fails=fails)
    if not fails:
        for assignment in context.params.get("set") or []:
            key = assignment.partition("=")[0]
            assert any(key == known or key.startswith(f"{known}.") for known in known_keys()), f"no key {key}"


def check_python(block: Block) -> None:
    """Compile a script, and raise if it imports from accel, or reads from an accelerator, what does not exist."""
    tree = ast.parse(block.text)
    compile(tree, str(block), "exec")
    imported: dict[str, Any] = {}
    page = block.page.read_text(encoding="utf-8")
    # A page may show several files, which import from each other.
    nodes = [
        node
        for node in ast.walk(tree)
        if not any(
            mark.format(getattr(node, "module", None)) in page for mark in ("\n# {}.py\n", 'title="{}.py"\n')
        )
    ]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                if str(node.module).startswith("accel"):
                    imported[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "accelerator"
        ):
            assert hasattr(accel_runtime.Accelerator, node.attr), f"Accelerator has no {node.attr}"
        # Exceptions of accel have no signature, and take no keywords.
        keywords = (
            [keyword.arg for keyword in node.keywords if keyword.arg] if isinstance(node, ast.Call) else []
        )
        if keywords and isinstance(node.func, ast.Name) and node.func.id in imported:
            inspect.signature(imported[node.func.id]).bind_partial(**dict.fromkeys(keywords))


def load_profile(block: Block, folder: Path) -> None:
    """Load a YAML block as a profile; raise if it has a mistake."""
    path = folder / "profile.yaml"
    path.write_text(block.text, encoding="utf-8")
    layers.resolve([layers.read_file(path, "file")])
