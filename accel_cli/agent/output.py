"""What the ranks of this machine write, on its way to the screen and into each rank's log."""

from __future__ import annotations

import os
import selectors
import threading
import time
from contextlib import suppress
from pathlib import Path

from accel_cli import console
from accel_cli.agent.channel import Channel, identity
from accel_cli.agent.lines import Lines
from accel_cli.runs import RankFolder, RunFolder

__all__ = ["LogWarning", "Output"]

_SCREENS = {"stdout": 1, "stderr": 2}
_PATIENCE_S = 1.0
_QUIET_S = 0.3
"""How long nothing has to come, once all have ended, from a process that a script left behind."""
_DRAIN_S = 5.0
"""How long such a process is listened to at most."""


class LogWarning:
    """The one warning of a run that its logs are not complete: they are best effort, and training continues.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._given = False

    def give(self, why: str) -> None:
        """Give the warning with its reason, unless it was given already."""
        if not self._given:
            self._given = True
            console.note(
                f"the logs in {console.short(str(self.folder.path))} are not complete: {why}. The run itself continues; free "
                "space there, or choose another folder by --log-dir."
            )


class Output:
    """The output of one attempt: some ranks on the screen, all in their logs.

    One rank alone is shown byte for byte, through a pseudo-terminal if the screen is one, so that the script
    sees what it would see without a launcher. Of several, whole lines are shown, each behind its rank, and progress bars
    that move of the first of them only. A rank that is not shown writes straight into its log.
    """

    def __init__(self, warning: LogWarning, *, prefixed: bool, coloured: bool) -> None:
        self.prefixed = prefixed
        """Whether lines stand behind their rank."""
        self._warning = warning
        self._coloured = coloured
        self._first: int | None = None
        """The lowest rank on the screen."""
        self._hidden: list[Path] = []
        self._channels: list[Channel] = []
        self._folders: list[RankFolder] = []
        self._reader: threading.Thread | None = None
        self._ended = -1
        self._started = False

    def route(self, folder: RankFolder, rank: int, *, shown: bool) -> None:
        """Leave in a rank's folder what its process connects to; it waits for `stderr`, where it runs already."""
        self._folders.append(folder)
        try:
            folder.output.touch(mode=0o600)
        except OSError as error:
            self._warning.give(f"{folder.output} cannot be made: {error.strerror}")
        seen: dict[object, str] = {}
        for stream, screen in _SCREENS.items():
            name = folder.path / stream
            first = seen.setdefault(identity(screen), stream)
            if not shown:
                name.symlink_to(folder.output.name)
                self._hidden.append(name)
            elif first != stream:
                # Together on the screen they are one channel, so that their order stays.
                name.symlink_to(first)
            else:
                lines = self._lines(rank, screen) if self.prefixed else None
                self._channels.append(Channel.open(name, folder.output, screen, lines, self._warning.give))
        if self._reader:
            os.write(self._ended, b"+")
        elif self._started:
            self.start()

    def _lines(self, rank: int, screen: int) -> Lines:
        self._first = rank if self._first is None else min(self._first, rank)
        return Lines(rank, coloured=self._coloured and os.isatty(screen), bars=rank == self._first)

    def start(self) -> None:
        """Begin to pass on, in a thread of its own."""
        self._started = True
        if self._channels:
            waits, self._ended = os.pipe()
            self._reader = threading.Thread(target=self._read, args=(waits,), name="output", daemon=True)
            self._reader.start()

    def resize(self) -> None:
        """Give the ranks' terminals the size of the screen."""
        for channel in self._channels:
            channel.resize()

    def drain(self) -> list[RankFolder]:
        """Once the processes have ended: pass on the rest, and take away what they were connected to.

        Returns:
            The folders whose logs are whole now.
        """
        if self._reader:
            os.close(self._ended)
            self._reader.join()
            self._reader = None
        for channel in self._channels:
            channel.close()
        # A process that could not write its log has removed the link to it.
        if lost := sorted({link.parent.name for link in self._hidden if not link.is_symlink()}):
            self._warning.give(f"{', '.join(lost)} could not write")
        self._hidden = []
        for folder in self._folders:
            for stream in _SCREENS:
                (folder.path / stream).unlink(missing_ok=True)
        whole, self._folders = self._folders, []
        return whole

    def end_line(self) -> None:
        """Begin a new line on the screen, if the last thing a rank wrote to it is no whole line."""
        for channel in self._channels:
            if channel.unfinished and channel.screen and identity(channel.screen) == identity(2):
                with suppress(OSError):
                    os.write(2, b"\n")
                return

    def _read(self, waits: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(waits, selectors.EVENT_READ)
            self._listen(selector)
            while waits in selector.get_map():
                self._pass_on(selector, _PATIENCE_S if self._some_wait() else None)
            self._finish(selector)
        os.close(waits)
        for channel in self._channels:
            channel.wait(end=True)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        """To channels that are new."""
        for channel in self._channels:
            if channel.read >= 0 and channel.read not in selector.get_map():
                selector.register(channel.read, selectors.EVENT_READ, channel)

    def _finish(self, selector: selectors.BaseSelector) -> None:
        """Pass on what is still in the channels."""
        for channel in self._channels:
            channel.release()
        late = time.monotonic() + _DRAIN_S
        while selector.get_map() and time.monotonic() < late and self._pass_on(selector, _QUIET_S):
            pass

    def _pass_on(self, selector: selectors.BaseSelector, patience: float | None) -> bool:
        """Wait for something and pass it on; whether there was something."""
        ready = selector.select(patience)
        for key, _ in ready:
            channel: Channel | None = key.data
            if channel is None and os.read(key.fd, 1):
                self._listen(selector)
            elif channel is None or not channel.copy():
                selector.unregister(key.fd)
            if channel and key.fd not in selector.get_map():
                channel.close()
        for channel in self._channels:
            channel.wait()
        return bool(ready)

    def _some_wait(self) -> bool:
        return any(channel.lines and channel.lines.waiting for channel in self._channels)
