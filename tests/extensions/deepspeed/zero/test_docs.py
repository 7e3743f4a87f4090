"""The commands of the page about DeepSpeed work where it is installed."""

from __future__ import annotations

import pytest
from support.sources import docs_reader as docs

pytest.importorskip(
    "deepspeed.runtime", reason="deepspeed is in an environment of its own: make test-deepspeed"
)


def test_the_commands_of_the_page_about_deepspeed_work(tmp_path, monkeypatch):
    here = {
        command
        for command, why in docs.ELSEWHERE.items()
        if why.covered == "tests/extensions/deepspeed/zero/test_docs.py"
    }
    others = {command: why for command, why in docs.ELSEWHERE.items() if command not in here}
    page = docs.DOCS / "deepspeed.md"
    assert {
        command.text
        for block in docs.blocks(page)
        if block.language == "console"
        for command in docs.commands(block)
    } >= here
    reader = docs.Reader(tmp_path, others)
    monkeypatch.chdir(reader.folder)
    for block in docs.blocks(page):
        if block.title:
            reader.file(block)
        elif block.language == "console":
            reader.console(block)
