"""Changes of what a script computes, under which `accel migrate --verify` runs it again to test the cause of a difference.

Each removes one thing that may differ between one process and two. The cause of a difference is named only if it is gone then.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import FrameType, ModuleType
from typing import Any, Final

from accel_runtime.observe.import_hooks import call_after_import

__all__ = ["DATA_DRAWS", "DRAWS", "NORMS", "ORDER", "PADDING", "SUM", "apply_changes"]

ORDER: Final = "order"
"""`DistributedSampler` shuffles as a DataLoader does."""
DRAWS: Final = "draws"
"""Constants instead of random numbers of torch in the step, and no dropout."""
DATA_DRAWS: Final = "data draws"
"""Each sample of a dataset draws from generators that are seeded with its index."""
NORMS: Final = "norms"
"""BatchNorm normalizes by its running statistics, which stay as they are."""
PADDING: Final = "padding"
"""Prepared loaders pad no batch, as with `even_batches=False`."""
SUM: Final = "sum"
"""Losses are multiplied by the number of processes."""
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_FACTORIES = (
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "normal",
    "bernoulli",
    "randint",
    "randint_like",
    "multinomial",
)
_METHODS = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "bernoulli", "multinomial")
_CONSTANT = 0.5


def apply_changes(changes: tuple[str, ...], world_size: int, is_training: Callable[[], bool]) -> None:
    """Apply changes to modules as soon as the script has imported them.

    Args:
        changes: Names of the changes.
        world_size: The number of processes.
        is_training: Returns True from the first step of the training on; random numbers are constants only then.
    """
    modules: Mapping[str, tuple[str, Callable[[Any], None]]] = {
        ORDER: ("torch.utils.data.distributed", _share_order),
        DRAWS: ("torch", lambda torch: _fix_draws(torch, is_training)),
        DATA_DRAWS: ("torch.utils.data._utils.fetch", _seed_samples),
        NORMS: ("torch.nn.functional", _freeze_norms),
        PADDING: ("accel_runtime.foundation.options", _leave_out_padding),
        SUM: ("torch", lambda torch: _scale_losses(torch, world_size)),
    }
    for change in changes:
        call_after_import(*modules[change])


def _share_order(module: ModuleType) -> None:
    sampler_type: Any = module.DistributedSampler
    iterate = sampler_type.__iter__

    @wraps(iterate)
    def iterate_as_loader(sampler: Any) -> Any:
        if not sampler.shuffle or sampler.num_replicas != 1:
            return iterate(sampler)
        return iter(sys.modules["torch.utils.data"].RandomSampler(sampler.dataset))

    sampler_type.__iter__ = iterate_as_loader


def _fix_draws(torch: Any, is_training: Callable[[], bool]) -> None:
    functional = torch.nn.functional

    def skip(dropout: Any) -> Any:
        @wraps(dropout)
        def return_input(input: Any, *_args: Any, **_kwargs: Any) -> Any:  # noqa: A002 - the name of torch
            return input

        return return_input

    def fill(draw: Any) -> Any:
        @wraps(draw)
        def draw_constants(*args: Any, **kwargs: Any) -> Any:
            if not is_training() or _is_loading():
                return draw(*args, **kwargs)
            # For the shape; generators stay as they are, so that later draws are those of both runs.
            with torch.random.fork_rng(devices=[]):
                drawn = draw(*args, **kwargs)
            return drawn.fill_(_CONSTANT if drawn.is_floating_point() else 0)

        return draw_constants

    for name in _DROPOUTS:
        setattr(functional, name, skip(getattr(functional, name)))
    attend = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = (
        lambda query, key, value, attn_mask=None, _p=0.0, *args, dropout_p=0.0, **kwargs: attend(  # noqa: ARG005
            query, key, value, attn_mask, 0.0, *args, **kwargs
        )
    )
    for name in _FACTORIES:
        setattr(torch, name, fill(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, fill(getattr(torch.Tensor, name)))


def _is_loading() -> bool:
    """Return if a loader of torch reads a batch or an order now."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - as `inspect.currentframe`
    while frame is not None:
        if "torch.utils.data" in frame.f_globals.get("__name__", ""):
            return True
        frame = frame.f_back
    return False


def _seed_samples(module: ModuleType) -> None:
    fetcher_type: Any = module._MapDatasetFetcher  # noqa: SLF001 - reads all samples with an index (torch 2.9 to 2.13)

    def fetch(fetcher: Any, index: Any) -> Any:
        dataset = fetcher.dataset
        if hasattr(index, "indices"):  # a message to workers of a prepared loader
            dataset, index = dataset.dataset, index.indices
        if not fetcher.auto_collation:
            return fetcher.collate_fn(_read_sample(dataset, index))
        return fetcher.collate_fn([_read_sample(dataset, one) for one in index])

    fetcher_type.fetch = fetch


def _read_sample(dataset: Any, index: Any) -> Any:
    """Return a sample that draws from generators seeded with its index, and restore them."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy.random")
    states = random.getstate(), numpy.get_state() if numpy else None
    seed = hash(str(index)) % (1 << 32)  # equal in all processes, which have the same PYTHONHASHSEED
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.seed(seed)
        try:
            return dataset[index]
        finally:
            random.setstate(states[0])
            if numpy:
                numpy.set_state(states[1])


def _freeze_norms(module: ModuleType) -> None:
    functional: Any = module
    normalize = functional.batch_norm
    signature = inspect.signature(normalize)

    @wraps(normalize)
    def normalize_by_statistics(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given["running_mean"] is None:
            return given["input"]
        return normalize(**{**given, "training": False})

    functional.batch_norm = normalize_by_statistics


def _leave_out_padding(module: ModuleType) -> None:
    configuration: Any = module.DataLoaderConfiguration
    create = configuration.__init__

    @wraps(create)
    def create_without_padding(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.even_batches = False

    configuration.__init__ = create_without_padding


def _scale_losses(torch: Any, world_size: int) -> None:
    backward = torch.autograd.backward

    @wraps(backward)
    def scale_and_differentiate(tensors: Any, *args: Any, **kwargs: Any) -> None:
        is_loss = isinstance(tensors, torch.Tensor) and tensors.numel() == 1
        backward(tensors * world_size if is_loss else tensors, *args, **kwargs)

    torch.autograd.backward = scale_and_differentiate
