"""Hints for errors of libraries whose messages lack the cure; standard library only."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from accel_runtime.environment.cgroup import explain_process_limit
from accel_runtime.environment.installation import format_install

__all__ = ["find_hint"]

_HINTS = (
    (
        re.compile(r"connectFullMesh.*127\.0\.1\.1|127\.0\.1\.1.*[Cc]onnection refused", re.DOTALL),
        (
            "the name of this machine resolves to 127.0.1.1, which other machines cannot reach. Set its real address in "
            "/etc/hosts, or name the network interface: --set env.GLOO_SOCKET_IFNAME=eth0"
        ),
    ),
    (
        re.compile(r"OutOfMemoryError.*reserved by PyTorch but unallocated memory is large", re.DOTALL),
        (
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to reduce memory fragmentation. Other ways to use less memory "
            "are on the page Out of memory of the documentation"
        ),
    ),
    (
        re.compile(r"OutOfMemoryError|(CUDA|HIP|MPS backend|XPU) out of memory", re.IGNORECASE),
        (
            "use a smaller batch with gradient_accumulation_steps, mixed_precision bf16, or parallel.dp_shard=auto. The page Out of "
            "memory of the documentation compares them, and accel estimate computes the memory of a model"
        ),
    ),
    (
        re.compile(
            r"not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available|No HIP GPUs"
        ),
        (
            "the processes of this run have no GPU that torch can use. Move models and tensors to accelerator.device in place of "
            '"cuda"; accel env prints the devices, and the page FAQ and troubleshooting of the documentation has the causes'
        ),
    ),
    (
        re.compile(r"DataLoader worker process.*Cannot re-initialize \w+ in forked subprocess", re.DOTALL),
        (
            "a data-loader worker is a fork, in which the device cannot be used. Leave tensors of the dataset and collate_fn on the CPU, "
            "or pass multiprocessing_context='spawn' to the DataLoader"
        ),
    ),
    (
        re.compile(r"Cannot re-initialize \w+ in forked subprocess"),
        (
            "the process is a fork of one that had used the device. If the script itself did not fork it, start the processes without "
            "a fork: --set launcher.start_method=exec"
        ),
    ),
    (
        re.compile(r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code (?!0)"),
        (
            "the data-loader worker ended itself: the dataset, collate_fn or a library in it called sys.exit() or os._exit(). Run it "
            "with num_workers=0, where the line is in the traceback or in that of a debugger"
        ),
    ),
    (
        re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: (Segm|Abort|Illegal|Floating)"),
        (
            "a library crashed in the data-loader worker. Run it with num_workers=0, so that the failure report has the Python stack "
            "of the crash"
        ),
    ),
    (
        re.compile(r"EOFError: EOF when reading a line"),
        (
            "standard input is at its end. Of several processes, only rank 0 has it: read it there, and pass it on with "
            "broadcast_object_list()"
        ),
    ),
    (
        re.compile(r"initialize the default process group twice"),
        (
            "the first Accelerator() or PartialState() connects the processes, unless they are connected already. Remove "
            "init_process_group(), or call it before them"
        ),
    ),
    (
        re.compile(
            r"'PreparedOptimizer' object is not (iterable|callable|subscriptable)|'PreparedLoader' object is not callable"
        ),
        (
            "prepare() returns the objects in the order of its arguments: assign them in this order, as in model, optimizer, loader = "
            "accelerator.prepare(model, optimizer, loader)"
        ),
    ),
    (
        re.compile(r"'bool' object is not callable"),
        (
            "is_main_process, is_local_main_process and is_last_process are properties: if this line calls one of them, remove the "
            "parentheses"
        ),
    ),
    (
        re.compile(r"got mixed torch\.Tensor and DTensor"),
        (
            "the model is sharded, but another tensor of this operation is not. Copies of its parameters that were made before prepare(), "
            "such as those of EMAModel of diffusers, have full tensors: make them after prepare()"
        ),
    ),
    (
        re.compile(r"gloo.*(op\.preamble\.length|collective mismatch)", re.DOTALL),
        (
            "the ranks called different collectives, such as the forward pass of a prepared model on one rank only, in another "
            "order, or with tensors of different sizes or dtypes. Call the prepared model equally often on all ranks, and unwrap_model(model) on one rank alone"
        ),
    ),
    (
        re.compile(
            r"inline_container.*unexpected pos|basic_ios::clear: iostream error|PytorchStreamWriter failed writing"
        ),
        "torch.save could not write all of the file, most often because the disk is full or a quota is reached",
    ),
    (
        re.compile(r"(gloo|ProcessGroup|Watchdog).*(Timed out waiting \d+ms|Timeout\(ms\)=\d+)", re.DOTALL),
        "another rank did not reach this collective within process_group_timeout; see the logs of the other ranks",
    ),
)
_NO_MORE = re.escape(os.strerror(errno.EAGAIN))
_NO_THREAD = re.compile(
    rf"can't start new thread|RuntimeError: {_NO_MORE}|[Tt]hread.*{_NO_MORE}|std::system_error'\s+what\(\):\s+{_NO_MORE}"
)
"""What Python, torch, the libraries of OpenMP and BLAS, and C++ print if they cannot start a thread."""
_NO_PROCESS, _FORK = re.compile(f"BlockingIOError: .*{_NO_MORE}"), re.compile("fork|spawn")
"""The error of Python if it cannot start a process, and the call. Sockets and pipes raise it too."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "PIL": "pillow",
        "bs4": "beautifulsoup4",
        "cv2": "opencv-python-headless",
        "skimage": "scikit-image",
        "sklearn": "scikit-learn",
        "yaml": "pyyaml",
    }
)
"""Packages whose module has another name."""


def find_hint(text: str, line: str = "") -> str | None:
    """Return the hint for an exception, given as its class and message; None without one.

    Args:
        text: The class and message, or the last lines of the output.
        line: The line of code that raised the exception, if it is known.
    """
    if _NO_THREAD.search(text) or (_NO_PROCESS.search(text) and _FORK.search(line)):
        return explain_process_limit()
    if (match := _MISSING.search(text)) and (hint := _explain_missing(match[1].partition(".")[0])):
        return hint
    return next((hint for pattern, hint in _HINTS if pattern.search(text)), None)


def _explain_missing(module: str) -> str | None:
    """Return where a module is missing, and how to provide it; None if this Python has it."""
    try:
        if find_spec(module) is not None:
            return None
    except (ImportError, ValueError):
        return None
    if Path(module).is_dir() or Path(f"{module}.py").is_file():
        return (
            f"{module} is in the working directory, and Python searches the folder of the script. Start it as a module (accel "
            "launch -m), or add the working directory: PYTHONPATH=. accel launch ..."
        )
    used = sys.executable
    other = shutil.which("python")
    is_other = other and Path(other).parent.resolve() != Path(sys.executable).parent.resolve()
    note = f", not {other} of PATH" if other and is_other else ""
    install = format_install(_DISTRIBUTIONS.get(module, module))
    return f"the script runs with {used}{note}, which has no module {module}. Install it there: {install}"
