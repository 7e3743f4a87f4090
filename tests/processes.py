"""Processes that a failed test does not wait for."""

import subprocess


class Process(subprocess.Popen):
    """A process that is killed if its `with` block fails, where `subprocess.Popen` would wait for its exit."""

    def __exit__(self, kind, *error):
        if kind is not None:
            self.kill()
        super().__exit__(kind, *error)
