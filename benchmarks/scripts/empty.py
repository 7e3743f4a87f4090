"""Print the time, and import torch."""

import os
import time

# One system call, so that lines of several processes do not mix.
os.write(1, f"began {time.time()}\n".encode())

import torch  # noqa: E402, F401
