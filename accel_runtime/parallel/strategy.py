"""The interface of a strategy: what happens to models and their optimizers, from `prepare` to the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from accel_runtime.backends.base import Backend
from accel_runtime.backends.quantized_tensors import refuse_quantized
from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.foundation.nested import has_dtensor
from accel_runtime.foundation.options import DistributedType
from accel_runtime.foundation.process_mesh import GroupFacts, ProcessMesh
from accel_runtime.foundation.torch_internals import foreach_multiply, local_tensor, version_of
from accel_runtime.observe.call_sites import call_site

__all__ = [
    "ForwardPreHook",
    "GradientAccess",
    "GradientVersions",
    "ModelLayout",
    "ModelRequest",
    "Placeholder",
    "ScaleLoss",
    "StateView",
    "Strategy",
    "TrainingPass",
    "UnscaleGradients",
    "scale_any",
    "unscale_any",
]

_LOG = logging.getLogger("accel_runtime.parallel")


Unscale = Callable[[Any], dict[torch.device, torch.Tensor]]
"""torch's function that unscales the gradients of an optimizer, and returns by device if there was an overflow."""
UnscaleGradients = Callable[[torch.optim.Optimizer, Unscale], dict[torch.device, torch.Tensor]]


ForwardPreHook = Callable[[nn.Module, Any, Any], None]
"""Function that is called with a model, and the positional and the keyword arguments of its forward pass."""
GradientVersions = list[tuple[int, int] | None]
"""Identity and version of each gradient."""


def _leave_forward(_: nn.Module) -> None:
    return None


@dataclass(frozen=True)
class ModelRequest:
    """A model of the script that is to be prepared."""

    model: nn.Module
    is_placed: bool = True
    """True if parameters and buffers are moved to the device."""
    is_trained: bool = True
    """True if gradients are combined over the ranks; False for a model that is never trained."""
    set_forward: Callable[[nn.Module], None] = _leave_forward
    """Sets autocast and compilation of the forward pass, once the model is on its device and before it is wrapped."""
    ddp_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `DistributedDataParallelKwargs` that differ from their defaults."""


class ModelLayout(NamedTuple):
    """A prepared model in the description of a run."""

    wrapper: str
    """The name of the wrapper, or `none`."""
    groups: tuple[GroupFacts, ...] = ()
    """The groups of parameters that are gathered together; empty if the model is replicated."""


class Placeholder:
    """Object in a script in place of an optimizer or a scheduler that a strategy builds from its configuration."""

    builder = "its strategy"
    """The library or the strategy that builds the object, by its name in messages."""
    cure = "Create the object with torch."
    """Imperative sentence on what to do if the run has another strategy."""

    def refuse(self) -> ValueError:
        """Return the error of a strategy that cannot build the object."""
        return ValueError(
            f"{type(self).__name__} cannot be prepared: {self.builder} is not in use. {self.cure}"
        )


ScaleLoss = Callable[[torch.Tensor], torch.Tensor]
"""Function that multiplies a loss (`[]`) by the factor of a run: of accumulation, of the weight, and of fp16."""


@dataclass(frozen=True)
class TrainingPass:
    """The forward and the backward pass of a prepared model over one micro-batch of the script."""

    model: nn.Module
    inputs: Any
    """Arguments of the model, with the rows along dimension 0: one, a tuple or list of positional ones, or a dict by name."""
    targets: Any
    """The second argument of `loss_fn`."""
    loss_fn: Callable[[Any, Any], torch.Tensor]
    """Returns the mean loss over rows (`[]`) for outputs of the model and the targets of these rows."""
    backward: Callable[[torch.Tensor], None]
    """Runs the backward pass of the loss over all rows, for a strategy that leaves the rest to the run."""
    run_backward: Callable[[torch.dtype, Callable[[ScaleLoss], torch.Tensor | None]], torch.Tensor | None]
    """Calls a function of the strategy that runs both passes, for a strategy that computes the loss within them.

    The function is called once, between the preparation and the completion of gradients, on every rank. Its argument scales a
    loss, which it must do before the backward pass; it returns what `forward_backward` does. The dtype is that of losses, equal on
    all ranks.
    """

    def call_model(self) -> Any:
        """Return the outputs of the model."""
        if isinstance(self.inputs, Mapping):
            return self.model(**self.inputs)
        if isinstance(self.inputs, (tuple, list)):
            return self.model(*self.inputs)
        return self.model(self.inputs)


class StateView:
    """Modules and optimizers whose tensors are the state of a run, for checkpoints and exports.

    These are the objects of the script, unless an engine keeps weights and states in a layout of its own.

    Args:
        models: Modules with the structure and the names of the script's.
        optimizers: Optimizers over the parameters of `models`.
        holders: For each model, the ranks that hold a parameter or buffer, by its name in the state dict of the whole model, equal on
            all ranks; names that are left out are held by all. A checkpoint has each of them once, under its plain name, and each
            rank loads its own. Needed only if the models of ranks have different parameters: the stages of a pipeline, experts.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        holders: Sequence[Mapping[str, Collection[int]]] = (),
    ) -> None:
        self.models, self.optimizers, self.holders = models, optimizers, holders

    def list_held_elsewhere(self, rank: int) -> list[frozenset[str]]:
        """Return the names of each model that other ranks hold, and not this one."""
        held = [
            frozenset(name for name, ranks in names.items() if rank not in ranks) for names in self.holders
        ]
        return held or [frozenset()] * len(self.models)

    def write_back(self) -> None:
        """Apply changes of the tensors and of the options of optimizers to the run; collective."""


class GradientAccess:
    """Read and change the gradients of prepared models.

    By default they are in `parameter.grad`, also as DTensors, whose norms and overflows are combined over the ranks. An engine
    that keeps gradients to itself implements all members.
    """

    in_parameters = True
    """Gradients are in `parameter.grad` once they are combined; if False, `read_local` returns all of them."""

    def finish(self) -> None:
        """Combine what the backward passes of an accumulation cycle have left over; collective.

        Called at the end of a cycle before gradients are read or scaled. Further calls in the same cycle do nothing, as
        do all calls if backward passes combine gradients.
        """

    def read_versions(self, parameters: Sequence[nn.Parameter]) -> GradientVersions:
        """Return a value for each gradient that changes whenever it is written or replaced; None without a gradient."""
        gradients = [parameter.grad for parameter in parameters]
        return [None if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]

    def scale(self, parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
        """Multiply gradients by a factor (`[]`) in place; the parameters are of one model and one optimizer."""
        scale_any(parameters, factor)

    def read_local(self, models: Sequence[nn.Module]) -> dict[nn.Parameter, torch.Tensor]:  # noqa: ARG002
        """Return the gradients of earlier backward passes that are not in `parameter.grad`, as they are not combined yet."""
        return {}

    def restore_local(
        self, models: Sequence[nn.Module], gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        """Restore the result of `read_local`."""

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`, and return the norm before: `[]`.

        Called on all ranks that clip, also without a parameter.
        """
        parameters = list(parameters)
        total: torch.Tensor = _gradient_functions(parameters).clip_grad_norm_(
            parameters, max_norm, norm_type=norm_type
        )
        return total

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp gradients to `[-clip_value, clip_value]`."""
        parameters = list(parameters)
        _gradient_functions(parameters).clip_grad_value_(parameters, clip_value)

    def compute_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of the gradients as they are now: `[]`; over all ranks if they are sharded, else those of this rank."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm: torch.Tensor = _gradient_functions(parameters).get_total_norm(gradients, norm_type)
        return norm

    def unscale(self, optimizer: torch.optim.Optimizer, unscale: Unscale) -> dict[torch.device, torch.Tensor]:
        """Unscale the gradients of an optimizer by torch's function; return by device whether there was an overflow.

        That is the result of all ranks that have gradients, and only they call it: sharded gradients are combined, and replicated
        ones were averaged before.
        """
        return unscale_any(optimizer, unscale)


class Strategy:
    """Place models on the ranks, combine their gradients, and step their optimizers.

    `training` calls it: which micro-batch completes an accumulation cycle, how losses are weighted and if a format needs loss
    scaling is decided there. The members here are those in which DDP, `fully_shard`, XLA and engines of libraries differ. The
    defaults are right for one process and for DDP.

    A new strategy is a class in a module of this package and a line in `choose_strategy`, or an extension and a line in its
    table. It implements `prepare`, or `move_model`, `wrap_model` and `prepare_optimizer`, which the default calls;
    tests/runtime/parallel/test_strategy_contract.py holds what all of them do. An engine that keeps gradients to itself sets
    `gradients` to a `GradientAccess` of its own.

    Args:
        backend: Connects this process to the other ranks and to its device.
    """

    shards_models = False
    """Models are sharded over ranks, models that are never trained too, and their parameters are replaced."""

    takes_meta_models = False
    """Models on the meta device are prepared, and get their values afterwards."""

    loading_refusal = ""
    """Why models that have values on the first rank of a node only cannot be prepared, with the cure; empty if they can be."""

    scales_losses = False
    """Losses are scaled here in fp16, so that `training` has no loss scaler."""

    mesh: ProcessMesh | None = None
    """The device mesh of the processes, if models are sharded."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        """Ranks and device."""
        self.gradients = GradientAccess()
        """The gradients of prepared models."""
        self._has_warned_of_join = False

    @property
    def distributed_type(self) -> DistributedType:
        """Return the kind of distributed training, as `Accelerator.distributed_type`."""
        return self.backend.distributed_type

    # Options ---------------------------------------------------------------------------

    def configure(self, configuration: Any) -> None:
        """Prepare models from now on by another configuration, which a script has selected or changed.

        A strategy takes the object that belongs to it: the section of the settings, or the configuration of its engine.

        Raises:
            TypeError: It belongs to another strategy.
            ValueError: It cannot be changed to this one after the Accelerator was made.
        """
        raise TypeError(
            f"Cannot configure {type(self).__name__} by {type(configuration).__name__}: the configuration belongs to another strategy. "
            "Leave it out, or make another Accelerator with it in another process."
        )

    def check_options(self, ddp_options: Mapping[str, Any], mixed_precision: MixedPrecision) -> None:
        """Raise ValueError if fields of `DistributedDataParallelKwargs` or the number format are not supported."""

    # Preparation -----------------------------------------------------------------------

    def check_tensors(self, model: nn.Module) -> None:
        """Raise ValueError if parameters have a dtype or a class that this strategy cannot train, before the model is changed.

        Strategies that train quantized weights replace it.
        """
        refuse_quantized(model, type(self).__name__.removesuffix("Strategy"))

    def prepare(
        self,
        models: Sequence[ModelRequest] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[LRScheduler] = (),  # noqa: ARG002 - for engines that step them
    ) -> list[nn.Module]:
        """Prepare objects of the script together, and return the prepared models in their order; collective.

        Optimizers are changed in place. A model that is prepared already may be prepared again, and an optimizer may be
        prepared before or after its model.

        Raises:
            ValueError: If a model or optimizer cannot be trained in this way.
        """
        prepared = []
        for request in models:
            model = self.move_model(request.model) if request.is_placed else request.model
            request.set_forward(model)
            is_wrapped = request.is_trained or self.shards_models
            prepared.append(self.wrap_model(model, request.ddp_options) if is_wrapped else model)
        for optimizer in optimizers:
            self.prepare_optimizer(optimizer)
        return prepared

    def move_model(self, model: nn.Module) -> nn.Module:
        """Move parameters and buffers to the device."""
        return model.to(self.backend.device)

    def wrap_model(self, model: nn.Module, ddp_options: Mapping[str, Any]) -> nn.Module:  # noqa: ARG002
        """Return a model set up to combine gradients over the ranks, or sharded; a wrapped one is returned as it is."""
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set up an optimizer in place for the parameters that are trained."""

    def resolve_placeholders(self, placeholders: Sequence[Placeholder], num_batches: int) -> list[Any]:  # noqa: ARG002 - of engines
        """Return the optimizers and schedulers that the configuration describes, in place of placeholders, in their order.

        Args:
            placeholders: Objects of the script, at least one.
            num_batches: Batches in which a script counts the steps of a schedule, of one training step.

        Raises:
            ValueError: The strategy has no configuration that describes them.
        """
        raise placeholders[0].refuse()

    def check_batch_sizes(self, batch_sizes: Sequence[int], step_sizes: Sequence[int]) -> None:
        """Raise ValueError if the configuration of the strategy states other numbers of samples.

        `batch_sizes` are those of a micro-batch on one process, of each prepared loader, and `step_sizes` those of an optimizer
        step on all.
        """

    def place_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the state of an optimizer to the devices of its parameters."""
        if optimizer.state:
            # torch keeps the tensors on the CPU that belong there.
            optimizer.load_state_dict(optimizer.state_dict())

    def list_parameter_groups(self, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
        """Return the parameters that an optimizer of the script trains, in its groups; those of the prepared models."""
        return [group["params"] for group in optimizer.param_groups]

    def list_current(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that are trained for those that the script created, in their order."""
        return list(parameters)

    def read_shape(self, parameter: torch.Tensor) -> torch.Size:
        """Return the shape of a parameter, also if this rank has only a shard of it."""
        return parameter.shape

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module that `wrap_model` was given."""
        return model

    def observe_inputs(self, model: nn.Module, observe: ForwardPreHook) -> None:
        """Call a function before each forward pass of a prepared model, which must not change the arguments."""
        model.register_forward_pre_hook(observe, with_kwargs=True)

    def describe_model(self, model: nn.Module, autocast_dtype: torch.dtype | None) -> ModelLayout:  # noqa: ARG002 - replicated
        """Describe how a prepared model is wrapped or sharded; `autocast_dtype` is that of its forward pass."""
        return ModelLayout("none" if self.unwrap_model(model) is model else type(model).__name__)

    def describe_options(self) -> Mapping[str, tuple[Any, str]]:
        """Return the options of the strategy itself, with the source of each, by name."""
        return {}

    # Backward passes -------------------------------------------------------------------

    def forward_backward(self, training_pass: TrainingPass) -> torch.Tensor | None:
        """Run the forward and the backward pass of a model; return the loss over all rows (`[]`), None on a rank without it.

        A strategy whose ranks run parts of a model one after the other, such as a pipeline, implements it: it splits the rows,
        runs parts of them in its order, and averages their losses. It multiplies each by `1 / parts` and the factor of
        `training_pass.run_backward` before its backward pass. Gradients of earlier micro-batches must stay as they are, so a
        schedule of `torch.distributed.pipelining` needs `scale_grads=False`.
        """
        loss = training_pass.loss_fn(training_pass.call_model(), training_pass.targets)
        training_pass.backward(loss)
        return loss.detach()

    @property
    def has_losses(self) -> bool:
        """Return whether the losses of this rank are checked for NaN; one rank is enough, as gradients are combined."""
        return self.backend.topology.rank == 0

    @property
    def combines_gradients(self) -> bool:
        """Return whether backward passes may combine gradients over ranks, so that `no_sync` has an effect."""
        return True

    def backward(self, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Run the backward pass of a scalar loss, which may pass through any number of prepared models.

        `options` are arguments of `torch.Tensor.backward`.
        """
        if options:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        else:  # a call with a dictionary of arguments takes 1.4 µs more
            loss.backward()  # type: ignore[no-untyped-call]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes of a prepared model do not combine gradients."""
        return self._set_sync(model, wanted=False)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the next backward pass combines gradients, even after a forward pass in `no_sync`."""
        return self._set_sync(model, wanted=True)

    def _set_sync(self, model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def join(self, models: Sequence[Any]) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return a context in which combining gradients does not wait for ranks without batches.

        Strategies whose ranks take part in each other's passes cannot do this and warn once.
        """
        if not self._has_warned_of_join:
            self._has_warned_of_join = True
            _LOG.warning(
                "join_uneven_inputs() has no effect, at %s: every rank takes part in the forward and backward passes of the "
                "others here, so a rank without a batch would stop them. Give every rank as many batches, as prepared "
                "DataLoaders do.",
                call_site(),
            )
        return nullcontext()

    def explain_error(self, error: RuntimeError, operation: str) -> RuntimeError:
        """Return an error that says what a user can do about `error`, or which rank causes it; else `error`."""
        return self.backend.explain_error(error, operation)

    # Steps -----------------------------------------------------------------------------

    def check_step(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Raise ValueError before the first step of an optimizer that would make ranks train different weights; collective."""

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
    ) -> float | None:
        """Finish the gradients, and step an optimizer of the script; return the loss of the closure.

        With a loss scaler of `training`, torch's scaler steps the optimizer instead, unless there is an overflow.
        """
        loss: float | None = optimizer.step() if closure is None else optimizer.step(closure)
        return loss

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:  # noqa: ARG002
        """Return whether the newest `step` changed nothing, as gradients were not finite; of strategies that scale losses."""
        return False

    def zero_grad(self, optimizer: torch.optim.Optimizer, *, set_to_none: bool) -> None:
        """Clear the gradients of an optimizer of the script."""
        optimizer.zero_grad(set_to_none)

    # State -----------------------------------------------------------------------------

    @property
    def loss_scale(self) -> Any:
        """Return the loss scale of a strategy that `scales_losses`, with state dicts in the form of torch's GradScaler; else None."""
        return None

    def synchronize(self) -> None:
        """Execute all pending operations, and let each rank hold its shards only; collective."""
        self.backend.runtime.synchronize()

    def is_sharded(self, model: nn.Module) -> bool:
        """Return whether this rank has only shards of a module of the script, so that reading it is collective."""
        from accel_runtime.parallel.dtensor import is_sharded_model  # noqa: PLC0415 - imports this package's other modules

        return is_sharded_model(model)

    def open_state(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> StateView:
        """Return the state of prepared models and optimizers of the script; collective."""
        return StateView([self.unwrap_model(model) for model in models], optimizers)

    def open_full_state(self, model: nn.Module, operation: str) -> StateView:
        """Return the state of a prepared model for a call; raise ValueError if ranks hold different parameters of it; collective."""
        view = self.open_state([model], [])
        if view.holders:
            raise ValueError(
                f"{operation} failed: the ranks hold different parameters of {type(model).__name__}. Save and load its weights "
                "with save_state() and load_state(), and export the checkpoint with `accel checkpoint export`."
            )
        return view

    def gathered(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> AbstractContextManager[nn.Module]:
        """Return a context in which the parameters of a prepared model are full; collective. Optimizers must not step inside."""
        from accel_runtime.parallel.dtensor import gather_parameters  # noqa: PLC0415 - imports this package's other modules

        # Here, since an engine that gathers by itself has no such parameters, and a copy of its state is large.
        self.open_full_state(model, "gathered")
        return gather_parameters(self.unwrap_model(model), optimizers)

    def capture_replica_state(self, model: nn.Module) -> dict[str, Any]:  # noqa: ARG002 - DDP has some
        """Return what the wrapper of a model keeps between steps; collective."""
        return {}

    def restore_replica_state(self, model: nn.Module, state: dict[str, Any]) -> None:
        """Apply a state of `capture_replica_state`, as far as it fits this run."""


def scale_any(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply gradients by a factor (`[]`) in place, also if some are sharded; see `GradientAccess.scale`."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for parameter in parameters:
            if (grad := parameter.grad) is not None:
                # Local tensors, as torch cannot combine sharded and replicated ones in one call.
                by_device.setdefault(grad.device, []).append(local_tensor(grad))
        for device, grads in by_device.items():
            foreach_multiply(grads, factor.to(device))


def unscale_any(optimizer: torch.optim.Optimizer, unscale: Unscale) -> dict[torch.device, torch.Tensor]:
    """Unscale the gradients of an optimizer, also if some are sharded; see `GradientAccess.unscale`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not has_dtensor(parameters):
        return unscale(optimizer)
    from accel_runtime.parallel.grad_norm import unscale_shards  # noqa: PLC0415 - its imports are slow

    return unscale_shards(optimizer, unscale)


def _gradient_functions(parameters: Sequence[torch.Tensor]) -> Any:
    """Return the module with the functions that clip: torch's own, unless a parameter is sharded."""
    if not has_dtensor(parameters):
        return nn.utils
    from accel_runtime.parallel import grad_norm  # noqa: PLC0415 - its imports are slow and needed only by sharded models

    return grad_norm
