"""The strategy of ZeRO stages 1 to 3: models are trained by deepspeed's optimizers, which shard what the stage shards.

Models and optimizers that deepspeed does not train are refused: it would stop in an assertion, or train other weights without
an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from accel_runtime.backends.base import Backend
from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.extensions.deepspeed.configuration import (
    build_configuration,
    check_batch_sizes,
    describe_configuration,
)
from accel_runtime.extensions.deepspeed.configured_optimizers import build_configured, refuse_unconfigured
from accel_runtime.extensions.deepspeed.engine import Engine, LossScale
from accel_runtime.extensions.deepspeed.library import (
    VERSION,
    ShardedOptimizer,
    build_engine,
    gather,
    hide_deprecations,
    is_partitioned,
    keep_graph,
)
from accel_runtime.extensions.deepspeed.modules import (
    ShardedLoading,
    make_copyable,
    mark_leaf_modules,
    refuse_graphs,
    watch_zero_grad,
)
from accel_runtime.extensions.deepspeed.settings import ZERO_3, DeepSpeedConfig
from accel_runtime.extensions.deepspeed.state_view import Originals, ZeroStateView, gather_full
from accel_runtime.foundation.options import DistributedType
from accel_runtime.foundation.precision import FORMATS, name_dtype
from accel_runtime.foundation.process_mesh import GroupFacts
from accel_runtime.parallel.averaging import refuse_max_norm
from accel_runtime.parallel.big_modeling import refuse_meta_model
from accel_runtime.parallel.dtensor import shard_like
from accel_runtime.parallel.fully_shard import (
    UntracedBufferBroadcast,
    broadcast_parameters,
    build_buffer_broadcast,
)
from accel_runtime.parallel.strategy import (
    GradientAccess,
    GradientVersions,
    ModelLayout,
    ModelRequest,
    Placeholder,
    StateView,
    Strategy,
    Unscale,
)

__all__ = [
    "DeepSpeedStrategy",
    "build_missing_error",
    "check_parameters",
    "refuse_optimizer",
    "refuse_undividable",
]


class EngineGradients(GradientAccess):
    """Gradients that are in the buffers of deepspeed's optimizers.

    Args:
        backend: Ranks and device.
        engines: The engines by their optimizers; updated by the strategy.
        loss_scale: The scale of fp16 losses; None without one.
    """

    in_parameters = False

    def __init__(
        self, backend: Backend, engines: Mapping[torch.optim.Optimizer, Engine], loss_scale: LossScale | None
    ) -> None:
        self._backend, self._engines, self._scale = backend, engines, loss_scale

    @override
    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        parameters = list(parameters)
        self.finish()
        norm = self.compute_norm(parameters, norm_type)
        for engine in self._find_engines(parameters, "clip_grad_norm_()"):
            engine.clip(max_norm, norm)
        return norm

    @override
    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        raise ValueError(
            "clip_grad_value_() is not supported with ZeRO, which has no gradients that can be clamped. Use clip_grad_norm_()."
        )

    @override
    def compute_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        if norm_type != 2:  # noqa: PLR2004 - the norm of deepspeed
            raise ValueError(
                f"Invalid norm_type {norm_type}: ZeRO computes the norm of type 2 only. Leave it out."
            )
        engines = self._find_engines(parameters, "The norm of gradients")
        norms = [engine.compute_norm().to(self._backend.device) for engine in engines]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return norm if self._scale is None else norm / self._scale.value

    def _find_engines(self, parameters: Iterable[torch.Tensor], operation: str) -> list[Engine]:
        """Return the engines of some parameters; raise ValueError if they are only a part of an engine's."""
        wanted = {parameter for parameter in parameters if parameter.requires_grad}
        engines = [engine for engine in self._engines.values() if not wanted.isdisjoint(engine.parameters)]
        for engine in engines:
            if missing := len(set(engine.trained) - wanted):
                raise ValueError(
                    f"{operation} needs all parameters of {type(engine.optimizer).__name__} with ZeRO, and {missing} of "
                    f"{len(engine.trained)} are missing. Pass model.parameters()."
                )
        return engines

    @override
    def unscale(self, optimizer: torch.optim.Optimizer, unscale: Unscale) -> dict[torch.device, torch.Tensor]:
        raise AssertionError  # `scales_losses`: there is no scaler of torch

    @override
    def finish(self) -> None:
        for engine in self._engines.values():
            engine.complete()

    @override
    def read_versions(self, parameters: Sequence[nn.Parameter]) -> GradientVersions:
        versions: dict[nn.Parameter, int] = {}
        for engine in self._engines.values():
            versions |= engine.versions
        return [(1, versions[parameter]) if parameter in versions else None for parameter in parameters]

    @override
    def scale(self, parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
        for engine in self._engines.values():
            if own := [parameter for parameter in parameters if parameter in engine.parameters]:
                engine.scale_gradients(own, factor)

    @override
    def read_local(self, models: Sequence[nn.Module]) -> dict[nn.Parameter, torch.Tensor]:
        gradients: dict[nn.Parameter, torch.Tensor] = {}
        for engine in self._engines.values():
            if engine.sharded.stage == 1:
                gradients |= {p: p.grad for p in engine.trained if p.grad is not None}
            elif engine.has_gradients:
                parts = engine.sharded.list_gradients()
                for parameter, full in gather_full(engine.trained, parts, self._backend.device):
                    if parameter in engine.versions:
                        gradients[parameter] = full.clone()
        return gradients

    @override
    def restore_local(
        self, models: Sequence[nn.Module], gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        for engine in self._engines.values():
            engine.clear_gradients()
            own = [parameter for parameter in engine.trained if parameter in gradients]
            if not own:
                continue
            engine.restore_cycle(own)
            if engine.sharded.stage == 1:
                for parameter in own:
                    parameter.grad = torch.empty_like(parameter).copy_(gradients[parameter])
                continue
            fragments = defaultdict(list)
            for fragment, part in engine.sharded.list_gradients():
                fragments[fragment.parameter].append((fragment, part))
            for parameter in own:
                # Those of a checkpoint of DDP are not averaged yet.
                mean = gradients[parameter].to(self._backend.device, torch.float32, copy=True)
                dist.all_reduce(mean)
                mean = mean.div_(self._backend.topology.world_size).reshape(-1)
                for fragment, part in fragments[parameter]:
                    part.copy_(mean.narrow(0, fragment.offset, fragment.length))


class DeepSpeedStrategy(Strategy):
    """Optimizer states are sharded over the ranks, in stage 2 gradients too, in stage 3 parameters too.

    An optimizer and the models that it trains have one engine. It is built when both are prepared. Prepared models are the
    script's own modules, and `loss.backward()` is torch's: deepspeed's hooks on parameters reduce the gradients.

    Args:
        backend: Ranks and device.
        config: The configuration of the profile and its JSON file.
        mixed_precision: The number format of the run.
        zero3_init: If true, `from_pretrained` of transformers shards models while it loads, in stage 3.
    """

    shards_models = True
    loading_refusal = (
        "DeepSpeed prepares models that are full on every rank. Load the model outside of the block; in ZeRO stage 3, from_pretrained of "
        "transformers shards it while it loads (deepspeed.zero3_init: true)."
    )
    scales_losses = True

    def __init__(
        self,
        backend: Backend,
        config: DeepSpeedConfig,
        mixed_precision: MixedPrecision,
        *,
        zero3_init: bool = False,
    ) -> None:
        super().__init__(backend)
        self.config = config
        """The configuration; `auto` values are filled in by the models."""
        self._mixed_precision = mixed_precision
        self._stage = config.stage
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._engines: dict[torch.optim.Optimizer, Engine] = {}
        self._filled: dict[str, Any] = {}
        """Values of what is `auto` in the configuration, by path."""
        self._configured: dict[str, Any] = {}
        """The configuration of the newest engine."""
        self._unsynced: set[nn.Module] = set()
        """The models in `no_sync`, which do not broadcast their buffers either."""
        self._partitioned: list[Any] = []
        """Engines of deepspeed that only partition models without an optimizer."""
        self._originals = Originals(backend)
        self._scale = LossScale(config) if mixed_precision == "fp16" else None
        self.gradients = EngineGradients(backend, self._engines, self._scale)
        self._max_norm = float(config.get("gradient_clipping", 0.0))
        self._loading: ShardedLoading | None = None
        if zero3_init and self._stage == ZERO_3:
            self._loading = ShardedLoading(self._build_config(nn.Module()))
            hide_deprecations()
            self._loading.start()

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return DistributedType.DEEPSPEED

    @override
    def configure(self, configuration: Any) -> None:
        if not isinstance(configuration, DeepSpeedConfig):
            super().configure(configuration)
        config: DeepSpeedConfig = configuration
        if not config.stage:
            raise ValueError(
                f"Cannot select ZeRO stage 0 ({config.sources.get('zero_optimization.stage', 'the configuration')}): the Accelerator uses "
                f"stage {self._stage}. Make another Accelerator in another process, or use stages 1 to 3."
            )
        self.config, self._stage = config, config.stage
        self._max_norm = float(config.get("gradient_clipping", 0.0))

    @override
    def check_options(self, ddp_options: Mapping[str, Any], mixed_precision: MixedPrecision) -> None:
        if ddp_options:
            raise ValueError(
                f"DistributedDataParallelKwargs({', '.join(ddp_options)}) is not supported with ZeRO stage {self._stage}. Remove it."
            )
        if mixed_precision == "fp16" and self.backend.device.type == "cpu":
            raise ValueError("mixed_precision fp16 is not supported with ZeRO on CPUs. Use bf16.")

    # Preparation -----------------------------------------------------------------------

    @override
    def prepare(
        self,
        models: Sequence[ModelRequest] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[LRScheduler] = (),
    ) -> list[nn.Module]:
        refuse_unconfigured(optimizers, schedulers, self.config)
        self._check(models, optimizers)
        for request in models:
            self._place_model(request)
            self._models.append(request.model)
        self._optimizers += optimizers
        self._build_engines()
        for request in models:
            is_evaluated = not request.is_trained or not any(
                p.requires_grad for p in request.model.parameters()
            )
            if is_evaluated and self._stage == ZERO_3 and not self._is_in_engine(request.model):
                self._partitioned.append(self._build_engine(request.model, None))
            if self._stage == ZERO_3:
                make_copyable(request.model)
                refuse_graphs(request.model)
        return [request.model for request in models]

    def _check(self, models: Sequence[ModelRequest], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ValueError for models and optimizers that ZeRO cannot train, before any of them is changed."""
        for request in models:
            refuse_meta_model(request.model)
            refuse_max_norm(request.model, ())
            refuse_undividable(request.model, self._stage)
        for optimizer in optimizers:
            refuse_optimizer(optimizer, self.config)
        known = [*self._models, *(request.model for request in models)]
        for optimizer in (*self._optimizers, *optimizers):
            if optimizer not in self._engines:
                check_parameters(optimizer, known, self._mixed_precision)

    def _place_model(self, request: ModelRequest) -> None:
        """Move a model, make it equal on all ranks, and set up its methods and hooks."""
        model = request.model
        if not any(map(is_partitioned, model.parameters())):
            if request.is_placed:
                self.move_model(model)
            broadcast_parameters(model, self.backend)
        request.set_forward(model)
        watch_zero_grad(model, self._clear_model)
        if self.config.leaf_modules:
            mark_leaf_modules(model, self.config.leaf_modules)
        if request.is_trained and model not in self._models and any(True for _ in model.buffers()):
            self._broadcast_buffers(model)

    def _broadcast_buffers(self, model: nn.Module) -> None:
        """Let forward passes of a model begin with the buffers of the first rank, as with DDP."""
        broadcast = build_buffer_broadcast(model, self.backend.broadcast)
        buffers = UntracedBufferBroadcast(lambda: model not in self._unsynced, broadcast)
        model.register_forward_pre_hook(buffers.before)
        model.register_forward_hook(buffers.after)

    @override
    def _set_sync(self, model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:
        return self._mark_sync(model, wanted=wanted)

    @contextmanager
    def _mark_sync(self, model: nn.Module, *, wanted: bool) -> Iterator[None]:
        before = set(self._unsynced)
        (self._unsynced.discard if wanted else self._unsynced.add)(model)
        try:
            yield
        finally:
            self._unsynced = before

    def _is_in_engine(self, model: nn.Module) -> bool:
        return any(
            parameter in engine.parameters
            for engine in self._engines.values()
            for parameter in model.parameters()
        )

    def _build_config(self, model: nn.Module) -> dict[str, Any]:
        self._configured = build_configuration(self.config, model, self._mixed_precision)
        return self._configured

    def _build_engine(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        """Return deepspeed's engine of a model, and keep the digits of its parameters; collective."""
        with self._originals.keep(model.parameters(), FORMATS[self._mixed_precision].dtype):
            return build_engine(model, optimizer, self._build_config(model))

    def _build_engines(self) -> None:
        """Build the engines of optimizers whose models are prepared."""
        for optimizer in self._optimizers:
            if optimizer in self._engines:
                continue
            groups = [list(group["params"]) for group in optimizer.param_groups]
            own = {parameter for group in groups for parameter in group}
            models = [model for model in self._models if not own.isdisjoint(model.parameters())]
            if not models:
                continue  # they may be prepared later
            self._check_apart(optimizer, models)
            module = models[0] if len(models) == 1 else nn.ModuleList(models)
            state: dict[Any, Any] = dict(optimizer.state)
            sharded = ShardedOptimizer(self._build_engine(module, optimizer), self._stage)
            self._engines[optimizer] = Engine(optimizer, groups, sharded)
            self._originals.move_to(self._engines[optimizer])
            if state:
                optimizer.state.clear()
                self._restore_early_state(optimizer, state)

    def _check_apart(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Raise ValueError if stage 3 would partition a model for two optimizers."""
        if self._stage == ZERO_3 and any(map(self._is_in_engine, models)):
            raise ValueError(
                f"{type(optimizer).__name__} trains a model that another optimizer trains too: ZeRO stage 3 shards a model for one "
                "optimizer. Use one optimizer with several parameter groups, or stage 2."
            )

    def _restore_early_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[nn.Parameter, Any]
    ) -> None:
        """Put back the state that an optimizer had before it was prepared, by the parameters of the script."""
        view = self.open_state((), [optimizer])
        originals = self._engines[optimizer].parameters
        copies = [p for group in view.optimizers[0].param_groups for p in group["params"]]
        for original, copy in zip(originals, copies, strict=True):
            if original in state:
                view.optimizers[0].state[copy] = {
                    key: shard_like(value, copy, key)
                    if isinstance(value, torch.Tensor) and value.shape == copy.shape
                    else value
                    for key, value in state[original].items()
                }
        view.write_back()

    @override
    def check_batch_sizes(self, batch_sizes: Sequence[int], step_sizes: Sequence[int]) -> None:
        check_batch_sizes(self.config, batch_sizes, step_sizes, self._filled)

    @override
    def resolve_placeholders(self, placeholders: Sequence[Placeholder], num_batches: int) -> list[Any]:
        return build_configured(placeholders, self.config, num_batches, self._filled)

    @override
    def place_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the state where deepspeed has it."""

    @override
    def list_parameter_groups(self, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
        engine = self._engines.get(optimizer)
        return super().list_parameter_groups(optimizer) if engine is None else engine.groups

    @override
    def read_shape(self, parameter: torch.Tensor) -> torch.Size:
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    @override
    def describe_model(self, model: nn.Module, autocast_dtype: torch.dtype | None) -> ModelLayout:
        parameters = list(model.parameters())
        dtype = next((parameter.dtype for parameter in parameters), torch.float32)
        is_trained = self._is_in_engine(model)
        group = GroupFacts(
            modules=("",),
            kind=type(model).__name__,
            parameters=len(parameters),
            elements=sum(self.read_shape(parameter).numel() for parameter in parameters),
            dtype="float32" if is_trained else name_dtype(dtype),
            gradients="float32" if is_trained else "",
            computes_in=name_dtype(autocast_dtype or dtype),
            reduces_in=name_dtype(dtype) if is_trained else "",
            layout=self._describe_shards(),
            bytes_here=sum(getattr(p, "ds_tensor", p).nbytes for p in parameters),
            computed_again=False,
        )
        return ModelLayout(f"ZeRO stage {self._stage} (deepspeed {VERSION})", (group,))

    @override
    def describe_options(self) -> Mapping[str, tuple[Any, str]]:
        return describe_configuration(self.config, self._configured, self._filled)

    def _describe_shards(self) -> str:
        subjects = ("optimizer state", "gradients", "parameters")[: self._stage]
        return f"{' and '.join(subjects)} divided over {self.backend.topology.world_size} ranks"

    # Backward passes -------------------------------------------------------------------

    @override
    def backward(self, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        if self._scale is not None:
            loss = loss * self._scale.begin_backward()
        engines = list(self._engines.values())
        for engine in engines:
            engine.begin_backward()
        with ExitStack() as stack:
            if options.get("retain_graph") and self._stage == ZERO_3:
                stack.enter_context(keep_graph(self._models))
            super().backward(loss, options)
        for engine in engines:
            engine.end_backward()

    # Steps -----------------------------------------------------------------------------

    @override
    def check_step(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        if optimizer not in self._engines:
            raise build_missing_error(optimizer, self.list_parameter_groups(optimizer)[0])

    @override
    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> float | None:
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) is not supported with ZeRO. Run the backward pass before, and call step() without it."
            )
        engine = self._engines[optimizer]
        engine.complete()
        scale = 1.0 if self._scale is None else self._scale.value
        if self._max_norm:
            engine.clip(self._max_norm, engine.compute_norm().to(self.backend.device) / scale)
        engine.step(scale)
        if self._scale is not None:
            self._scale.record_step(optimizer, self._engines, skipped=engine.was_skipped)
        return None

    @override
    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._engines[optimizer].was_skipped

    @override
    def zero_grad(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool) -> None:
        engine = self._engines.get(optimizer)
        if engine is None:
            super().zero_grad(optimizer, set_to_none=set_to_none)
        else:
            self._record_left_out_step(engine)
            engine.clear_gradients()

    def _record_left_out_step(self, engine: Engine) -> None:
        """Update the scale by gradients that the script has read the norm of, and clears without a step."""
        if self._scale is not None and (overflow := engine.read_overflow()) is not None:
            self._scale.record_step(engine.optimizer, self._engines, skipped=overflow)

    def _clear_model(self, model: nn.Module) -> None:
        parameters = set(model.parameters())
        for engine in self._engines.values():
            if not parameters.isdisjoint(engine.parameters):
                self._record_left_out_step(engine)
                engine.clear_part(parameters)

    # State -----------------------------------------------------------------------------

    @property
    @override
    def loss_scale(self) -> LossScale | None:
        return self._scale

    @override
    def is_sharded(self, model: nn.Module) -> bool:
        return self._is_in_engine(model) or any(map(is_partitioned, model.parameters()))

    @override
    def open_state(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> StateView:
        return ZeroStateView(models, optimizers, self._engines, self._originals, self.backend)

    @override
    def gathered(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> AbstractContextManager[nn.Module]:
        return self._gather(model)

    @contextmanager
    def _gather(self, model: nn.Module) -> Iterator[nn.Module]:
        """Gather the parameters of a model; changes of them, equal on all ranks, become those of the master weights."""
        engines = [
            engine
            for engine in self._engines.values()
            if not engine.parameters.keys().isdisjoint(model.parameters())
        ]
        partitioned = [parameter for parameter in model.parameters() if is_partitioned(parameter)]
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.refuse_steps())
            stack.enter_context(gather(partitioned, writer=0))
            yield model
        for engine in engines:
            engine.sharded.refresh_master_weights()


_TRAINED = (torch.float32, torch.bfloat16, torch.float16)
"""The number formats of parameters whose master weights in float32 lose no digits."""
_ELEMENTWISE = frozenset({
    "Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    "DeepSpeedCPUAdam", "FusedAdam", "DeepSpeedCPULion", "FusedLion", "Adam8bit", "AdamW8bit", "Lion",
})  # fmt: skip
"""Optimizers whose step treats each element apart, so that flat shards of parameters train as the parameters do."""
_REFUSED = (
    "Adafactor",
    "Adagrad",
    "LBFGS",
    "SparseAdam",
    "Muon",
    "Shampoo",
    "SOAP",
    "LAMB",
    "LARS",
    "FusedLamb",
)


def refuse_undividable(model: nn.Module, stage: int) -> None:
    """Raise ValueError if a model has parameters that stage 3 cannot partition: without dimensions, or without elements."""
    if stage != ZERO_3:
        return
    for name, parameter in model.named_parameters():
        if is_partitioned(parameter) or (parameter.dim() and parameter.numel()):
            continue
        lack = f"no elements, shape {list(parameter.shape)}" if parameter.dim() else "no dimensions"
        raise ValueError(
            f"{type(model).__name__} cannot be sharded by ZeRO stage 3: {name} has {lack}. Create it with one element, as in "
            "torch.ones(1), or use stage 2."
        )


def check_parameters(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], mixed_precision: MixedPrecision
) -> None:
    """Raise ValueError for an optimizer if a part of its parameters is in no model, or ZeRO would change their numbers.

    ZeRO keeps the weights of an optimizer in flat tensors of one number format, and master weights in float32. With mixed precision, it
    converts all of them first.

    Args:
        optimizer: An optimizer, whose models may be prepared later.
        models: The prepared models.
        mixed_precision: The number format of the run.
    """
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = own.difference(*(model.parameters() for model in models))
    if missing and len(missing) < len(own):
        raise build_missing_error(optimizer, missing)
    names: dict[torch.dtype, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter in own and parameter.requires_grad:
                names.setdefault(parameter.dtype, name)
    for dtype, name in names.items():
        if dtype not in _TRAINED and (dtype.is_complex or mixed_precision == "no"):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be trained by ZeRO: {name} is {name_dtype(dtype)}, and ZeRO has master weights in "
                "float32. Convert the parameters to float32, or train them with DDP, without ZeRO."
            )
    if mixed_precision == "no" and len(names) > 1:
        formats = " and ".join(f"{name} is {name_dtype(dtype)}" for dtype, name in names.items())
        raise ValueError(
            f"{type(optimizer).__name__} cannot be trained by ZeRO: {formats}, and ZeRO keeps the weights of an optimizer in one number "
            "format. Convert the parameters to one, as in model.float(), or use mixed_precision bf16."
        )


def build_missing_error(optimizer: torch.optim.Optimizer, missing: Iterable[torch.Tensor]) -> ValueError:
    """Return the error of an optimizer with parameters that are in no prepared model."""
    parameters = list(missing)
    return ValueError(
        f"{type(optimizer).__name__} cannot be trained by ZeRO: {len(parameters)} of its parameters, the first of shape "
        f"{list(getattr(parameters[0], 'ds_shape', parameters[0].shape))}, are in no prepared model. Pass the model to prepare() "
        "together with the optimizer."
    )


def refuse_optimizer(optimizer: torch.optim.Optimizer, config: DeepSpeedConfig) -> None:
    """Raise ValueError if an optimizer does not train flat shards as it trains parameters."""
    name = type(optimizer).__name__
    if name in _ELEMENTWISE:
        return
    if name in _REFUSED or not config.get("zero_allow_untested_optimizer", default=False):
        raise ValueError(
            f"{name} cannot be trained by ZeRO: it may treat parameters as matrices, and ZeRO steps flat shards of them. Use another "
            "optimizer such as AdamW, or fully_shard"
            + (
                "."
                if name in _REFUSED
                else "; if it treats each element apart, set zero_allow_untested_optimizer: true in the JSON file."
            )
        )
