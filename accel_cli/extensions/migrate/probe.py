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

from accel_cli.extensions.migrate.counter_runs import apply_changes
from accel_cli.extensions.migrate.step_records import RunConfig, RunEnd, write_end
from accel_cli.worker import execute, prepare_script, print_exception
from accel_runtime.observe.import_hooks import call_after_import, call_after_torch_import
from accel_runtime.observe.step_records.digests import digest_generators
from accel_runtime.observe.step_records.record import Selection
from accel_runtime.observe.step_records.recorder import Recorder

__all__ = ["Probe", "ScriptObserver", "main"]

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
    text, *sys.argv = arguments
    config = RunConfig(**json.loads(text))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    probe = Probe(config)
    sys.addaudithook(probe.protect_files)
    random.seed(_SEED)
    call_after_import("numpy.random", lambda module: module.seed(_SEED))
    call_after_torch_import(probe.prepare_torch)
    probe.observer.install()
    call_after_import("safetensors", probe.watch_safetensors)
    call_after_import("accel_runtime.accelerator.accelerator", probe.split_batches)
    # After the recorder, which records what changed losses and orders are.
    apply_changes(config.changes, config.world_size, lambda: probe.recorder.has_begun)
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
    """The recorder of this process, and the changes of the script's world."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._pid = config, os.getpid()
        config.folder.mkdir(parents=True, exist_ok=True)
        environ = {"RANK": str(config.rank), "WORLD_SIZE": str(config.world_size)}
        self.recorder = Recorder(config.folder, Selection(last=config.max_steps), environ, self._end_step)
        self.observer = ScriptObserver()
        self._steps = 0
        self._is_protecting = False
        self._results = Path(config.results)
        temporary = Path(tempfile.gettempdir()).resolve()
        is_in_original = temporary.is_relative_to(config.original)
        self._writable: tuple[str | Path, ...] = (
            config.copy,
            config.results,
            *([temporary] if is_in_original else []),
        )

    # Changes of the script

    def prepare_torch(self, torch: Any) -> None:
        """Seed torch, let it compute the same numbers in each run, and record the steps."""
        torch.manual_seed(_SEED)
        torch.set_num_threads(1)
        torch.backends.cudnn.deterministic = True
        self.observer.watch_seeds(torch)
        self.recorder.install(torch)
        torch.save = self._replace_link_of(torch.save, "f")
        call_after_import("torch.multiprocessing", _run_spawned_function)

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

    def _end_step(self, step: int) -> None:
        self._steps = step
        if step == 1:
            self.observer.find_layers()
        if step == self._config.max_steps:
            self.end()

    def end(self, error: str = "") -> None:
        """Write the end, wait for the other ranks, and end the process without functions of `atexit`."""
        if os.getpid() != self._pid:  # a process that the script has forked
            os._exit(bool(error))
        self.recorder.end()
        write_end(self._config.folder, self.observer.build_end(self._steps, error))
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


class ScriptObserver:
    """Observer of what a script does that is no part of a step."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._torch: Any = None
        self._layers: tuple[str, ...] = ()
        self._workers = 0
        self._is_seeded = self._has_distributed_order = self._is_drawn_by_data = False

    def install(self) -> None:
        """Install the hooks once the loaders are imported."""
        call_after_import("torch.utils.data.distributed", self._watch_samplers)
        call_after_import("torch.utils.data._utils.fetch", self._watch_fetchers)
        call_after_import("torch.utils.data.dataloader", self._watch_loaders)

    def watch_seeds(self, torch: Any) -> None:
        """Observe if the script sets a seed of torch."""
        self._torch, seed = torch, torch.manual_seed

        @wraps(seed)
        def observe_seed(*args: Any, **kwargs: Any) -> Any:
            self._is_seeded = True
            return seed(*args, **kwargs)

        torch.manual_seed = observe_seed

    def _watch_samplers(self, module: Any) -> None:
        iterate = module.DistributedSampler.__iter__

        @wraps(iterate)
        def observe_order(sampler: Any) -> Any:
            self._has_distributed_order |= bool(sampler.shuffle)
            return iterate(sampler)

        module.DistributedSampler.__iter__ = observe_order

    def _watch_fetchers(self, module: Any) -> None:
        fetcher = module._MapDatasetFetcher  # noqa: SLF001 - reads all samples with an index (torch 2.9 to 2.13)
        fetch = fetcher.fetch

        @wraps(fetch)
        def fetch_and_compare(self_: Any, index: Any) -> Any:
            if os.getpid() != self._pid:
                return fetch(self_, index)
            before = digest_generators()
            batch = fetch(self_, index)
            self._is_drawn_by_data |= digest_generators() != before
            return batch

        fetcher.fetch = fetch_and_compare

    def _watch_loaders(self, module: Any) -> None:
        base = module._BaseDataLoaderIter  # noqa: SLF001 - the class of all its iterators (torch 2.9 to 2.13)
        create = base.__init__

        @wraps(create)
        def create_and_observe(iterator: Any, loader: Any) -> None:
            create(iterator, loader)
            self._workers = max(self._workers, loader.num_workers)

        base.__init__ = create_and_observe

    def find_layers(self) -> None:
        """Find the classes of BatchNorm and dropout layers in training mode."""
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
        self._layers = tuple(sorted(found))

    def build_end(self, steps: int, error: str) -> RunEnd:
        """Return the end of the run."""
        return RunEnd(
            steps,
            error,
            self._layers,
            self._is_seeded,
            self._has_distributed_order,
            self._is_drawn_by_data,
            self._workers,
        )


def _run_spawned_function(module: ModuleType) -> None:
    """Run the one process of `mp.spawn` in this process, so that its steps are recorded."""

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *_args: Any, **_kwargs: Any) -> None:
        if nprocs != 1:
            raise RuntimeError(
                f"mp.spawn starts {nprocs} processes, and the comparison needs one: pass the number of processes 1 to the script"
            )
        fn(0, *args)

    module.spawn = spawn  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1:])
