"""Fail once on one rank, and print the times of the failure and of the import of torch after the restart."""

import os
import time

import torch  # noqa: F401

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        os.write(1, f"failed {time.time()}\n".encode())
        os._exit(1)
    time.sleep(600)
os.write(1, f"began {time.time()}\n".encode())
