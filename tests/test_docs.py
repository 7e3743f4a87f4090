"""The docs are true: blocks are run, loaded or applied, and the reference is complete.

`make test` checks all commands without running them, and runs the pages without commands and two more; `make test-slow`
runs the first pages of a new user, and `make test-full` all pages.
"""

from __future__ import annotations

import difflib
import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sources.docs_reader import (
    ALL,
    COMMANDS,
    DIFFS,
    DOCS,
    ELSEWHERE,
    MIGRATIONS,
    OF_ANOTHER_DISTRIBUTION,
    OUTSIDE,
    PAGES,
    ROOT,
    Block,
    Reader,
    blocks,
    check_command,
    check_python,
    commands,
    load_profile,
    name,
    sides,
)
from torch.distributed.run import get_args_parser

import accel_runtime.utils
from accel_cli.errors import AccelError
from accel_cli.extensions.migrate.conversion import migrate_script
from accel_cli.extensions.migrate.shell import migrate_shell
from accel_cli.main import accel
from accel_cli.profile.schema import known_keys
from accel_runtime.environment import settings as env
from accel_runtime.environment.accelerate import launch
from accel_runtime.environment.accelerate.missing_names import MISSING_NAMES
from accel_runtime.environment.settings import Settings
from benchmarks.summary import summarize

CONSOLES = [block for block in ALL if block.language == "console"]
FAST = {"docs/launching.md", "docs/slurm.md"}
"""Pages with commands that `make test` runs: of launches, and of commands that start no script."""
FIRST = {"README.md", "docs/install.md"}
"""Pages that a new user reads first, which `make test-slow` runs; `make test-full` runs the others too.

The landing page has the commands of the README.
"""


def marks(page: Path) -> list[pytest.MarkDecorator]:
    """Return `slow` or `full` for a page with commands that `make test` does not run."""
    has_commands = any(block.language == "console" for block in blocks(page))
    if not has_commands or name(page) in FAST:
        return []
    return [pytest.mark.slow if name(page) in FIRST else pytest.mark.full]


# The blocks ----------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """A reader in a folder of its own, whose scripts leave no process group to those of the next page."""
    reader = Reader(tmp_path)
    monkeypatch.chdir(reader.folder)
    yield reader
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name(page), marks=marks(page)) for page in PAGES if blocks(page)],
)
def test_what_a_page_shows_is_what_happens(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        follow = reader.file if block.title else getattr(reader, block.language)
        follow(block)


def test_every_option_key_and_example_of_a_command_exists() -> None:
    wrong = []
    for block in CONSOLES:
        for command in commands(block):
            other = ELSEWHERE.get(command.text)
            if other and other.covered == OF_ANOTHER_DISTRIBUTION:
                continue
            try:
                check_command(command)
            except Exception as error:  # noqa: BLE001 - all mistakes are listed
                wrong.append(f"{block}: {command.text}: {error or type(error).__name__}")
    assert not wrong


def test_every_script_compiles_and_what_it_takes_of_accel_exists() -> None:
    scripts = [block for block in ALL if block.language == "python"]
    scripts += [
        Block(block.page, block.line, "python", "", side) for block in DIFFS for side in sides(block.text)
    ]
    for block in MIGRATIONS:
        before, after = sides(block.text)
        if block.title.endswith(".py"):
            # The packages that the script imported before need not be installed.
            compile(before, str(block), "exec")
            scripts.append(Block(block.page, block.line, "python", "", after))
    wrong = []
    for script in scripts:
        try:
            check_python(script)
        except Exception as error:  # noqa: BLE001 - all mistakes are listed
            wrong.append(f"{script}: {error or type(error).__name__}")
    assert len(scripts) > 30
    assert not wrong


def test_every_profile_loads(tmp_path: Path) -> None:
    # A file with a title is imported, or refused, by a command below it.
    profiles = [block for block in ALL if block.language == "yaml" and not block.title]
    assert profiles
    wrong = []
    for block in profiles:
        try:
            load_profile(block, tmp_path)
        except AccelError as error:
            wrong.append(f"{block}: {error}")
    assert not wrong


def test_every_fence_is_of_a_block() -> None:
    for page in PAGES:
        fences = re.findall(r"^\s*(?:```|~~~)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), name(page)
    assert {block.language for block in ALL} <= {"console", "diff", "json", "python", "toml", "yaml"}


def test_a_console_block_begins_with_a_command() -> None:
    assert not [str(block) for block in CONSOLES if not block.text.startswith("$ ")]


def test_a_file_that_a_page_shows_is_used_by_a_command_below() -> None:
    titled = [block for block in ALL if block.title]
    assert titled
    for block in titled:
        below = [other for other in CONSOLES if other.page == block.page and other.line > block.line]
        assert any(block.title in command.text for other in below for command in commands(other)), str(block)


def test_a_command_that_cannot_run_here_is_on_a_page() -> None:
    assert not set(ELSEWHERE) - COMMANDS
    assert not {other.covered for other in ELSEWHERE.values() if not (ROOT / other.covered).is_file()}


def test_the_five_lines_are_five_and_the_same_everywhere() -> None:
    assert len({block.text for block in DIFFS}) == 1
    assert len(DIFFS) == 2
    added = [line for line in DIFFS[0].text.splitlines() if line.startswith("+")]
    assert len(added) == 5


def test_the_last_lines_of_make_demo_name_pages_about_their_subjects() -> None:
    demo = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo:")[2].partition("\n\n")[0]
    pages = dict(re.findall(r"'(\S+\.md)' '([^']+)'", demo))
    subjects = {"five lines", "profile"}
    assert len(pages) == len(subjects)
    for page, description in pages.items():
        (subject,) = (subject for subject in subjects if subject in description)
        assert re.search(
            rf"^#.*{subject}", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.IGNORECASE
        )


def test_every_option_of_torchrun_is_on_its_page() -> None:
    text = (DOCS / "from-torchrun.md").read_text(encoding="utf-8")
    options = [action.option_strings for action in get_args_parser()._actions]
    dashed = {next(one for one in spellings if one.startswith("--")) for spellings in options if spellings}
    assert not {option for option in dashed - {"--help"} if not re.search(rf"{option}\b", text)}


def test_accel_is_compared_with_others_on_one_page() -> None:
    header = "| | accel | Accelerate | Fabric | torchrun |"
    assert [name(page) for page in PAGES if header in page.read_text(encoding="utf-8")] == [
        "docs/when-not.md"
    ]


def test_the_summary_of_the_benchmarks_has_the_numbers_of_their_pages() -> None:
    pages = "".join((DOCS / f"benchmarks{part}.md").read_text(encoding="utf-8") for part in ("", "-gpu"))
    table, sentence = (part for part in summarize().split("\n\n")[1:])
    cells = re.findall(r"[\d.]+(?= (?:µs|ms|MiB))", table)
    assert len(cells) > 15
    for number in [*cells, *re.findall(r"\d\.\d{3}|\d+(?:\.\d+)?(?= µs)", sentence)]:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", pages), number


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/when-not.md"])
def test_times_of_a_first_page_are_in_the_summary_of_the_benchmarks(page: str) -> None:
    times = re.findall(r"[\d.]+ µs", (ROOT / page).read_text(encoding="utf-8"))
    assert set(times) <= set(re.findall(r"[\d.]+ µs", summarize()))


def test_every_message_of_accel_under_troubleshooting_is_in_the_sources() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    section = text.partition("## Messages of accel")[2].partition("\n## ")[0]
    messages = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^### (.+)$", section, re.MULTILINE)))
    assert len(messages) > 5
    files = [file for package in ("accel_cli", "accel_runtime") for file in (ROOT / package).rglob("*.py")]
    sources = "".join(file.read_text(encoding="utf-8") for file in files)
    for message in messages:
        assert all(part.strip() in sources for part in message.split("...")), message


# The migrations ------------------------------------------------------------------------


@pytest.mark.parametrize("block", [pytest.param(block, id=block.title) for block in MIGRATIONS])
def test_a_migration_is_that_of_accel_migrate(block: Block) -> None:
    before, _ = sides(block.text)
    is_shell = block.title.endswith(".sh")
    after = migrate_shell(before)[0] if is_shell else migrate_script(before).text
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=len(before), lineterm="")
    change = "".join(f"{line}\n" for line in [*lines][3:])
    if os.environ.get("WRITE_GOLDEN"):
        page = block.page.read_text(encoding="utf-8")
        block.page.write_text(page.replace(block.text, change), encoding="utf-8")
    elif change != block.text:
        pytest.fail(
            f"If the change is intended, run this test with WRITE_GOLDEN=1 to rewrite {block}.\n{change}"
        )


@pytest.mark.full
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=block.title) for block in MIGRATIONS if block.title.endswith(".py")],
)
def test_a_script_trains_the_same_weights_after_its_migration(block: Block, tmp_path: Path) -> None:
    before, after = (text.replace("shuffle=True", "shuffle=False") for text in sides(block.text))
    # The package of Fabric alone has another name.
    before = before.replace("lightning.fabric", "lightning_fabric")
    package = re.search(r"^from (lightning_fabric|accelerate)\b", before, re.MULTILINE)
    if package:
        pytest.importorskip(package[1])
    is_raw = not package and "torch.distributed" not in before
    weights = []
    for side, script in (("before", before), ("after", after)):
        folder = tmp_path / side
        folder.mkdir()
        (folder / block.title).write_text(script, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}
        if is_raw:
            command = [sys.executable]
        # A bare script over gloo may be aborted by torch's threads while it exits, after it has saved.
        subprocess.run([*command, block.title], cwd=folder, env=environ, check=side == "after")
        saved = next(folder.glob("model.*"))
        state = torch.load(saved, weights_only=True)
        weights.append(state.get("model", state))
    assert list(weights[0]) == list(weights[1])
    for parameter, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][parameter], tensor)


# Around the blocks ---------------------------------------------------------------------


def test_links_outside_the_site_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#([^)]+))?\)")
    for page in OUTSIDE:
        for target, anchor in link.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), (name(page), target)
            if anchor:
                text = (page.parent / target).read_text(encoding="utf-8")
                titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
                anchors = {re.sub(r"[^\w]+", "-", title.lower()).strip("-") for title in titles}
                assert anchor in anchors, (name(page), target)


def test_a_file_that_a_page_names_is_there() -> None:
    folders = r"`((?:accel_cli|accel_runtime|examples|benchmarks|configs|tests|docs)/[\w./-]*)`"
    for page in PAGES:
        for named in re.findall(folders, page.read_text(encoding="utf-8")):
            assert (ROOT / named).exists(), (name(page), named)


def test_every_example_is_listed() -> None:
    listed = re.findall(
        r"^\| `(\w+\.(?:py|ipynb))` \|", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(
        path.name for path in (ROOT / "examples").iterdir() if path.suffix in {".py", ".ipynb"}
    )


def test_no_page_knows_where_it_was_written() -> None:
    for file in [*PAGES, *DOCS.rglob("*.svg")]:
        assert str(ROOT) not in file.read_text(encoding="utf-8"), file


DRAWN = {DOCS / "img" / "elastic.svg", DOCS / "img" / "layouts.svg"}
"""Pictures that are no screens."""


@pytest.mark.full
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
    # Durations have other units on a slow machine, and numbers other digits after the point.
    words = re.sub(r"\d[\d.]*\s(ms|s|min|h)\b(\s\d+\s(s|min)\b)?|\d+\.\d+", "", words)
    # Numbers of other lengths break lines elsewhere.
    return re.sub(r"\s|\d|[─│]|(?<=on)\w+(?=\(pid)", "", re.sub(r"on\s\S+\s\(pid", "on (pid", words))


# The site ------------------------------------------------------------------------------


def page(site: Path, where: str) -> str:
    """The words of a page, without its markup."""
    text = (site / where / "index.html").read_text(encoding="utf-8")
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for below, inner in getattr(command, "commands", {}).items():
        yield from walk(f"{path} {below}", inner)


@pytest.mark.slow
def test_the_reference_has_every_command_and_option(site: Path) -> None:
    text = page(site, "reference/cli")
    found = list(walk("accel", accel))
    assert len(found) > 10
    for path, command in found:
        # From this command's heading to the next one's.
        section = re.split(rf"^{path}¶", text, flags=re.MULTILINE)[1].split("¶")[0]
        assert " ".join(command.help.split()) in " ".join(section.split())
        command.make_context(path, [], resilient_parsing=True)  # launchers add their options
        for parameter in command.params:
            spelled = parameter.opts if parameter.opts[0].startswith("-") else [parameter.metavar]
            assert all(spelling in section for spelling in spelled), (path, spelled)


@pytest.mark.slow
def test_the_reference_has_every_key_and_variable(site: Path) -> None:
    text = page(site, "reference/profile")
    for key, description in known_keys().items():
        assert key in text
        assert key == "launcher.kind" or description.replace("`", "") in text, key
    text = page(site, "reference/variables")
    constants = [
        value for value in vars(env).values() if isinstance(value, str) and value.startswith(env.PREFIX)
    ]
    others = [value for value in constants if not value.endswith("_")]  # beginnings of names
    for variable in [*Settings().to_env(), *others, "USE_FP16"]:
        assert variable in text, variable


def test_the_reference_has_the_messages_of_accel_migrate() -> None:
    from docs.hooks import findings_page

    messages = re.findall(r"^- (.+)$", findings_page(), re.MULTILINE)
    shown = [
        line.removeprefix("+").strip().removeprefix("# accel migrate: ").rstrip(" .")
        for block in CONSOLES
        for line in block.text.splitlines()
        if "# accel migrate: " in line
    ]
    assert shown
    assert all(any(message.startswith(text) for message in messages) for text in shown)
    assert not [message for message in messages if not re.search(r"[a-z]{3}", message)]


def test_the_reference_has_every_name_of_accelerate_that_accel_lacks() -> None:
    from docs.hooks import accelerate_page

    text = accelerate_page()
    assert not [name for entry in MISSING_NAMES for name in entry.names if f"`{name}`" not in text]
    assert not [
        option
        for option, _ in launch.list_options()
        if f"`--{option}`" not in text and f"`{option}`" not in text
    ]


@pytest.mark.slow
def test_the_reference_has_every_error_of_the_public_names(site: Path) -> None:
    text = page(site, "reference/errors")
    public = [word for word in accel_runtime.__all__ if word.endswith("Error")]
    assert public
    for error in [*public, "LaunchError", "SettingsError", "TopologyError", "UsageError", "ProfileError"]:
        assert error in text, error


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (site / "api").glob("*/index.html"))
    beside = ["Accelerator.gather_for_metrics", "MismatchError", "PreparedLoader", "BatchSharding"]
    for public in [*accel_runtime.__all__, *accel_runtime.utils.__all__, *beside]:
        assert re.search(rf'id="accel_runtime[.\w]*\.{public}"', text), public


@pytest.mark.slow
def test_the_site_has_no_sources_and_fetches_nothing(site: Path) -> None:
    assert not list(site.rglob("*.py"))
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"https?:", text), file


def test_the_list_for_language_models_has_each_page_with_its_first_sentence() -> None:
    from mkdocs.config import load_config

    from docs.hooks import llms_text

    config = load_config(str(ROOT / "mkdocs.yml"))
    rows = re.findall(r"^- \[(.+)\]\(([\w./-]+)\)(?:: (.+))?$", llms_text(config), re.MULTILINE)
    files = {file: sentence for _, file, sentence in rows}
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - files.keys() <= {"404.md"}
    generated = files.keys() - pages
    assert all(file.startswith("reference/") for file in generated)
    assert all(len(files[page]) > 10 for page in pages & files.keys())
    assert files["slurm.md"].startswith("With `launcher.kind: slurm`")
