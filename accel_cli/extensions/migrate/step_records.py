"""Records of the optimizer steps of a training: the files of a run, their reader, and the recorder that writes them.

A run is a folder. `RANK.jsonl` has the records of a rank, one JSON object a line, in the order in which they were written:

- `{"kind": "run", "version": 1, "rank": R, "world_size": N}`, once, at the start;
- `{"kind": "step", ...}` for each step of an optimizer of torch, with the fields of `StepRecord`;
- `{"kind": "end", ...}` with the fields of `RunEnd`; missing if the process was ended from outside.

`STEP.pt` has tensors of rank 0 at that step, as `torch.save` writes them: a dict with the lists `start`, `weights` and `gradients`,
each with a 1-D float64 tensor for each parameter of the optimizer that stepped, in its order: the weights before its first step, after
this one, and the gradients of this one. Of a parameter with more than 16,384 values, they have values at even distances.

torch is used only once the recorded script has imported it.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from accel_runtime.observe.recorders import LoadedBatches

__all__ = [
    "INDEX",
    "Column",
    "Difference",
    "RunConfig",
    "RunEnd",
    "StepRecord",
    "StepRecorder",
    "encode_record",
    "read_records",
]

INDEX = "index"
"""The name of the column with the indices of a batch in its dataset."""
VERSION = 1
_MAX_VALUES = 16384
"""The number of values of a parameter that are compared; of larger ones, values at even distances."""
_MAX_DEPTH = 4
"""Levels of a batch that are searched for samples."""


@dataclass(frozen=True)
class RunConfig:
    """What a process of a run records, and where."""

    rank: int
    world_size: int
    max_steps: int
    results: str
    """The folder of the records, one file for each rank."""
    reference: str
    """The folder of the run to compare with; empty for the first one."""
    tree: str
    """The folder of the copy, beside links to the files and folders that are beside the user's folder."""
    copy: str
    """The copy of the user's folder, in which the script runs."""
    original: str
    """The user's folder, in which nothing is written."""
    is_split: bool
    """True if each batch of the script is divided over the processes."""
    changes: tuple[str, ...] = ()
    """Names of the changes of the script's computation under which it runs, to test if they explain a difference."""

    @property
    def records(self) -> Path:
        """The file of the records of this rank."""
        return Path(self.results, f"{self.rank}.jsonl")


@dataclass(frozen=True)
class Difference:
    """The differences of one step from the same step of another run, over the parameters of its optimizer."""

    weights: float
    """The largest absolute difference of a weight."""
    update: float
    """The norm of the differences of weights, divided by that of the change since the start."""
    gradients: float
    """The norm of the differences of gradients, divided by that of the gradients."""


@dataclass(frozen=True)
class Column:
    """One identity of each sample that a process consumed for a step, from one source."""

    kind: Literal["loader", "model"]
    """`loader`: a batch of a DataLoader; `model`: the inputs of a call of a module outside of any other, while gradients are on."""
    source: str
    """The line of the script that iterates over the loader, as `train.py:12`; the number of the call within the step, from 0."""
    name: str
    """`index` for indices in the dataset; otherwise the position of a tensor or list in the batch, such as `.1` or `.input_ids`."""
    rows: tuple[str, ...]
    """Indices, or hashes of the values of each sample: a row of the tensor, along its first dimension."""


@dataclass(frozen=True)
class StepRecord:
    """One step of an optimizer."""

    step: int
    loss: float | None
    """The sum of the losses of the backward passes since the step before; None without one."""
    digest: str
    """The checksum of the weights after the step."""
    weights_norm: float
    gradients: str
    """The checksum of the gradients of the step, as the optimizer reads them."""
    gradients_norm: float
    random: str
    """The checksum of the states of the random number generators after the step."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group."""
    samples: tuple[Column, ...]
    """The samples that were consumed since the step before: batches of torch's loaders that a backward pass followed, and inputs."""
    is_drawn: bool
    """True if random numbers were drawn between the last batch and the end of the step."""
    is_drawn_by_data: bool
    """True if random numbers were drawn while samples of a dataset with indices were read, in the process of the script."""
    workers: int
    """The largest number of worker processes of a loader."""
    difference: Difference | None = None
    """None if there is no such step of the other run, or its parameters have other shapes."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    steps: int
    error: str = ""
    """The exception that ended the script, with its line; empty without one."""
    layers: tuple[str, ...] = ()
    """The classes of layers in training mode whose results depend on the batch or on random numbers."""
    is_seeded: bool = False
    """True if the script sets a seed of torch."""
    has_distributed_order: bool = False
    """True if a `DistributedSampler` has shuffled, whose order is not that of a shuffling DataLoader."""
    is_sampled: bool = False
    """True if a parameter has more values than `STEP.pt` holds of it."""


def encode_record(record: StepRecord | RunEnd) -> str:
    """Return a record as a line."""
    kind = "step" if isinstance(record, StepRecord) else "end"
    return f"{json.dumps({'kind': kind, **asdict(record)})}\n"


def read_records(path: Path) -> tuple[tuple[StepRecord, ...], RunEnd | None]:
    """Return the steps of a process, and its end; None if it was ended from outside."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    # A process that is ended may leave a part of a line.
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    by_kind: dict[str, list[dict[str, Any]]] = {"run": [], "step": [], "end": []}
    for value in values:
        by_kind[value.pop("kind")].append(value)
    ends = [RunEnd(**{**value, "layers": tuple(value["layers"])}) for value in by_kind["end"]]
    return tuple(map(_parse_step, by_kind["step"])), ends[0] if ends else None


def _parse_step(value: dict[str, Any]) -> StepRecord:
    difference = value.pop("difference")
    columns = [Column(**{**column, "rows": tuple(column["rows"])}) for column in value.pop("samples")]
    return StepRecord(
        **{**value, "rates": tuple(value["rates"])},
        samples=tuple(columns),
        difference=Difference(**difference) if difference else None,
    )


class StepRecorder:
    """Recorder of the steps of this process.

    Args:
        config: What is recorded, and where.
        finish: Called after the last step that is recorded.
    """

    def __init__(self, config: RunConfig, finish: Callable[[], None]) -> None:
        self._config, self._finish, self._pid = config, finish, os.getpid()
        self._torch: Any = None
        self._steps = 0
        self._losses: list[float] = []
        self._has_backward = self._is_in_backward = False
        self._samples: list[Column] = []
        self._batches: dict[str, tuple[Column, ...]] = {}
        """The last batch of each loader that no backward pass has followed yet."""
        self._loaders: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """The sources of iterators."""
        self._depth = self._calls = 0
        self._workers = 0
        self._is_drawn_by_data = self._is_seeded = self._has_distributed_order = self._is_sampled = False
        self._last_random = ""
        self._layers: tuple[str, ...] = ()
        self._starts: dict[int, list[Any]] = {}
        """The weights before the first step of each optimizer, by its id."""
        self._results = Path(config.results)
        self._written = False

    @property
    def is_training(self) -> bool:
        """True from the first batch or backward pass on."""
        return self._steps > 0 or self._has_backward or bool(self._last_random)

    # Hooks of torch

    def watch_torch(self, torch: Any) -> None:
        """Record steps, backward passes and inputs of modules."""
        self._torch = torch
        seed, backward = torch.manual_seed, torch.autograd.backward

        @wraps(seed)
        def record_seed(*args: Any, **kwargs: Any) -> Any:
            self._is_seeded = True
            return seed(*args, **kwargs)

        @wraps(backward)
        def record_loss(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if os.getpid() == self._pid:
                if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
                    self._losses.append(float(tensors.detach().double()))
                self._take_batches()
            # Activations that are computed again are no inputs.
            self._has_backward = self._is_in_backward = True
            try:
                backward(tensors, *args, **kwargs)
            finally:
                self._is_in_backward = False

        torch.manual_seed, torch.autograd.backward = record_seed, record_loss
        hooks = sys.modules["torch.optim.optimizer"]
        hooks.register_optimizer_step_pre_hook(self._keep_start)
        hooks.register_optimizer_step_post_hook(self._record_step)
        modules = sys.modules["torch.nn.modules.module"]
        modules.register_module_forward_pre_hook(self._enter_module)
        modules.register_module_forward_hook(self._leave_module, with_kwargs=True)

    def watch_samplers(self, module: Any) -> None:
        """Record if a `DistributedSampler` shuffles."""
        iterate = module.DistributedSampler.__iter__

        @wraps(iterate)
        def record_order(sampler: Any) -> Any:
            self._has_distributed_order |= bool(sampler.shuffle)
            return iterate(sampler)

        module.DistributedSampler.__iter__ = record_order

    def watch_batches(self) -> None:
        """Record the batches of loaders, and their indices."""
        LoadedBatches(self._keep_batch, self._drop_batch, self._record_load).install()

    def _record_load(self, iterator: Any) -> None:
        self._last_random = self._hash_generators()
        self._workers = max(self._workers, iterator._num_workers)  # noqa: SLF001

    def watch_fetchers(self, module: Any) -> None:
        """Record if datasets draw random numbers in this process."""
        fetcher = module._MapDatasetFetcher  # noqa: SLF001 - reads all samples with an index (torch 2.9 to 2.13)
        fetch = fetcher.fetch

        @wraps(fetch)
        def fetch_and_compare(self_: Any, index: Any) -> Any:
            if os.getpid() != self._pid:
                return fetch(self_, index)
            before = self._hash_generators()
            batch = fetch(self_, index)
            self._is_drawn_by_data |= self._hash_generators() != before
            return batch

        fetcher.fetch = fetch_and_compare

    # Samples

    def _keep_batch(self, iterator: Any, batch: Any, index: Any) -> None:
        """Keep a batch until a backward pass follows; one that none follows, as in an evaluation, is no sample of a step."""
        if not self._torch.is_grad_enabled():  # an evaluation that may leave its loop early
            return
        if iterator not in self._loaders:
            source = self._find_line()
            number = sum(one.partition("#")[0] == source for one in self._loaders.values())
            self._loaders[iterator] = f"{source}#{number}" if number else source
        source = self._loaders[iterator]
        columns = {INDEX: rows} if (rows := _list_indices(index)) else {}
        columns |= list_columns(batch)
        self._batches[source] = tuple(Column("loader", source, name, rows) for name, rows in columns.items())

    def _drop_batch(self, iterator: Any) -> None:
        self._batches.pop(self._loaders.pop(iterator, ""), None)

    def _take_batches(self) -> None:
        for columns in self._batches.values():
            self._samples += columns
        self._batches.clear()

    def _find_line(self) -> str:
        """Return the line of the script that runs now."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as `inspect.currentframe`
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(self._config.copy):
                return f"{path.relative_to(self._config.copy)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _is_recorded(self) -> bool:
        return (
            not self._torch.compiler.is_compiling()
            and os.getpid() == self._pid
            and threading.current_thread() is threading.main_thread()
        )

    def _enter_module(self, _module: Any, _args: Any) -> None:
        if self._is_recorded():
            self._depth += 1

    def _leave_module(self, module: Any, args: Any, kwargs: Any, _output: Any) -> None:
        if not self._is_recorded():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._is_in_backward or not self._torch.is_grad_enabled():
            return
        parameters = list(module.parameters())
        if parameters and not any(one.requires_grad for one in parameters):
            return
        columns = list_columns({**dict(enumerate(args)), **kwargs})
        self._samples += [Column("model", str(self._calls), name, rows) for name, rows in columns.items()]
        self._calls += 1

    # Steps

    def _keep_start(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() == self._pid and id(optimizer) not in self._starts:
            self._starts[id(optimizer)] = [_sample(one) for one in _list_parameters(optimizer)]

    def _record_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() != self._pid or self._torch.compiler.is_compiling():
            return
        self._steps += 1
        if not self._has_backward:
            self._take_batches()
        parameters = _list_parameters(optimizer)
        gradients = [self._torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        state = {
            "start": self._starts[id(optimizer)],
            "weights": [_sample(one) for one in parameters],
            "gradients": [_sample(one) for one in gradients],
        }
        is_first_rank = self._config.rank == 0
        if is_first_rank:
            self._torch.save(state, self._results / f"{self._steps}.pt")
        if self._steps == 1:
            self._layers = self._find_layers()
        self._is_sampled |= any(one.numel() > _MAX_VALUES for one in parameters)
        current = self._hash_generators()
        record = StepRecord(
            step=self._steps,
            loss=sum(self._losses) if self._losses else None,
            digest=_hash_tensors(self._torch, parameters),
            weights_norm=_measure(state["weights"]),
            gradients=_hash_tensors(self._torch, gradients),
            gradients_norm=_measure(state["gradients"]),
            random=current,
            rates=tuple(float(group.get("lr", 0)) for group in optimizer.param_groups),
            samples=tuple(self._samples),
            is_drawn=bool(self._last_random) and current != self._last_random,
            is_drawn_by_data=self._is_drawn_by_data,
            workers=self._workers,
            difference=self._compare(state) if is_first_rank and self._config.reference else None,
        )
        self._write(encode_record(record))
        self._losses, self._samples, self._is_drawn_by_data, self._has_backward = [], [], False, False
        self._depth = self._calls = 0
        self._last_random = current
        if self._steps == self._config.max_steps:
            self._finish()

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

    def end(self, error: str = "") -> None:
        """Write the end of the run."""
        self._write(
            encode_record(
                RunEnd(
                    self._steps,
                    error,
                    self._layers,
                    self._is_seeded,
                    self._has_distributed_order,
                    self._is_sampled,
                )
            )
        )

    def _write(self, line: str) -> None:
        head = {
            "kind": "run",
            "version": VERSION,
            "rank": self._config.rank,
            "world_size": self._config.world_size,
        }
        with self._config.records.open("a", encoding="utf-8") as file:
            file.write(line if self._written else f"{json.dumps(head)}\n{line}")
        self._written = True


def list_columns(batch: Any) -> dict[str, tuple[str, ...]]:
    """Return hashes of the samples of a batch, for each tensor, array and list of texts in it, by its position.

    A list of tensors is also a column itself, whose rows are the tensors: lists of samples of different sizes are batches too.
    """
    columns: dict[str, tuple[str, ...]] = {}
    _add_columns(columns, "", batch, 0)
    return columns


def _add_columns(columns: dict[str, tuple[str, ...]], name: str, value: Any, depth: int) -> None:
    if _is_array(value):
        if rows := _hash_rows(value):
            columns[name] = rows
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if depth > _MAX_DEPTH or not isinstance(value, (Mapping, list, tuple)):
        return
    if isinstance(value, Mapping):
        items = list(value.items())
    elif value and all(isinstance(one, (str, bytes)) for one in value):
        columns[name] = tuple(_hash(repr(one).encode("utf-8", "backslashreplace")) for one in value)
        return
    else:
        items = list(enumerate(value))
        arrays = [_hash_rows(one) for one in value if _is_array(one)]
        if arrays and all(arrays) and len(arrays) == len(value):
            columns[f"{name}[]"] = tuple(_hash("".join(one).encode("ascii")) for one in arrays)
    for key, one in items:
        _add_columns(columns, f"{name}.{key}", one, depth + 1)


def _is_array(value: Any) -> bool:
    return (
        hasattr(value, "shape")
        and hasattr(value, "dtype")
        and hasattr(value, "tobytes") | hasattr(value, "detach")
    )


def _hash_rows(value: Any) -> tuple[str, ...]:
    """Return a hash of each row of a tensor or an array; none of activations, parameters and values without rows."""
    if not len(value.shape) or not value.shape[0]:
        return ()
    if hasattr(value, "detach"):
        torch = sys.modules["torch"]
        if value.grad_fn is not None or isinstance(value, torch.nn.Parameter):
            return ()
        try:
            value = value.detach().cpu().contiguous()
            value = value.reshape(len(value), -1).view(torch.uint8).numpy()
        except (RuntimeError, TypeError, NotImplementedError):  # sparse, on the meta device, of a subclass
            return ()
    return tuple(_hash(row.tobytes()) for row in value)


def _hash(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=8).hexdigest()


def _list_indices(index: Any) -> tuple[str, ...]:
    """Return the indices of a batch as texts; none of a dataset without indices."""
    index = getattr(index, "indices", index)  # a message to workers of a prepared loader
    indices = list(index) if isinstance(index, (list, tuple)) else [index]
    return () if any(one is None for one in indices) else tuple(map(str, indices))


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
    return sys.modules["torch"].view_as_real(tensor) if tensor.is_complex() else tensor


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
