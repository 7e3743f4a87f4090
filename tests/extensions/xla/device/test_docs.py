"""The commands for torch_xla on documentation pages work on its CPU device."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sources import docs_reader as docs

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

ROOT = Path(__file__).parents[4]


@pytest.mark.full
def test_commands_for_torch_xla_on_documentation_pages_work(tmp_path, monkeypatch):
    here = Path(__file__).relative_to(ROOT).as_posix()
    commands_here = {command for command, why in docs.ELSEWHERE.items() if why.covered == here}
    others = {command: why for command, why in docs.ELSEWHERE.items() if command not in commands_here}
    pages = {
        block.page
        for block in docs.ALL
        if any(page_command.text in commands_here for page_command in docs.commands(block))
    }
    assert pages
    for number, page in enumerate(sorted(pages)):
        # What a page says of a TPU is tried on the CPU device.
        reader = docs.Reader(tmp_path / str(number), others, {"PJRT_DEVICE": "CPU"})
        monkeypatch.chdir(reader.folder)
        for block in docs.blocks(page):
            if block.title:
                reader.file(block)
            elif block.language == "console":
                reader.console(block)
