"""The part of the facade that saves a run's state and goes on from it."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_runtime.accumulation import Accumulation
from accel_runtime.checkpoint import alone
from accel_runtime.checkpoint.background import Background
from accel_runtime.checkpoint.checkpoints import Checkpoints
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.files import Disk
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.foreign.adopting import adopt
from accel_runtime.checkpoint.foreign.reading import recognised
from accel_runtime.checkpoint.resuming import Resuming
from accel_runtime.checkpoint.retention import Retention
from accel_runtime.checkpoint.run import Run
from accel_runtime.checkpoint.staging import Staging
from accel_runtime.checkpoint.together import Share, together
from accel_runtime.data.loader import NextBatch, PreparedLoader
from accel_runtime.env import Settings
from accel_runtime.exchange.objects import share_objects
from accel_runtime.facade.processes import Processes
from accel_runtime.gradients import Gradients
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.options import DataLoaderConfiguration
from accel_runtime.parallel.gathering import at_rest
from accel_runtime.parallel.materializing import Memory, with_buffers
from accel_runtime.precision import Precision
from accel_runtime.project import ProjectConfiguration
from accel_runtime.scheduler import PreparedScheduler

if TYPE_CHECKING:
    from accel_runtime.checkpoint.saving import Saving

__all__ = ["Checkpointing"]

_LOG = logging.getLogger("accel_runtime.checkpoint")
_Path = str | os.PathLike[str]
SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


class Checkpointing(Processes):
    """What `Accelerator` does with checkpoints; `_keep_checkpoints` begins it."""

    _accumulation: Accumulation
    _gradients: Gradients
    _loader_config: DataLoaderConfiguration
    _loaders: Mapping[int, PreparedLoader]
    _loaders_prepared: int
    _memory: Memory
    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]
    _precision: Precision
    _schedulers: list[PreparedScheduler]
    project_configuration: ProjectConfiguration
    settings: Settings

    def _keep_checkpoints(self, resuming: Resuming) -> None:
        self._resuming = resuming
        self._looked_back = False
        self._disk = Disk()
        self._registered: list[Any] = []
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._background = Background(tells=self.process_index == 0)
        self._staging = Staging(pinned=self.device.type == "cuda")

    @property
    def checkpoints(self) -> Checkpoints:
        """Those with automatic names: which there are, the newest that is whole, whether it still is."""
        return Checkpoints(self.project_configuration.checkpoints)

    def save_state(
        self,
        output_dir: _Path | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool | None = None,
    ) -> str:
        """Save everything the run needs to go on: it is whole under its name, or not there.

        Models, optimizers, schedulers, the loss scaler, loaders, registered objects, random streams, and gradients
        held in an open accumulation window. Every process calls it. If some do not, and go on training, the first of those
        that do saves without them: what only the others have is missing, and a warning names it. Sharded models cannot
        be saved so.

        Args:
            output_dir: The checkpoint's directory; one that is a checkpoint is replaced once the new one is whole.
                None with `automatic_checkpoint_naming`, which names it.
            safe_serialization: True: there are only safetensors and JSON.
            async_save: Return as soon as the state is copied, and write while the script trains on. What goes wrong
                comes up at the next step of an optimizer, the next save, `wait_for_checkpoint`, or at the end.
                None is what `ProjectConfiguration(async_save=...)` says.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: It could not be written, by some process; what was there before is still there. Also:
                something cannot be saved, the save before has failed, or models are sharded and not all processes call it.
            StallError: A process does not come in time.
            ValueError: No directory; a directory where checkpoints are named automatically; `safe_serialization=False`.
        """
        if not safe_serialization:
            raise ValueError(
                "safe_serialization=False asks for pickles, which run code when they are loaded; save_state writes "
                "safetensors and JSON only. accelerator.save(obj, file) writes what torch.save writes"
            )
        retention = Retention(self.project_configuration, output_dir)
        self._warn_unless_looked_back()
        self._background.wait()
        in_background = self.project_configuration.async_save if async_save is None else async_save
        absence = self._backend.wait_for_ranks("save_state")
        save = partial(self._save, retention, output_dir, in_background=in_background)
        if absence is None:
            return save()
        own_data = any(loader.own_data for loader in self._loaders.values())
        return alone.save_without(absence, self._backend, partial(save, without=True), own_data=own_data)

    def _save(
        self, retention: Retention, output_dir: _Path | None, *, in_background: bool, without: bool = False
    ) -> str:
        """Save the run's state, with all other processes or without them; return the checkpoint's directory."""
        self._backend.settle()
        rank, world_size = (0, 1) if without else (self.process_index, self.num_processes)
        share = (lambda item: [item]) if without else self._share("save_state")
        marks, shared = self._resuming.origin.marks, self.settings.shared_files
        from accel_runtime.checkpoint.saving import Saving  # noqa: PLC0415 - slow to import

        saving = Saving(share, rank, world_size, self._disk, run=marks, shared=shared)
        numbered = retention.automatic is not None
        place = saving.begin(retention.target, _text(output_dir), numbered=numbered)
        run = self._run(alone=without)
        states = run.states()
        left = list(states)
        saving.run_hooks(lambda: _call(self._save_hooks, self._originals(), left, os.fspath(place.scratch)))
        saving.take(run.items(_left(states, left)), run.step, self._backend.hosted)
        retention.saved(place.target)
        if not in_background:
            self._finish(saving, retention, share)
            return os.fspath(place.target)
        share = share if without else self._backend.apart()
        saving.stage(self._staging)
        self._background.start(
            lambda: self._finish(saving, retention, share),
            place.target,
            lambda: saving.progress,
            [prepared.optimizer for prepared in self._optimizers],
        )
        return os.fspath(place.target)

    def load_state(
        self,
        input_dir: _Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
    ) -> Found:
        """Restore what `save_state` saved, on the same number of processes or on another; prepare everything before.

        All checksums are verified before anything changes. A loader begins at the start of the epoch in which the
        state was saved, in the same order, so that the script skips the batches it has trained on: with
        `skip_first_batches`, or by itself. If the state was saved after the last batch of an epoch, it begins the next
        one. `resume` continues after the last batch, without any skipping, and so does this method with
        `DataLoaderConfiguration(use_stateful_dataloader=True)`.

        Args:
            input_dir: A checkpoint's directory, also one that Accelerate wrote; None is the newest that is whole.
            load_kwargs: Accepted where it is empty: there is nothing left to say.
            strict: Whether everything saved has to be here and the other way round; False leaves out what does not
                fit, and a warning names it.

        Returns:
            The checkpoint, whose `manifest` says step, time and more.

        Raises:
            CheckpointError: There is none, it is damaged, or it does not fit; nothing was changed.
            ValueError: No directory, and checkpoints are not named automatically; or `load_kwargs`.
        """
        if load_kwargs:
            raise ValueError(f"load_kwargs are not used, and these were given: {', '.join(load_kwargs)}")
        stateful = self._loader_config.use_stateful_dataloader
        return self._load(input_dir, "next_batch" if stateful else "epoch_start", strict=strict)

    def _load(self, input_dir: _Path | None, position: NextBatch, *, strict: bool = True) -> Found:
        self._looked_back = True
        self._background.wait()
        self._backend.settle()
        share = self._share("load_state")
        if input_dir is not None and share(self.process_index == 0 and recognised(Path(input_dir)))[0]:
            return self._adopt(Path(input_dir).absolute(), share, strict=strict)
        from accel_runtime.checkpoint.loading import Loading  # noqa: PLC0415 - slow to import

        loading = Loading(
            share, self.process_index, self.num_processes, strict=strict, copies=self._backend.data.copies
        )
        with ExitStack() as stack:
            stack.callback(loading.close)
            found = loading.open(partial(_chosen, self.project_configuration, input_dir), _text(input_dir))
            gone: list[int] = []
            if self._load_hooks:
                loading.verify(found)
                loading.run_hooks(lambda: gone.extend(self._taken(found.path)))
            # Of models on the meta device: what no checkpoint has is computed, before anything changes.
            together(share, lambda: self._compute_buffers(stack))
            loading.load(found, self._run().items(without=gone, strict=strict, position=position))
            self._backend.settle()
        if found.number is not None and input_dir is None:
            self.project_configuration.iteration = found.number + 1
        return found

    def resume(self, input_dir: _Path | None = None) -> Found | None:
        """Continue from a checkpoint exactly where it was saved; prepare everything before.

        Each loader continues after the last batch it had handed out, so the script skips nothing:
        `for epoch in range(loader.epoch, epochs)`. If that was the last batch of an epoch, the loop over the loader
        ends at once, and what follows the epoch is done as it would have been.

        Args:
            input_dir: A checkpoint's directory. None takes one with an automatic name: with `accel launch --resume`
                the newest; without, the newest that this same run has written, after a restart of its processes or
                if Slurm runs the job again.

        Returns:
            The checkpoint; None if no directory was given and the run begins anew.

        Raises:
            CheckpointError: As for `load_state`; or there are checkpoints, and none is whole.
            ValueError: No directory, and checkpoints are not named automatically or the project has no directory.
        """
        self._looked_back = True
        if input_dir is not None:
            return self._load(input_dir, "exact")
        project = self.project_configuration
        if not project.automatic_checkpoint_naming or project.checkpoints is None:
            raise ValueError(
                "resume() looks for checkpoints that save_state() has named: it needs "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        if not self._resuming.possible:
            return None
        path = together(self._share("resume"), self._newest)[0]
        if path is None:
            return None
        found = self._load(path, "exact")
        project.iteration = (found.number or 0) + 1
        return found

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is written in the background is whole.

        Raises:
            CheckpointError: It could not be written.
        """
        self._background.wait()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save these with the run's state, in this order.

        Args:
            *objects: Each with `state_dict` and `load_state_dict`; the state is numbers, text, tensors, lists and
                dicts.

        Raises:
            ValueError: One without.
        """
        for thing in objects:
            if not all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ValueError(
                    f"register_for_checkpointing() takes objects with state_dict() and load_state_dict(); "
                    f"{type(thing).__qualname__} has not got both"
                )
        self._registered.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every process before a state is saved.

        The lists may be changed: models whose weights are taken out are not saved. Files written into `output_dir`,
        which is not yet the final one, become part of the checkpoint.

        Returns:
            Its `remove()` takes the hook away.
        """
        return _added(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every process before a state is loaded; models taken out are left alone.

        Returns:
            Its `remove()` takes the hook away.
        """
        return _added(self._load_hooks, hook)

    def _reserve(self, prepared: PreparedOptimizer) -> None:
        """Take memory for saving in the background once an optimizer has its state."""
        if self.project_configuration.async_save:
            hooks: list[RemovableHandle] = []

            def stepped(*_: Any) -> None:
                hooks.pop().remove()
                self._staging.reserve(self._run().bytes)

            hooks.append(prepared.optimizer.register_step_post_hook(stepped))

    def _finish(self, saving: Saving, retention: Retention, share: Share) -> None:
        if saving.finish(share) is not None:
            retention.prune(self._disk)

    def _compute_buffers(self, stack: ExitStack) -> None:
        for model in self._originals():
            try:
                stack.enter_context(with_buffers(model, self.device))
            except ValueError as error:
                raise CheckpointError(str(error)) from error

    def _adopt(self, path: Path, share: Share, *, strict: bool) -> Found:
        run, gone = self._run(), self._taken(path)
        return adopt(path, run, run.items(without=gone, strict=strict), share, strict=strict)

    def _taken(self, path: Path) -> list[int]:
        """Which models the script's own hooks load, after they have."""
        models = self._originals()
        left = list(models)
        _call(self._load_hooks, left, os.fspath(path))
        return [index for index, model in enumerate(models) if not any(model is other for other in left)]

    def _run(self, *, alone: bool = False) -> Run:
        at_rest(self._originals())
        return Run(
            self._backend,
            self._models,
            self._optimizers,
            self._schedulers,
            [self._loaders.get(number) for number in range(self._loaders_prepared)],
            self._precision,
            self._accumulation,
            self._gradients,
            self._registered,
            self._memory,
            alone=alone,
        )

    def _originals(self) -> list[nn.Module]:
        return [self._backend.original(model) for model in self._models]

    def _share(self, operation: str) -> Share:
        if self.num_processes == 1:
            return lambda item: [item]
        return lambda item: share_objects(operation, item, self._backend.agreement)

    def _warn_unless_looked_back(self) -> None:
        """Say once that the script has not gone on from anything, though it was started to."""
        if self._resuming.asked and not self._looked_back and self.process_index == 0:
            _LOG.warning(
                "--resume was given, and the script calls neither resume() nor load_state(): it began anew"
            )
        self._looked_back = True

    def _newest(self) -> Path | None:
        """Where the run goes on from, as the first rank sees it."""
        found = self._resuming.choose(self.checkpoints) if self.process_index == 0 else None
        return found.path if found else None


def _chosen(project: ProjectConfiguration, input_dir: _Path | None) -> Path:
    if input_dir is not None:
        return Path(input_dir).absolute()
    if not project.automatic_checkpoint_naming:
        raise CheckpointError(
            "load_state() was given no directory; it finds one itself only with "
            "ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    return Checkpoints(project.checkpoints).newest().path


def _text(path: _Path | None) -> str | None:
    return None if path is None else os.path.abspath(path)  # noqa: PTH100 - `..` goes too


def _left(states: list[dict[str, Any]], left: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By the numbers of their models, the states that hooks have left in a list, or put in their places."""
    if len(left) == len(states):
        return dict(enumerate(left))
    return {index: state for index, state in enumerate(states) if any(state is other for other in left)}


def _call(hooks: Mapping[int, Callable[..., None]], *args: Any) -> None:
    for hook in hooks.values():
        hook(*args)


def _added(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
