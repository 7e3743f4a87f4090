"""A callback that connects a Trainer of transformers with its run: metrics, preemption, and resuming."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from accel_runtime.accelerator.training_steps import PREEMPTION
from accel_runtime.checkpoint.project_checkpoints import RunOrigin
from accel_runtime.environment.installation import format_install
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.text import parse_json, print_note
from accel_runtime.foundation.torch_internals import default_store
from accel_runtime.observe.heartbeat import heartbeat
from accel_runtime.observe.progress import LoaderEpoch
from accel_runtime.observe.recording import rank_recorder

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"AccelCallback needs transformers, which is not installed in the environment of {sys.executable}. Install it: "
        f"{format_install('transformers')}"
    ) from error

__all__ = ["AccelCallback"]

_MARK = "accel.json"
"""File of a complete checkpoint: the run that wrote it, and the sizes of all files."""
_PREFIX = "checkpoint-"
_LOG = logging.getLogger("accel_runtime.transformers")


class AccelCallback(TrainerCallback):  # type: ignore[misc]
    """Record a Trainer in the run of `accel launch`, save at a preemption signal, and resume.

    One line after the Trainer is made, for `Trainer` and its subclasses, such as those of TRL:

        trainer.add_callback(AccelCallback(trainer))

    - Logged values and metrics are shown by `accel top` and `accel report`; so are epochs and their batches.
    - At SIGTERM or SIGUSR1 the Trainer saves a checkpoint after the current step, whatever its save strategy, and `train()` returns.
    - `train()` without `resume_from_checkpoint` goes on from the newest complete checkpoint of `output_dir`: with `accel launch
      --resume` of any run, after a restart of the processes or a requeued job of this run. `train(resume_from_checkpoint=True)` takes the
      newest complete one as well; False and a path are the Trainer's.
      A checkpoint is complete if all files have the sizes with which it was saved; one without the callback is checked by its formats.

    Args:
        trainer: The Trainer that gets the callback.
    """

    def __init__(self, trainer: Any) -> None:
        self.preempted = False
        """True once the training has ended because of a preemption signal; the same on all processes."""
        self._trainer = trainer
        self._origin = RunOrigin.from_env(os.environ)
        self._asked = Settings.from_env(os.environ).resume
        self._progress = heartbeat()
        self._recorder = rank_recorder(trainer.args.process_index)
        self._epoch: LoaderEpoch | None = None
        self._saving_since = 0.0
        self._preemption = _Preemption()
        trainer.train = self._resume_first(trainer.train)

    # Resuming --------------------------------------------------------------------------

    def _resume_first(self, train: Any) -> Any:
        """Return `train` of the Trainer that continues from the newest complete checkpoint, if the script names none."""

        @functools.wraps(train)
        def train_or_resume(
            resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
        ) -> Any:
            checkpoint: str | bool | None = resume_from_checkpoint
            if checkpoint is None or checkpoint is True:
                found = _share(self._find_checkpoint(any_run=checkpoint is True))
                checkpoint = found or checkpoint
            if self._recorder is not None and isinstance(checkpoint, str):
                self._recorder.record_checkpoint("load", checkpoint, 0.0)
            return train(checkpoint, *args, **kwargs)

        return train_or_resume

    def _find_checkpoint(self, *, any_run: bool) -> str | None:
        """Return the checkpoint to continue from; None on other ranks than the first, and if there is none."""
        if self._trainer.args.process_index != 0 or not (any_run or self._asked or self._origin.may_resume):
            return None
        folder = Path(self._trainer.args.output_dir)
        for path in reversed(_list_checkpoints(folder)):
            mark = _read_mark(path)
            if not (any_run or self._asked or (mark is not None and self._origin.wrote(mark["run"]))):
                continue
            if problem := _find_damage(path, mark):
                print_note(f"{path} is not complete: {problem}. An older checkpoint is used, if there is one")
                continue
            print_note(f"resuming from {path}")
            return str(path)
        if self._asked:
            print_note(f"no complete checkpoint in {folder} yet: starting from the beginning")
        return None

    # Events of the Trainer -------------------------------------------------------------

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._preemption.begin()

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._preemption.end()

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._progress is not None and self._epoch is not None:
            self._progress.end_epoch(self._epoch, is_finished=True)
            self._epoch = None

    @override
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        try:
            length = len(kwargs["train_dataloader"])
        except (KeyError, TypeError):  # a stream without a length
            length = 0
        epoch = state.epoch or 0.0
        if self._progress is not None:
            self._epoch = self._progress.begin_epoch(
                LoaderEpoch(int(epoch), round(epoch % 1 * length), length)
            )

    @override
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count_batch()

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count_batch()
        if self._preemption.check(state.global_step):
            self.preempted = True
            control.should_save = control.should_training_stop = True
        self._saving_since = time.monotonic()

    @override
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record(kwargs.get("logs"), state.global_step)

    @override
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saving_since = time.monotonic()  # a save follows the evaluation of the same step

    @override
    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self._record(metrics, state.global_step)

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir, f"{_PREFIX}{state.global_step}")
        if _is_distributed():
            dist.barrier()  # each rank has written its random states
        if args.should_save and path.is_dir():
            _write_mark(path, self._origin.identity)
        if self._recorder is not None:
            self._recorder.record_checkpoint("save", str(path), time.monotonic() - self._saving_since)

    def _count_batch(self) -> None:
        if self._epoch is not None:
            self._epoch.returned += 1

    def _record(self, values: Any, step: int) -> None:
        if self._recorder is not None and isinstance(values, Mapping):
            self._recorder.record_metrics(values, step)


class _Preemption:
    """The step after which all ranks stop because one of them has received a preemption signal.

    A rank that has received it sets the step after the next one in the store of the process group. Every other rank reads it in time: it
    cannot end the next step before this rank has taken part in its backward pass.
    """

    def __init__(self) -> None:
        self._is_received = False
        self._last_step: int | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._trainings = 0

    def begin(self) -> None:
        """Handle the signals until the end of the training; handlers of the script are called too."""
        self._trainings += 1
        self._is_received, self._last_step = False, None
        if threading.current_thread() is threading.main_thread():
            for number in PREEMPTION:
                self._previous[number] = signal.signal(number, self._receive)

    def end(self) -> None:
        """Restore the handlers of the script."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._is_received = True
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def check(self, step: int) -> bool:
        """Return whether the training ends after this step; the same on all ranks, which all call it after each step."""
        if not _is_distributed():
            return self._is_received
        store = default_store()
        key = f"accel/preempted/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{self._trainings}"
        if self._last_step is None:
            if self._is_received:
                store.compare_set(key, "", str(step + 2))
            if store.check([key]):
                self._last_step = int(store.get(key))
        return self._last_step is not None and step >= self._last_step


# Checkpoints of a Trainer ------------------------------------------------------------------


def _list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of checkpoints, the oldest first."""
    paths = folder.glob(f"{_PREFIX}*") if folder.is_dir() else ()
    numbered = {
        int(number): path
        for path in paths
        if (number := path.name.removeprefix(_PREFIX)).isdecimal() and path.is_dir()
    }
    return [numbered[number] for number in sorted(numbered)]


def _list_sizes(path: Path) -> dict[str, int]:
    return {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != _MARK
    }


def _write_mark(path: Path, run: Mapping[str, str]) -> None:
    """Mark a checkpoint as complete; a full disk does not end the training."""
    new = path / f"{_MARK}.new"
    try:
        new.write_text(json.dumps({"version": 1, "run": dict(run), "files": _list_sizes(path)}), "utf-8")
        new.replace(path / _MARK)
    except OSError as error:
        _LOG.warning("%s cannot be marked as complete: %s", path, error.strerror)


def _read_mark(path: Path) -> dict[str, Any] | None:
    """Return the mark of a complete checkpoint; None without a valid one."""
    try:
        mark = parse_json((path / _MARK).read_text("utf-8"))
        valid = isinstance(mark["run"], dict) and all(
            isinstance(size, int) for size in mark["files"].values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return mark if valid else None


def _find_damage(path: Path, mark: Mapping[str, Any] | None) -> str:
    """Return why a checkpoint is not complete; an empty text if it is.

    One without a mark was written without this callback, or its writer was killed. The Trainer writes its own state last, and truncated
    files are found by their format.
    """
    if mark is not None:
        sizes = _list_sizes(path)
        wrong = [name for name, size in mark["files"].items() if sizes.get(name) != size]
        return f"{wrong[0]} is missing or has another size" if wrong else ""
    try:
        parse_json((path / "trainer_state.json").read_text("utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json is missing or unreadable"
    files = [file for file in path.rglob("*") if file.is_file()]
    broken = [file for file in files if not _is_whole(file)]
    return f"{broken[0].name} is truncated" if broken else ""


def _is_whole(file: Path) -> bool:
    """Return False for a file of tensors that is truncated, by its header or its directory."""
    if file.suffix == ".safetensors":
        with file.open("rb") as opened:
            try:
                header = int.from_bytes(opened.read(8), "little")
                entries = parse_json(opened.read(min(header, 1 << 27)))
                end = max(
                    (e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"), default=0
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                return False
        return bool(file.stat().st_size == 8 + header + end)
    return (
        file.suffix not in {".pt", ".pth", ".bin"}
        or file.name == "training_args.bin"
        or zipfile.is_zipfile(file)
    )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _share(found: str | None) -> str | None:
    """Return the choice of the first rank."""
    if not _is_distributed():
        return found
    values: Sequence[str | None] = [found]
    dist.broadcast_object_list(values, src=0)  # type: ignore[arg-type]
    return values[0]
