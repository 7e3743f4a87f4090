"""Objects and enumerations that scripts pass to `Accelerator`, under the names of Accelerate."""

from __future__ import annotations

import copy
import enum
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from typing_extensions import override

from accel_runtime.environment.locations import StoreURL, has_scheme, is_url, normalize_location
from accel_runtime.environment.settings import find_nearest
from accel_runtime.foundation.keywords import check_keywords, list_keywords

__all__ = [
    "RNG_TYPES",
    "AutocastKwargs",
    "Configuration",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "PrecisionType",
    "ProjectConfiguration",
    "TokenBudget",
    "changed_fields",
    "find_handlers",
    "parse_rng_types",
]


class DistributedType(str, enum.Enum):
    """Kinds of distribution. accel uses `NO`, `MULTI_*`, `FSDP` and `XLA`; the others exist for comparisons."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796 - an alias
    """The old name of `XLA`."""
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class PrecisionType(str, enum.Enum):
    """Number formats; `FP8` exists for comparisons."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


_OPEN_SWITCHES = ("bool | None", bool | None)
_SWITCHES = ("bool", bool, *_OPEN_SWITCHES)
"""Types of boolean fields, as text in modules whose annotations are not evaluated."""


class _Frozen(NamedTuple):
    """An object whose fields have been read."""

    why: str
    cure: str
    assignable: frozenset[str]


class Configuration:
    """Base of dataclasses that validate assigned fields like the constructor does.

    A rejected assignment keeps the old value. Subclasses override `_check`. The `Accelerator` freezes an object once it has
    read it. See docs/design/configuration.md.
    """

    # A slot keeps `vars()`, which scripts print, copy and send, free of anything but fields.
    __slots__ = ("_frozen",)

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Return an object without fields; raise TypeError if a keyword does not exist."""
        known = list_keywords(cls.__init__) if options else None
        if known is not None:
            check_keywords(cls.__name__, options, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_switches()
        self._check()

    def _check_switches(self) -> None:
        """Raise ValueError if a boolean field has another value: text such as 'False' would count as True."""
        for item in fields(cast("Any", self)):
            value = getattr(self, item.name)
            if item.type not in _SWITCHES or (value is None and item.type in _OPEN_SWITCHES):
                continue
            if isinstance(value, str) or value not in (True, False):
                choices = "True, False or None" if item.type in _OPEN_SWITCHES else "True or False"
                raise ValueError(f"Invalid {type(self).__name__}.{item.name} {value!r}: expected {choices}.")

    def _check(self) -> None:
        """Raise ValueError if fields contradict each other or a value is invalid."""

    def __setattr__(self, name: str, value: Any) -> None:
        names: list[str] = list(getattr(self, "__dataclass_fields__", ()))
        if name not in names and not name.startswith("_"):
            suggestion = find_nearest(name, names)
            hint = f"Did you mean {suggestion}?" if suggestion else f"Its fields are {', '.join(names)}."
            raise AttributeError(f"Cannot set {type(self).__name__}.{name}: it has no such field. {hint}")
        if name not in vars(self) or name.startswith("_"):  # inside the constructor
            object.__setattr__(self, name, value)
            return
        before = vars(self)[name]
        object.__setattr__(self, name, value)
        try:
            self._check_switches()
            self._check()
            if getattr(self, name) != before:
                self._refuse_change(name)
        except Exception:
            object.__setattr__(self, name, before)
            raise

    def _refuse_change(self, name: str) -> None:
        """Raise `RuntimeError` if an assignment to a field comes too late."""
        frozen: _Frozen | None = getattr(self, "_frozen", None)
        if frozen is not None and name not in frozen.assignable:
            raise RuntimeError(f"Cannot set {type(self).__name__}.{name}: {frozen.why}. {frozen.cure}.")

    def freeze(self, why: str, cure: str, *, but: Collection[str] = ()) -> None:
        """Refuse to change fields from now on: an assignment would have no effect.

        Args:
            why: Why it has none.
            cure: What to do instead, as an imperative.
            but: The fields that are read whenever they are used, which can be assigned at any time.
        """
        object.__setattr__(self, "_frozen", _Frozen(why, cure, frozenset(but)))

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, copied."""
        return copy.deepcopy(vars(self))


@dataclass
class ProjectConfiguration(Configuration):
    """Directories of a project, and the names and number of its checkpoints.

    Raises:
        ValueError: If the limit or `store_every` is below 1, a number is negative, there is a `node_dir` and names are not automatic, or
            a URL has a scheme that is not known.
    """

    project_dir: str | os.PathLike[str] | None = None
    """The directory of the project, or a URL such as `s3://bucket/run`, `gs://bucket/run` or `az://container/run`."""
    logging_dir: str | os.PathLike[str] | None = None
    """The directory of tracker files; None means `project_dir`, if it is not a URL."""
    automatic_checkpoint_naming: bool = False
    """If True, `save_state` names checkpoints `checkpoints/checkpoint_0`, `checkpoint_1`, ... in `project_dir`."""
    total_limit: int | None = None
    """The number of these checkpoints to keep; older ones are removed after a save. None keeps all."""
    iteration: int = 0
    """The number of the next checkpoint; existing numbers are skipped."""
    save_on_each_node: bool = False
    """If True, `Accelerator.save` writes on every node, not only on the first."""
    async_save: bool = False
    """If True, `save_state` writes in the background by default; its buffers are allocated after the first step."""
    node_dir: str | os.PathLike[str] | None = None
    """A directory on the disk of each node, where most saves go; None means that of the profile, or none."""
    store_every: int | None = None
    """The number of saves of which one goes to `project_dir` if there is a `node_dir`; None means that of the profile, 10."""

    @override
    def _check(self) -> None:
        if self.node_dir is not None and not self.automatic_checkpoint_naming:
            raise ValueError(
                f"Invalid node_dir {os.fspath(self.node_dir)!r}: only checkpoints with automatic names can be on the disks of nodes. "
                "Set automatic_checkpoint_naming=True, or leave out node_dir."
            )
        if self.node_dir is not None and "://" in os.fspath(self.node_dir):
            raise ValueError(
                f"Invalid node_dir {os.fspath(self.node_dir)!r}: it is on the disk of each node. Pass a local directory; project_dir "
                "may be a URL."
            )
        if self.store_every is not None and self.store_every < 1:
            raise ValueError(f"Invalid store_every {self.store_every}: expected at least 1, or None.")
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"Invalid total_limit {self.total_limit}: expected at least 1, or None.")
        if self.iteration < 0:
            raise ValueError(f"Invalid iteration {self.iteration}: expected at least 0.")
        if self.project_dir is not None:
            normalize_location(self.project_dir)
        if self.logging_dir is not None and has_scheme(self.logging_dir):
            raise ValueError(
                f"Invalid logging_dir {os.fspath(self.logging_dir)!r}: trackers write files. Pass a local directory."
            )

    @property
    def checkpoints(self) -> Path | StoreURL | None:
        """Return the directory of checkpoints with automatic names, or its URL."""
        if self.project_dir is None:
            return None
        if is_url(self.project_dir):
            return StoreURL(normalize_location(self.project_dir)) / "checkpoints"
        return Path(self.project_dir) / "checkpoints"

    @property
    def logs(self) -> Path | None:
        """Return the directory of tracker files: `logging_dir`, else `project_dir` if it is not a URL."""
        directory = self.project_dir if self.logging_dir is None else self.logging_dir
        return None if directory is None or is_url(directory) else Path(directory)

    def continue_after(self, number: int) -> None:
        """Give the next checkpoint the number after that of the newest one."""
        self.iteration = number + 1

    def place(self, project_dir: str | os.PathLike[str] | None) -> None:
        """Set the project directory to that of the `Accelerator`; raise ValueError if both exist and differ."""
        if project_dir is None:
            return
        if self.project_dir is not None and Path(self.project_dir) != Path(project_dir):
            raise ValueError(
                f"project_dir={os.fspath(project_dir)!r} and ProjectConfiguration(project_dir="
                f"{os.fspath(self.project_dir)!r}) contradict each other. Pass only one."
            )
        self.project_dir = project_dir


class KwargsHandler:
    """Base of keyword objects; a script may derive its own plain dataclass."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, copied."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return changed_fields(self)


def changed_fields(handler: object) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, and all attributes of another object."""
    defaults = {
        name: item.default_factory() if callable(item.default_factory) else item.default
        for name, item in getattr(handler, "__dataclass_fields__", {}).items()
    }
    return {k: value for k, value in vars(handler).items() if k not in defaults or value != defaults[k]}


@dataclass
class AutocastKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.autocast`, and the output dtype of prepared models."""

    enabled: bool = True
    cache_enabled: bool | None = None
    fp32_outputs: bool = True
    """If True, half-precision outputs of a model are converted to float32; False avoids the copy of large logits."""


class DDPCommunicationHookType(Enum):
    """Communication hooks of DDP: none, rounding to a half-precision format, or compression by PowerSGD."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class DistributedDataParallelKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`; `bucket_cap_mb` is in MiB.

    Raises:
        ValueError: If `check_reduction` is set, which torch ignores; the hook is unknown, or `batched_power_sgd`, which
            fails in torch; or a wrapper or options are set without a hook.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """The communication hook; a value of `DDPCommunicationHookType`, or its text."""
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """`fp16` or `bf16`: gradients are rounded to it before the hook."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of torch's `PowerSGDState`, such as `matrix_approximation_rank`."""

    @override
    def _check(self) -> None:
        if self.check_reduction:
            raise ValueError(
                "check_reduction is not supported: torch has ignored it since 1.0. Leave it out."
            )
        hook, wrapper = (_parse_hook(self, name) for name in ("comm_hook", "comm_wrapper"))
        kinds = DDPCommunicationHookType
        if hook is kinds.BATCHED_POWER_SGD:
            raise ValueError(
                "comm_hook='batched_power_sgd' is not supported: torch's batched_powerSGD_hook fails with an AssertionError "
                "when it starts to compress (torch 1.13 to 2.13). Use comm_hook='power_sgd'."
            )
        if wrapper not in {kinds.NO, kinds.FP16, kinds.BF16}:
            raise ValueError(f"Invalid comm_wrapper {wrapper.value!r}: expected no, fp16 or bf16.")
        if wrapper is not kinds.NO and hook is kinds.NO:
            raise ValueError(
                f"comm_wrapper={wrapper.value!r} needs a hook to wrap. Set comm_hook={wrapper.value!r} instead."
            )
        if self.comm_state_option and hook is not kinds.POWER_SGD:
            raise ValueError(
                f"comm_state_option needs comm_hook='power_sgd', not {hook.value!r}. Leave it out."
            )

    @override
    def to_dict(self, ignore_keys: Iterable[str] = _HOOK_FIELDS) -> dict[str, Any]:
        """Return the fields by name, copied, without those of the hook, which are not arguments of DDP."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    @override
    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of DDP that differ from their defaults."""
        return {name: value for name, value in changed_fields(self).items() if name not in _HOOK_FIELDS}


@dataclass
class GradScalerKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.amp.GradScaler`, which fp16 uses."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`; they override the profile."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


class TokenBudget(NamedTuple):
    """Budget of tokens of a batch, and how batches are packed."""

    max_tokens: int
    """The largest cost of a batch."""
    balance: bool = True
    """If True, all batches of a window have nearly the same cost; otherwise each is filled before the next one."""
    padded: bool = True
    """If True, the cost of a batch is its number of samples times its longest one; otherwise the sum of their lengths."""
    window: int = 4096
    """The number of samples of the order that are packed together."""

    def count_positions(self, lengths: Sequence[int]) -> int:
        """Return the cost of a batch of samples of these lengths."""
        if self.padded:
            return len(lengths) * max(lengths, default=0)
        return sum(lengths)


@dataclass
class DataLoaderConfiguration(Configuration):
    """Options of sharded loaders, for `Accelerator(dataloader_config=...)`.

    Raises:
        ValueError: If `max_tokens` or `window` is not an integer of at least 1, or `length` is neither a function, the name of a
            column nor a sequence.
    """

    split_batches: bool = False
    """If True, the batch size of a loader is the global one, and is split over the processes."""
    dispatch_batches: bool | None = None
    """If True, the main process reads batches for all; otherwise every process reads, also iterable datasets."""
    even_batches: bool = True
    """If True, the last global batch is padded with samples from the start of the epoch, so that shapes are equal; otherwise
    it is split evenly, and gradients are weighted by the number of samples."""
    use_seedable_sampler: bool = False
    """If True, the order that torch's `RandomSampler` draws depends on `data_seed` and the epoch number only."""
    data_seed: int | None = None
    """The seed of that order; None means the initial seed of torch on the main process."""
    non_blocking: bool = False
    """If True, copies of batches to the device do not block; only loaders with `pin_memory` support this."""
    use_stateful_dataloader: bool = False
    """If True, `load_state` resumes loaders after the last batch; otherwise at the start of the epoch, for scripts that skip
    batches. Every prepared loader has a `state_dict`."""
    max_tokens: int | None = None
    """The largest number of tokens in a batch of one process, padding included: batches are then built from the samples by their
    length, and gradients are weighted by tokens. None keeps the batches of the script."""
    length: Callable[[Any], int] | str | Sequence[int] | None = None
    """The number of tokens of each sample: a function of a sample, the name of a column of the dataset, or the numbers. Without
    `max_tokens`, it is used to show the share of padding only."""
    balance: bool = True
    """If True, all batches of a window of `max_tokens` have nearly the same cost, so that processes wait least for each other;
    otherwise each is filled before the next one."""
    padded: bool = True
    """If True, the script pads the samples of a batch to the longest one, and padding counts in `max_tokens`; False is for scripts
    that concatenate them."""
    window: int = 4096
    """The number of samples of the order that are packed into batches of `max_tokens` together, and shuffled within."""

    @override
    def _check(self) -> None:
        if callable(
            getattr(self.length, "tolist", None)
        ):  # an array, which has no truth value when it is compared
            object.__setattr__(self, "length", tuple(cast("Any", self.length).tolist()))
        for name in ("max_tokens", "window"):
            number: Any = getattr(self, name)
            is_integer = isinstance(number, int) and not isinstance(number, bool)
            if not (is_integer and number >= 1) and not (name == "max_tokens" and number is None):
                raise ValueError(
                    f"Invalid DataLoaderConfiguration.{name} {number!r}: expected an integer of at least 1. Pass a number of "
                    f"{'tokens' if name == 'max_tokens' else 'samples'}."
                )
        if self.length is not None and not callable(self.length) and not hasattr(self.length, "__len__"):
            raise ValueError(
                f"Invalid DataLoaderConfiguration.length {self.length!r}: expected a function of a sample, the name of a column, or "
                "the length of each sample. Pass one of them."
            )

    @property
    def token_budget(self) -> TokenBudget | None:
        """Return the budget of tokens of a batch; None without one."""
        if self.max_tokens is None:
            return None
        return TokenBudget(self.max_tokens, self.balance, self.padded, self.window)


@dataclass
class GradientAccumulationPlugin(Configuration, KwargsHandler):
    """Options of gradient accumulation, for `Accelerator(gradient_accumulation_plugin=...)`.

    Raises:
        ValueError: If `num_steps` is below 1, or not an integer.
    """

    num_steps: int = 1
    """The number of micro-batches per optimizer step; None, the default of Accelerate, becomes 1."""
    adjust_scheduler: bool = True
    """If True, calls of a prepared scheduler inside an accumulation cycle count in its `_step_count`, for schedules in
    micro-batches. The learning rate changes once per cycle either way."""
    sync_with_dataloader: bool = True
    """If True, the last micro-batch of an epoch completes its cycle; with False cycles continue across epochs."""
    sync_each_batch: bool = False
    """If True, gradients are averaged over the processes after every micro-batch, which needs more communication and less
    memory."""

    @override
    def _check(self) -> None:
        steps: Any = self.num_steps
        if steps is None:
            steps = 1
            object.__setattr__(self, "num_steps", steps)
        if isinstance(steps, bool) or not isinstance(steps, Integral):
            raise ValueError(  # noqa: TRY004 - invalid values of all options raise ValueError
                f"Invalid gradient_accumulation_steps {steps!r}: expected an integer of at least 1."
            )
        if self.num_steps < 1:
            raise ValueError(f"Invalid gradient_accumulation_steps {self.num_steps}: expected at least 1.")


def _parse_hook(kwargs: DistributedDataParallelKwargs, name: str) -> DDPCommunicationHookType:
    """Convert a field to a member of the enumeration, and return it."""
    value = getattr(kwargs, name)
    if not isinstance(value, DDPCommunicationHookType):
        choices = [kind.value for kind in DDPCommunicationHookType]
        if value not in choices:
            raise ValueError(f"Invalid {name} {value!r}: expected one of {', '.join(choices)}.")
        value = DDPCommunicationHookType(value)
        object.__setattr__(kwargs, name, value)
    return value


def find_handlers(
    handlers: Iterable[object] | None, kinds: Sequence[type[KwargsHandler]]
) -> dict[type[KwargsHandler], Any]:
    """Return handlers by type; raise an error if a type is unknown or used twice."""
    by_type: dict[type[KwargsHandler], Any] = {}
    for handler in handlers or ():
        kind = next((kind for kind in kinds if isinstance(handler, kind)), None)
        if kind is None:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise TypeError(f"Invalid kwargs_handlers entry {handler!r}: expected one of {names}.")
        if kind in by_type:
            raise ValueError(f"kwargs_handlers contains several {kind.__name__}: at most one is allowed.")
        by_type[kind] = handler
    return by_type


RNG_TYPES = ("generator", "torch", "cuda", "xpu", "xla")
"""Values of `Accelerator(rng_types=...)`. Loaders always share their order, so `generator` has no effect."""


def parse_rng_types(kinds: Iterable[str] | None) -> tuple[str, ...]:
    """Return the kinds of generators in `rng_types`; raise ValueError if one is unknown."""
    kinds = tuple(kinds or ())
    for kind in kinds:
        if kind not in RNG_TYPES:
            raise ValueError(f"Invalid rng_types entry {kind!r}: expected one of {', '.join(RNG_TYPES)}.")
    return kinds
