"""The pictures of the docs: the real `accel` in a pseudo-terminal, drawn as docs/img/*.svg.

python docs/screenshots.py [FOLDER]
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pexpect
import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from accel_runtime.environment.settings import HOME, NODE_NAME, PREFIX

__all__ = ["PICTURES", "draw", "failure", "hang", "main", "start", "top", "wizard"]

COLUMNS, LINES = 80, 24
FOLDER = Path(__file__).parent / "img"
_TIMEOUT_S = 120
_TYPING_S = 0.3
_DOWN, _ENTER = "\x1b[B", "\r"
_LIGHT = {"start"}
"""Pictures that the docs show in a light and in a dark theme."""
_LIGHT_THEME = TerminalTheme(
    (250, 250, 252),
    (36, 41, 47),
    [
        (36, 41, 47),
        (164, 14, 38),
        (17, 99, 41),
        (77, 45, 0),
        (9, 105, 218),
        (130, 80, 223),
        (27, 124, 131),
        (87, 96, 106),
    ],
)
_COLOURS = {"brown": "yellow"}
"""pyte's names of colours where rich has others."""
_HEX = 6
_PROJECT = b"/home/me/project"
"""Stands for the folder of the run; as long as the name of a temporary one, so that lines break where they did."""

# rich's own template fetches a font; this one takes what the reader has.
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
    <style>
    .{unique_id}-matrix {{
        font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
        font-size: {char_height}px;
        line-height: {line_height}px;
    }}
    .{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
    {styles}
    </style>
    <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
    </defs>
    {chrome}
    <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix">
    {matrix}
    </g>
    </g>
</svg>
"""


_SCRIPT = """\
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("training on", dist.get_world_size(), "ranks")
dist.barrier()


def loss_of(batch):
    return torch.nn.functional.cross_entropy(batch, torch.tensor([0, 7]))


if dist.get_rank() == 2:
    loss_of(torch.randn(2, 3))
time.sleep(600)
"""


def failure() -> Iterator[list[Text]]:
    """Yield the screen after one of four ranks failed while the others waited for it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_SCRIPT, encoding="utf-8")
        terminal = _Terminal(folder, "launch", "--cpu", "--nproc-per-node", "4", "train.py")
        terminal.end(code=1)
        yield terminal.render()


_WATCHED = """\
import time
from pathlib import Path

import torch

from accel_runtime import Accelerator

STEPS = 80
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
data = torch.utils.data.DataLoader(torch.randn(4000, 8), batch_size=4)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), data)
is_slow = accelerator.process_index == 3
for step, batch in enumerate(data):
    time.sleep(0.06 if is_slow else 0.03)
    accelerator.backward(model(batch).mean())
    optimizer.step()
    accelerator.log({"train/loss": 2.0 * 0.97**step, "learning rate": 0.001 * step}, step=step)
    if step + 1 == STEPS:
        break
Path(f"done{accelerator.process_index}").touch()
while is_slow and not Path("end").exists():
    time.sleep(0.1)
accelerator.wait_for_everyone()
"""


def top() -> Iterator[list[Text]]:
    """Yield the screen of `accel top` beside a run of four ranks, one of which is slow."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_WATCHED, encoding="utf-8")
        run = _Terminal(folder, "launch", "--cpu", "--nproc-per-node", "4", "train.py", **{HOME: "home"})
        try:
            run.wait(Path(folder, "done3").exists, "file done3")
            terminal = _Terminal(folder, "top", **{HOME: "home"})
            terminal.answer("* slowest rank: 3", "")
            yield terminal.render()
            terminal.type("q")
            terminal.end()
        finally:
            Path(folder, "end").touch()
            run.end()


_HANGING = """\
import time

import torch
import torch.distributed as dist


def augment(batch, step):
    if step == 40 and dist.get_rank() == 2:
        time.sleep(1000)  # a lock, a file system, a download
    return batch + torch.randn_like(batch)


def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(1000):
        batch = augment(torch.randn(4, 8), step)
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
"""


def hang() -> Iterator[list[Text]]:
    """Yield the screen after one of four ranks has stopped in its own code, and the others wait in gradient averaging."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_HANGING, encoding="utf-8")
        options = ("-q", "--cpu", "--nproc-per-node", "4", "--stall-timeout", "5", "--stall-action", "fail")
        terminal = _Terminal(
            folder,
            "launch",
            *options,
            "--shutdown-timeout",
            "1",
            "train.py",
            **{HOME: "home", NODE_NAME: "node-1"},
        )
        terminal.end(code=124)
        yield terminal.render()


def wizard() -> Iterator[list[Text]]:
    """Yield the screens of the wizard: with the third question open, then at the end.

    Raises:
        RuntimeError: The wizard did not ask the expected questions, or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A relative home keeps the paths of the machine that draws out of the picture.
        terminal = _Terminal(folder, "config", **{HOME: "home"})
        terminal.answer("How should scripts run?", _DOWN + _ENTER)
        terminal.answer("How many nodes?", _ENTER)
        terminal.answer("How many processes on each node?", "2")
        yield terminal.render()
        terminal.type(_ENTER)
        terminal.answer("Mixed precision?", _ENTER)
        terminal.answer("fit on one device?", _ENTER)
        terminal.answer("Write home", _ENTER)
        terminal.end()
        yield terminal.render()


_RAW = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
x = torch.randn(512, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
torch.save(model.state_dict(), "model.pt")
"""
_START = (
    ("migrate", "--write", "train.py"),
    ("launch", "--nproc-per-node", "4", "train.py"),
)


def start() -> Iterator[list[Text]]:
    """Yield a terminal in which a raw script is converted, trains on four processes."""
    lines: list[Text] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_RAW, encoding="utf-8")
        for command in _START:
            lines.append(Text.assemble(("$ ", "dim"), ("accel " + " ".join(command), "bold")))
            terminal = _Terminal(folder, *command, **{HOME: "home"})
            terminal.end()
            lines += terminal.render()
    yield lines


PICTURES: dict[str, tuple[str, Callable[[], Iterator[list[Text]]]]] = {
    "start": ("train.py", start),
    "wizard": ("accel config", wizard),
    "failure": ("accel launch --cpu --nproc-per-node 4 train.py", failure),
    "top": ("accel top", top),
    "hang": ("accel launch --stall-timeout 5 --stall-action fail train.py", hang),
}
"""The title of each picture, and what is on its screens."""


def draw(name: str) -> dict[str, str]:
    """Return the screens below each other, as SVG by the name of the file: dark, and light if the docs show both."""
    title, screens = PICTURES[name]
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for index, lines in enumerate(screens()):
        if index:
            console.rule("and after three more times Enter", style="dim")
        for line in lines:
            console.print(line, no_wrap=True, highlight=False)
    drawn = {name: console.export_svg(title=title, code_format=_SVG, unique_id=name, clear=False)}
    if name in _LIGHT:
        drawn[f"{name}-light"] = console.export_svg(
            title=title, code_format=_SVG, unique_id=f"{name}-light", theme=_LIGHT_THEME
        )
    return drawn


def main(arguments: list[str]) -> None:
    """Draw the pictures into the folder named, or where the docs have them."""
    for name in PICTURES:
        for file, picture in draw(name).items():
            target = (Path(arguments[0]) if arguments else FOLDER) / f"{file}.svg"
            target.write_text(picture, encoding="utf-8")
            print(f"{target} is written")


class _Terminal:
    """A command of `accel` in a terminal of 80 columns and 24 lines."""

    def __init__(self, folder: str, *command: str, **homes: str) -> None:
        self._folder = folder.encode()
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self._child = pexpect.spawn(
            sys.executable,
            ["-m", "accel_cli", *command],
            cwd=folder,
            env={
                **{
                    name: value for name, value in os.environ.items() if not name.startswith(("XDG_", PREFIX))
                },
                "HOME": folder,
                **homes,
                "CUDA_VISIBLE_DEVICES": "",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "TERM": "xterm",
            },
            dimensions=(LINES, COLUMNS),
        )

    def answer(self, question: str, keys: str) -> None:
        """Wait for a question, and type."""
        self.wait(lambda: any(question in line for line in self._screen.display), repr(question))
        self.type(keys)

    def wait(self, condition: Callable[[], bool], description: str) -> None:
        """Wait until a condition is true, and read the output meanwhile."""
        end = time.monotonic() + _TIMEOUT_S
        while not condition():
            self._read()
            if time.monotonic() > end:
                screen = "\n".join(self._screen.display)
                raise RuntimeError(
                    f"Cannot draw the picture: no {description} after {_TIMEOUT_S} s. The screen:\n{screen}"
                )

    def type(self, keys: str) -> None:
        """Type, and read the output for a moment."""
        self._child.send(keys)
        end = time.monotonic() + _TYPING_S
        while time.monotonic() < end:
            self._read()

    def end(self, code: int = 0) -> None:
        """Wait until the command has ended, with this exit code."""
        self.wait(self._child.eof, "end of the command")
        self._child.close()
        if self._child.exitstatus != code:
            raise RuntimeError(
                f"Cannot draw the picture: exit code {self._child.exitstatus}, expected {code}."
            )

    def render(self) -> list[Text]:
        """Return the screen as text of rich, without empty lines at the end."""
        cursor = self._screen.cursor
        if self._child.isalive():
            under = self._screen.buffer[cursor.y][cursor.x]
            self._screen.buffer[cursor.y][cursor.x] = under._replace(data="\N{FULL BLOCK}")
        lines = [_render_row(self._screen.buffer[row]) for row in range(LINES)]
        while not lines[-1].plain:
            lines.pop()
        return lines

    def _read(self) -> None:
        try:
            output = self._child.read_nonblocking(65536, timeout=0.05)
            self._stream.feed(output.replace(self._folder, _PROJECT[: len(self._folder)]))
        except pexpect.TIMEOUT:
            pass
        except pexpect.EOF:
            self._child.flag_eof = True


def _render_row(row: Mapping[int, Char]) -> Text:
    line = Text()
    for column in range(COLUMNS):
        line.append(row[column].data, _get_style(row[column]))
    line.rstrip()
    return line


def _get_style(char: Char) -> Style:
    return Style(
        color=_get_colour(char.fg), bgcolor=_get_colour(char.bg), bold=char.bold, italic=char.italics,
        underline=char.underscore, reverse=char.reverse,
    )  # fmt: skip


def _get_colour(name: str) -> str | None:
    if name == "default":
        return None
    if len(name) == _HEX and set(name) <= set("0123456789abcdef"):
        return f"#{name}"
    colour = _COLOURS.get(name.removeprefix("bright"), name.removeprefix("bright"))
    return f"bright_{colour}" if name.startswith("bright") else colour


if __name__ == "__main__":
    main(sys.argv[1:])
