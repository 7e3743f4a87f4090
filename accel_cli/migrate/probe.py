"""Run a script and record its first optimizer steps, for `accel migrate --verify`.

Run by its path, so that the script's own folder can be the first entry of `sys.path`. Usage: `probe.py CONFIG SCRIPT [ARGS]...`, with
a `RunConfig` as JSON. torch is used only once the script has imported it.
"""

from __future__ import annotations

import sys

# The folder of this file has modules whose names are those of packages.
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
import contextlib
import ctypes
import gc
import hashlib
import inspect
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_cli.migrate.step_records import Difference, RunConfig, RunEnd, StepRecord, encode_record
from accel_cli.worker import execute, prepare_script, print_exception
from accel_runtime.environment.import_hooks import call_after_import
from accel_runtime.environment.throughput import count_samples

__all__ = ["Probe", "main"]

_MAX_VALUES = 16384
"""The number of values of a parameter that are compared; of larger ones, values at even distances."""
_PEER_TIMEOUT_S = 60.0
_SEED = 0
_CHANGES: Mapping[str, slice] = {
    **dict.fromkeys(
        ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), slice(0, 1)
    ),
    **dict.fromkeys(("os.rename", "os.link", "shutil.move"), slice(0, 2)),
    "os.symlink": slice(1, 2),
    "shutil.rmtree": slice(0, 1),
}
"""The arguments of Python's audit events that are paths of changed files."""
_KEEP_LINKS = frozenset(
    {"os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.symlink", "shutil.rmtree", "shutil.move"}
)
"""Events that change the link itself."""
_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of Linux."""


def main(arguments: list[str]) -> None:
    """Run a script with its arguments, and write the records."""
    config, *sys.argv = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    probe = Probe(RunConfig(**json.loads(config)))
    sys.addaudithook(probe.protect_files)
    random.seed(_SEED)
    call_after_import("numpy.random", lambda module: module.seed(_SEED))
    call_after_import("torch", probe.watch_torch)
    call_after_import("torch.utils.data.dataloader", probe.watch_loaders)
    call_after_import("safetensors", probe.watch_safetensors)
    call_after_import("accel_runtime.accelerator.accelerator", probe.split_batches)
    prepare_script("script")
    try:
        execute("script", sys.argv[0])
    except SystemExit as error:
        # The message of argparse is the last line of stderr.
        is_error = error.code not in {None, 0}
        if isinstance(error.code, str):
            print_exception(error)
        probe.end(
            f"exit code {error.code}" if is_error and isinstance(error.code, int) else str(error.code or "")
        )
    except BaseException as error:  # noqa: BLE001 - any exception ends the script
        print_exception(error)
        probe.end(probe.describe(error))
    probe.end()


class Probe:
    """The records of this process."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._pid = config, os.getpid()
        self._torch: Any = None
        self._is_protecting = False
        self._steps = 0
        self._losses: list[float] = []
        self._samples = self._workers = 0
        self._is_drawn_by_data = self._is_seeded = False
        self._last_random = ""
        self._layers: tuple[str, ...] = ()
        self._starts: dict[int, list[Any]] = {}
        """The weights before the first step of each optimizer, by its id."""
        self._results = Path(config.results)
        temporary = Path(tempfile.gettempdir()).resolve()
        is_in_original = temporary.is_relative_to(config.original)
        self._writable: tuple[str | Path, ...] = (
            config.copy,
            config.results,
            *([temporary] if is_in_original else []),
        )

    # Hooks of torch

    def watch_torch(self, torch: Any) -> None:
        """Seed torch, and record steps and backward passes."""
        self._torch = torch
        torch.manual_seed(_SEED)
        torch.set_num_threads(1)
        torch.backends.cudnn.deterministic = True
        seed, backward = torch.manual_seed, torch.autograd.backward

        @wraps(seed)
        def record_seed(*args: Any, **kwargs: Any) -> Any:
            self._is_seeded = True
            return seed(*args, **kwargs)

        @wraps(backward)
        def record_loss(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and os.getpid() == self._pid:
                self._losses.append(float(tensors.detach().double()))
            backward(tensors, *args, **kwargs)

        torch.manual_seed, torch.autograd.backward = record_seed, record_loss
        torch.save = self._replace_link_of(torch.save, "f")
        hooks = sys.modules["torch.optim.optimizer"]
        hooks.register_optimizer_step_pre_hook(self._keep_start)
        hooks.register_optimizer_step_post_hook(self._record_step)
        call_after_import("torch.multiprocessing", _run_spawned_function)

    def _keep_start(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() == self._pid and id(optimizer) not in self._starts:
            self._starts[id(optimizer)] = [_sample(one) for one in _list_parameters(optimizer)]

    def _record_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() != self._pid or self._torch.compiler.is_compiling():
            return
        self._steps += 1
        parameters = _list_parameters(optimizer)
        state = {
            "start": self._starts[id(optimizer)],
            "weights": [_sample(one) for one in parameters],
            "gradients": [
                _sample(self._torch.zeros_like(one) if one.grad is None else one.grad) for one in parameters
            ],
        }
        is_first_rank = self._config.rank == 0
        if is_first_rank:
            self._torch.save(state, self._results / f"{self._steps}.pt")
        if self._steps == 1:
            self._layers = self._find_layers()
        current = self._hash_generators()
        record = StepRecord(
            step=self._steps,
            loss=sum(self._losses) if self._losses else None,
            digest=_hash_tensors(self._torch, parameters),
            random=current,
            rates=tuple(float(group.get("lr", 0)) for group in optimizer.param_groups),
            samples=self._samples,
            is_drawn=bool(self._last_random) and current != self._last_random,
            is_drawn_by_data=self._is_drawn_by_data,
            workers=self._workers,
            difference=self._compare(state) if is_first_rank and self._config.reference else None,
        )
        self._write(record)
        self._losses, self._samples, self._is_drawn_by_data = [], 0, False
        self._last_random = current
        if self._steps == self._config.max_steps:
            self.end()

    def _compare(self, state: dict[str, list[Any]]) -> Difference | None:
        """Return the differences of a step from that of the reference."""
        path = Path(self._config.reference, f"{self._steps}.pt")
        if not path.exists():
            return None
        torch = self._torch
        other = torch.load(path, weights_only=True)
        if [one.shape for one in other["weights"]] != [one.shape for one in state["weights"]]:
            return None
        largest = max(
            (
                float((a - b).abs().max())
                for a, b in zip(state["weights"], other["weights"], strict=True)
                if a.numel()
            ),
            default=0.0,
        )
        change = _measure([a - b for a, b in zip(other["weights"], other["start"], strict=True)])
        return Difference(
            largest,
            _divide(
                _measure([a - b for a, b in zip(state["weights"], other["weights"], strict=True)]), change
            ),
            _divide(
                _measure([a - b for a, b in zip(state["gradients"], other["gradients"], strict=True)]),
                _measure(other["gradients"]),
            ),
        )

    def watch_loaders(self, module: Any) -> None:
        """Record the batches of torch's loaders."""
        base = module._BaseDataLoaderIter  # noqa: SLF001 - the class of all its iterators (torch 2.9 to 2.13)
        load = base.__next__

        @wraps(load)
        def load_and_record(iterator: Any) -> Any:
            if os.getpid() != self._pid:
                return load(iterator)
            before = self._hash_generators()
            is_first = not iterator._num_yielded  # noqa: SLF001
            batch = load(iterator)
            self._last_random = self._hash_generators()
            self._samples += count_samples(batch)
            self._workers = max(self._workers, iterator._num_workers)  # noqa: SLF001
            if not is_first and self._last_random != before:
                self._is_drawn_by_data = True
            return batch

        base.__next__ = load_and_record

    def _find_layers(self) -> tuple[str, ...]:
        """Return the classes of BatchNorm and dropout layers in training mode."""
        torch = self._torch
        norm = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - the class of all of them
        dropout = torch.nn.modules.dropout._DropoutNd  # noqa: SLF001
        found = set()
        for one in gc.get_objects():
            kind = type(one)  # not isinstance: proxies run code for it
            if not issubclass(kind, torch.nn.Module) or not one.training:
                continue
            is_norm = issubclass(kind, norm) and not issubclass(kind, torch.nn.SyncBatchNorm)
            if is_norm or (issubclass(kind, dropout) and one.p > 0):
                found.add(kind.__name__)
        return tuple(sorted(found))

    def _hash_generators(self) -> str:
        """Return a checksum of the states of Python's, numpy's and torch's generators."""
        digest = hashlib.sha256(repr(random.getstate()).encode("utf-8"))
        if "numpy.random" in sys.modules:
            digest.update(repr(sys.modules["numpy.random"].get_state()[1:3]).encode("utf-8"))
        digest.update(bytes(self._torch.get_rng_state().tolist()))
        if self._torch.cuda.is_initialized():
            digest.update(bytes(self._torch.cuda.get_rng_state().tolist()))
        return digest.hexdigest()

    # Changes of the script

    def split_batches(self, module: Any) -> None:
        """Let each Accelerator divide the batches of the script over the processes, unless the script sets it."""
        if not self._config.is_split:
            return
        create = module.Accelerator.__init__
        signature = inspect.signature(create)

        @wraps(create)
        def create_with_split(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind_partial(accelerator, *args, **kwargs).arguments
            create(
                accelerator, *args, **({} if "split_batches" in given else {"split_batches": True}), **kwargs
            )

        module.Accelerator.__init__ = create_with_split

    def watch_safetensors(self, module: Any) -> None:
        """Replace links before safetensors writes to them, since its files are not opened by Python."""
        module.serialize_file = self._replace_link_of(module.serialize_file, "filename")

    def _replace_link_of(self, write: Any, name: str) -> Any:
        """Return a function that writes a file, after a link to the user's file is replaced by a copy."""
        signature = inspect.signature(write)

        @wraps(write)
        def write_in_copy(*args: Any, **kwargs: Any) -> Any:
            path = signature.bind_partial(*args, **kwargs).arguments.get(name)
            if isinstance(path, (str, os.PathLike)):
                self._protect(os.fspath(path))
            return write(*args, **kwargs)

        return write_in_copy

    def protect_files(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Give the script files and folders of its own before it changes links of the copy; refuse those of the user's folder."""
        if self._is_protecting or (event != "open" and event not in _CHANGES):
            return
        if event == "open":
            path, mode, flags = arguments
            is_read = (
                not set(mode) & set("wax+") if isinstance(mode, str) else not (flags or 0) & os.O_ACCMODE
            )
            paths = () if is_read else (path,)
        else:
            paths = arguments[_CHANGES[event]]
        for path in paths:
            if isinstance(path, (str, bytes, os.PathLike)):
                self._protect(os.fsdecode(path), keeps_content=event in _KEEP_LINKS)

    def _protect(self, path: str, *, keeps_content: bool = False) -> None:
        """Replace the links on the way to a file that is changed; with `keeps_content`, not the last one."""
        self._is_protecting = True
        try:
            place = Path(os.path.abspath(path))  # noqa: PTH100 - links are not resolved
            target = Path(os.path.realpath(place.parent), place.name)
            if place.is_relative_to(self._config.tree):
                self._replace_links(place, keeps_content=keeps_content)
            elif target.is_relative_to(self._config.original) and not any(
                target.is_relative_to(one) for one in self._writable
            ):
                raise PermissionError(
                    f"accel migrate --verify runs the script in a copy, and does not write {target}"
                )
        finally:
            self._is_protecting = False

    def _replace_links(self, path: Path, *, keeps_content: bool) -> None:
        """Replace links to folders on the way by folders of links, and one to a file by a copy of the file."""
        current = Path(self._config.tree)
        names = path.relative_to(current).parts
        for number, name in enumerate(names, start=1):
            current /= name
            target = Path(os.path.realpath(current))
            if not current.is_symlink() or target.is_relative_to(self._config.tree):
                continue
            copy = current.with_name(f".{name}.{self._config.rank}")
            if number < len(names) and target.is_dir():
                copy.mkdir()
                for entry in target.iterdir():
                    (copy / entry.name).symlink_to(os.path.realpath(entry))
                with contextlib.suppress(OSError):  # another rank has replaced it at the same time
                    current.unlink()
                    copy.rename(current)
            elif number == len(names) and target.is_file() and not keeps_content:
                shutil.copy2(target, copy)
                copy.replace(current)

    # End

    def describe(self, error: BaseException) -> str:
        """Return the class, text and place in the script of an exception."""
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        places = [
            f"{Path(frame.filename).relative_to(self._config.copy)}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).is_relative_to(self._config.copy)
        ]
        return f"{text} ({places[-1]})" if places else text

    def end(self, error: str = "") -> None:
        """Write the end, wait for the other ranks, and end the process without functions of `atexit`."""
        if os.getpid() != self._pid:  # a process that the script has forked
            os._exit(bool(error))
        self._write(RunEnd(self._steps, error, self._layers, self._is_seeded))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        (self._results / f"{self._config.rank}.end").touch()
        deadline = time.monotonic() + _PEER_TIMEOUT_S
        # A rank that ends closes the connections that others may still read.
        ends = [self._results / f"{rank}.end" for rank in range(self._config.world_size)]
        while not error and not all(end.exists() for end in ends) and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(0)

    def _write(self, record: StepRecord | RunEnd) -> None:
        with self._config.records.open("a", encoding="utf-8") as file:
            file.write(encode_record(record))


def _run_spawned_function(module: ModuleType) -> None:
    """Run the one process of `mp.spawn` in this process, so that its steps are recorded."""

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *_args: Any, **_kwargs: Any) -> None:
        if nprocs != 1:
            raise RuntimeError(
                f"mp.spawn starts {nprocs} processes, and the comparison needs one: pass the number of processes 1 to the script"
            )
        fn(0, *args)

    module.spawn = spawn  # type: ignore[attr-defined]


def _list_parameters(optimizer: Any) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _sample(tensor: Any) -> Any:
    """Return values of a tensor at even distances, as float64."""
    values = _get_values(tensor).reshape(-1)
    return values[:: -(-values.numel() // _MAX_VALUES) or 1].to("cpu", copy=True).double()


def _get_values(tensor: Any) -> Any:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.real if tensor.is_complex() else tensor


def _hash_tensors(torch: Any, tensors: list[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        values = _get_values(tensor).reshape(-1).contiguous().cpu()
        digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()


def _measure(tensors: list[Any]) -> float:
    """Return the norm of several tensors as one vector."""
    return float(sum(float(one.square().sum()) for one in tensors) ** 0.5)


def _divide(difference: float, size: float) -> float:
    return 0.0 if difference == 0 else difference / size if size else float("inf")


if __name__ == "__main__":
    main(sys.argv[1:])
