"""Join a process group, and print the private memory of this process while all processes exist."""

import os
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
dist.barrier()
os.write(1, f"private {private}\n".encode())
dist.destroy_process_group()
