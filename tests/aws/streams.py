"""Stub of CloudWatch Logs: lines of hosts become events in batches, with a delay on request."""

from __future__ import annotations

import queue
import threading
import time

from moto.logs.models import logs_backends

__all__ = ["GROUP", "Writer"]

GROUP = "/aws/sagemaker/TrainingJobs"
_BATCH = 1000


class Writer:
    """Writes the streams of one region; the group is created with the first event."""

    def __init__(self, account, region, delay):
        self._where, self._delay = (account, region), delay
        self._queue, self._lock = queue.Queue(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, stream, line):
        """Add one line, without its line end."""
        # CloudWatch takes no event without text.
        self._queue.put((stream, {"timestamp": int(time.time() * 1000), "message": line or " "}))

    def end(self):
        """Mark the end of the input; earlier lines are still delivered."""
        self._queue.put(None)

    def whole(self):
        """Wait until all lines are delivered."""
        self.end()
        self._thread.join()

    def _run(self):
        going = True
        while going:
            batch = [self._queue.get()]
            time.sleep(self._delay()) if self._delay() else None
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            going = None not in batch
            self._write([item for item in batch if item])

    def _write(self, batch):
        account, region = self._where
        logs = logs_backends[account][region]
        for stream in dict.fromkeys(stream for stream, _ in batch):
            with self._lock:
                if GROUP not in logs.groups:
                    logs.create_log_group(GROUP, {})
                if stream not in logs.groups[GROUP].streams:
                    logs.create_log_stream(GROUP, stream)
            logs.put_log_events(GROUP, stream, [event for name, event in batch if name == stream])
