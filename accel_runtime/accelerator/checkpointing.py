"""Saving, loading and resuming of checkpoints by an `Accelerator`."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_runtime.accelerator.properties import AcceleratorProperties
from accel_runtime.checkpoint.accelerate_format import restore_accelerate_checkpoint
from accel_runtime.checkpoint.manager import (
    BackgroundWriter,
    Checkpoints,
    ResumePolicy,
    RetentionPolicy,
    StagingBuffers,
)
from accel_runtime.checkpoint.state_items import is_sharded
from accel_runtime.checkpoint.training_state import TrainingState
from accel_runtime.collectives.calls import collective
from accel_runtime.collectives.handshake import all_gather_objects
from accel_runtime.data.loader import NextBatch
from accel_runtime.foundation.options import ProjectConfiguration
from accel_runtime.parallel.big_modeling import MetaModels, compute_buffers
from accel_runtime.storage.directory import exists
from accel_runtime.storage.errors import AllGatherObjects, CheckpointError, errors_on_all_ranks
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import Checkpoint
from accel_runtime.storage.scan import is_accelerate_checkpoint
from accel_runtime.storage.shared_directory import explain_separate_nodes
from accel_runtime.training.optimizer import PreparedOptimizer

__all__ = ["CheckpointMethods"]

_LOG = logging.getLogger("accel_runtime.checkpoint")
_Path = str | os.PathLike[str]
SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


class CheckpointMethods(AcceleratorProperties):
    """Methods of `Accelerator` for checkpoints."""

    def _init_checkpointing(self, resume_policy: ResumePolicy, node_name: str) -> None:
        self._resume_policy = resume_policy
        self._node_name = node_name
        self._checked_directory = False
        self._load_attempted = False
        self._file_system = FileSystem()
        self._registered: list[Any] = []
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._background_writer = BackgroundWriter(prints_progress=self._backend.topology.rank == 0)
        self._staging = StagingBuffers(pinned=self._backend.device.type == "cuda")

    @property
    def checkpoints(self) -> Checkpoints:
        """Return the checkpoints with automatic names, to list, find and verify them."""
        return Checkpoints(self.project_configuration.checkpoints)

    def _check_shared_directory(self) -> None:
        """Check before the first step that all nodes see the directory of checkpoints; free on one node.

        Without automatic names the script may save elsewhere, or nothing, so that a warning has to do.

        Raises:
            CheckpointError: Checkpoints with automatic names cannot be saved there.
        """
        topology = self._backend.topology
        if self._checked_directory or topology.local_world_size == topology.world_size:
            return
        self._checked_directory = True
        sharded = any(is_sharded(parameter) for model in self._models for parameter in model.parameters())
        project, is_first = self.project_configuration, topology.rank == 0
        directory = project.checkpoints if project.automatic_checkpoint_naming else project.project_dir
        is_needed = is_first and directory is not None and (self.settings.shared_files or sharded)
        problem = explain_separate_nodes(
            Path(directory) if is_needed and directory is not None else None,
            self._build_all_gather("prepare"),
            self._node_name if topology.local_rank == 0 else None,
            self._file_system,
            sharded=sharded,
        )
        if problem and project.automatic_checkpoint_naming:
            raise CheckpointError(problem)
        if problem and is_first:
            _LOG.warning("%s", problem)

    @collective("output_dir", "safe_serialization", "async_save")
    def save_state(
        self,
        output_dir: _Path | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool | None = None,
    ) -> str:
        """Save a checkpoint with the full training state; after a failure, no incomplete checkpoint exists.

        The checkpoint contains models, optimizers, schedulers, the loss scaler, loaders, registered objects, random number
        generators, and the gradients of an incomplete accumulation cycle. All processes must call it. If some do not call
        it and continue training, the first process that does call it saves without them; a warning lists the missing state.
        Sharded models cannot be saved without all processes.

        Args:
            output_dir: The directory of the checkpoint; an existing checkpoint is replaced when the new one is complete.
                None with `automatic_checkpoint_naming`.
            safe_serialization: Must be True: a checkpoint contains safetensors and JSON files only.
            async_save: Return when the state is copied, and write in the background. The next optimizer step, the next
                save, `wait_for_checkpoint` or the end of the script raises the error of a failed write.
                None means the option of `ProjectConfiguration`.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: If a process cannot write the checkpoint (the previous one is kept), an object cannot be
                saved, the last background write failed, or models are sharded and not all processes call it.
            StallError: If a process does not call it in time.
            ValueError: If there is no directory, or `safe_serialization=False`.
        """
        if not safe_serialization:
            raise ValueError(
                "save_state cannot write pickles (safe_serialization=False): loading them runs code. Leave out "
                "safe_serialization, or write single objects with accelerator.save(obj, file)."
            )
        retention = RetentionPolicy(self.project_configuration, output_dir)
        if self._resume_policy.asked and not self._load_attempted and self._backend.topology.rank == 0:
            _LOG.warning(
                "--resume had no effect: the script calls neither resume() nor load_state(), and started from the "
                "beginning. Call accelerator.resume() after prepare()."
            )
        self._load_attempted = True
        self._background_writer.wait()
        in_background = self.project_configuration.async_save if async_save is None else async_save
        absence = self._backend.wait_for_ranks("save_state")
        save = partial(self._write_checkpoint, retention, output_dir, in_background=in_background)
        if absence is None:
            self._replica_check.compare_at_save()
            return save()
        own_data = any(loader.is_presharded for loader in self._loaders.values())
        from accel_runtime.checkpoint.save import save_without_missing_ranks  # noqa: PLC0415 - slow to import

        return save_without_missing_ranks(
            absence, self._strategy, partial(save, alone=True), own_data=own_data
        )

    def _write_checkpoint(
        self,
        retention: RetentionPolicy,
        output_dir: _Path | None,
        *,
        in_background: bool,
        alone: bool = False,
    ) -> str:
        """Write a checkpoint with all other processes or without them, and return its directory."""
        began = time.monotonic()
        self._strategy.synchronize()
        topology = self._backend.topology
        rank, world_size = (0, 1) if alone else (topology.rank, topology.world_size)
        # Paths are compared by the operation itself; the project's option counts as the argument does.
        operation = f"save_state with async_save={in_background}"
        all_gather = (lambda item: [item]) if alone else self._build_all_gather(operation)
        origin, shared = self._resume_policy.origin, self.settings.shared_files
        from accel_runtime.checkpoint.save import SaveOperation  # noqa: PLC0415 - slow to import

        saving = SaveOperation(
            all_gather, rank, world_size, self._file_system, run=origin.identity, shared=shared
        )
        numbered = retention.automatic is not None
        place = saving.begin(retention.target, _absolute(output_dir), numbered=numbered)
        state = self._training_state(alone=alone)
        model_states = state.states()
        hooked = list(model_states)
        saving.run_hooks(
            lambda: _run_hooks(self._save_hooks, self._original_models(), hooked, os.fspath(place.scratch))
        )
        # Hooks may remove or replace states in the list; a list of the same length keeps the numbers of the models.
        remaining = (
            dict(enumerate(hooked))
            if len(hooked) == len(model_states)
            else {i: item for i, item in enumerate(model_states) if any(item is other for other in hooked)}
        )
        saving.collect(state.items(remaining), state.step, self._backend.runtime.state_to_host)
        retention.saved(place.target)

        def finish() -> None:
            if saving.finish(all_gather) is not None:
                retention.prune(self._file_system)
            self._record_checkpoint("save", place.target, began)

        if not in_background:
            finish()
            return os.fspath(place.target)
        all_gather = all_gather if alone else self._backend.open_object_channel()
        saving.stage(self._staging)
        self._background_writer.start(
            finish,
            place.target,
            lambda: saving.progress,
            [prepared.optimizer for prepared in self._optimizers],
        )
        return os.fspath(place.target)

    @collective("input_dir", "load_kwargs")
    def load_state(
        self,
        input_dir: _Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
    ) -> Checkpoint:
        """Load a checkpoint of `save_state`, on any number of processes; prepare all objects before.

        All checksums are verified before any state changes. A loader restarts the epoch of the checkpoint in the same
        order, so that the script can skip the batches it has trained on, with `skip_first_batches` or by itself. After the
        last batch of an epoch, it starts the next epoch. `resume` continues after the last batch without skipping, and so
        does this method with `DataLoaderConfiguration(use_stateful_dataloader=True)`.

        Args:
            input_dir: The directory of a checkpoint, also one of Accelerate; None means the newest complete checkpoint.
            load_kwargs: Must be empty; exists for scripts written for Accelerate.
            strict: Require that the checkpoint and the prepared objects match exactly. With False, a warning lists the
                state that is not loaded.

        Returns:
            The checkpoint; its `manifest` contains step, time and more.

        Raises:
            CheckpointError: If no checkpoint is found, or it is damaged or does not match; no state was changed.
            ValueError: If there is no directory and checkpoints have no automatic names, or `load_kwargs` are passed.
        """
        if load_kwargs:
            raise ValueError(
                f"load_state() does not support load_kwargs: it got {', '.join(load_kwargs)}. Leave them out."
            )
        stateful = self._loader_config.use_stateful_dataloader
        return self._load_checkpoint(input_dir, "next_batch" if stateful else "epoch_start", strict=strict)

    def _load_checkpoint(
        self,
        input_dir: _Path | None,
        position: NextBatch,
        *,
        strict: bool = True,
        choose: Callable[[], Path] | None = None,
    ) -> Checkpoint:
        self._load_attempted = True
        self._background_writer.wait()
        began = time.monotonic()
        checkpoint = self._restore_checkpoint(
            input_dir,
            position,
            choose or partial(_find_checkpoint, self.project_configuration, input_dir),
            strict=strict,
        )
        self._record_checkpoint("load", checkpoint.path, began)
        return checkpoint

    def _record_checkpoint(self, kind: Literal["save", "load"], path: Path, began: float) -> None:
        if self._recorder is not None:
            self._recorder.record_checkpoint(kind, os.fspath(path), time.monotonic() - began)

    def _restore_checkpoint(
        self, input_dir: _Path | None, position: NextBatch, choose: Callable[[], Path], *, strict: bool
    ) -> Checkpoint:
        self._strategy.synchronize()
        operation = "resume" if position == "exact" else f"load_state with position={position}"
        all_gather = self._build_all_gather(operation)
        if (
            input_dir is not None
            and all_gather(self._backend.topology.rank == 0 and is_accelerate_checkpoint(Path(input_dir)))[0]
        ):
            path, state = Path(input_dir).absolute(), self._training_state(self._meta_models)
            items = state.items(without=self._run_load_hooks(path), strict=strict)
            return restore_accelerate_checkpoint(path, state, items, all_gather, strict=strict)
        from accel_runtime.checkpoint.load import LoadOperation  # noqa: PLC0415 - slow to import

        loading = LoadOperation(
            all_gather,
            self._backend.topology.rank,
            self._backend.topology.world_size,
            strict=strict,
            copies=self._backend.data_rank.model_parallel_size,
        )
        with ExitStack() as stack:
            stack.callback(loading.close)
            checkpoint = loading.open(choose, _absolute(input_dir), verify=bool(self._load_hooks))
            loaded_by_hooks: list[int] = []
            if self._load_hooks:
                with errors_on_all_ranks(all_gather):
                    loaded_by_hooks = self._run_load_hooks(checkpoint.path)
            # Buffers of models on the meta device that no checkpoint contains are computed before any state changes.
            with errors_on_all_ranks(all_gather):
                for model in self._original_models():
                    try:
                        stack.enter_context(compute_buffers(model, self._backend.device))
                    except ValueError as error:
                        raise CheckpointError(str(error)) from error
            checkpoint = loading.load(
                self._training_state(self._meta_models).items(
                    without=loaded_by_hooks, strict=strict, position=position
                ),
            )
            self._strategy.synchronize()
        if checkpoint.number is not None and input_dir is None:
            self.project_configuration.iteration = checkpoint.number + 1
        return checkpoint

    @collective("input_dir")
    def resume(self, input_dir: _Path | None = None) -> Checkpoint | None:
        """Load a checkpoint and continue exactly after the last batch before it; prepare all objects before.

        Each loader continues after the last batch it yielded, so the script skips nothing: `for epoch in
        range(loader.epoch, epochs)`. If that was the last batch of an epoch, the loop over the loader ends
        immediately, and the code after the epoch runs.

        Args:
            input_dir: The directory of a checkpoint. None means a checkpoint with an automatic name: with
                `accel launch --resume` the newest; otherwise the newest of this run, after a restart of its processes or
                a requeue by Slurm.

        Returns:
            The checkpoint; None if no directory is passed and there is nothing to resume.

        Raises:
            CheckpointError: As for `load_state`; or if checkpoints exist and none is complete.
            ValueError: If there is no directory, and checkpoints have no automatic names or the project has no directory.
        """
        self._load_attempted = True
        if input_dir is not None:
            return self._load_checkpoint(input_dir, "exact")
        project = self.project_configuration
        if not project.automatic_checkpoint_naming or project.checkpoints is None:
            raise ValueError(
                "resume() cannot search for checkpoints: they have no automatic names. Pass a directory, or set "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        if not self._resume_policy.possible:
            return None
        with errors_on_all_ranks(self._build_all_gather("resume without input_dir")) as step:
            is_first = self._backend.topology.rank == 0
            chosen = self._resume_policy.choose(self.checkpoints) if is_first else None
            step.value = chosen.path if chosen else None
        path: Path | None = step.values[0]
        if path is None:
            return None
        newest = path

        def choose() -> Path:
            nonlocal newest
            if not exists(newest):  # another process has removed it
                chosen = self._resume_policy.choose(self.checkpoints)
                newest = chosen.path if chosen else newest
            return newest

        checkpoint = self._load_checkpoint(path, "exact", choose=choose)
        project.iteration = (checkpoint.number or 0) + 1
        return checkpoint

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete.

        Raises:
            CheckpointError: If it cannot be written.
        """
        self._background_writer.wait()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in the checkpoints of `save_state`, in this order.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`; the state consists of numbers, text, tensors, lists
                and dicts.

        Raises:
            ValueError: If an object lacks one of the methods.
        """
        for item in objects:
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ValueError(
                    f"register_for_checkpointing() cannot save {type(item).__qualname__}: it lacks state_dict() or "
                    "load_state_dict(). Define both."
                )
        self._registered.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every process before a state is saved.

        The hook may change the lists: models whose weights are removed are not saved. Files written into `output_dir`, a
        temporary directory, become part of the checkpoint.

        Returns:
            A handle; its `remove()` removes the hook.
        """
        return _add_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every process before a state is loaded; models removed from the list are not.

        Returns:
            A handle; its `remove()` removes the hook.
        """
        return _add_hook(self._load_hooks, hook)

    def _reserve_staging(self, prepared: PreparedOptimizer) -> None:
        """Allocate the buffers of background saves after the first step of an optimizer, which creates its state."""
        if self.project_configuration.async_save:
            handles: list[RemovableHandle] = []

            def reserve(*_: Any) -> None:
                handles.pop().remove()
                self._staging.reserve(self._training_state().bytes)

            handles.append(prepared.optimizer.register_step_post_hook(reserve))

    def _run_load_hooks(self, path: Path) -> list[int]:
        """Run the hooks of the script, and return the indices of the models that they removed from the list."""
        models = self._original_models()
        remaining = list(models)
        _run_hooks(self._load_hooks, remaining, os.fspath(path))
        return [index for index, model in enumerate(models) if not any(model is other for other in remaining)]

    def _training_state(self, memory: MetaModels | None = None, *, alone: bool = False) -> TrainingState:
        return TrainingState(
            self._strategy,
            self._models,
            self._optimizers,
            self._schedulers,
            [self._loaders.get(number) for number in range(self._loaders_prepared)],
            self._precision,
            self._accumulation,
            self._gradients,
            self._registered,
            memory,
            alone=alone,
        )

    def _original_models(self) -> list[nn.Module]:
        return [self._strategy.unwrap_model(model) for model in self._models]

    def _build_all_gather(self, operation: str) -> AllGatherObjects:
        """Return the function that gathers an object from all processes for an operation."""
        if self._backend.topology.world_size == 1:
            return lambda item: [item]
        return lambda item: all_gather_objects(operation, item, self._backend.handshake)


def _find_checkpoint(project: ProjectConfiguration, input_dir: _Path | None) -> Path:
    if input_dir is not None:
        return Path(input_dir).absolute()
    if not project.automatic_checkpoint_naming:
        raise CheckpointError(
            "load_state() cannot search for a checkpoint: checkpoints have no automatic names. Pass a directory, or set "
            "ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return Checkpoints(project.checkpoints).newest().path


def _absolute(path: _Path | None) -> str | None:
    return None if path is None else os.path.abspath(path)  # noqa: PTH100 - Path.absolute() keeps `..`


def _run_hooks(hooks: Mapping[int, Callable[..., None]], *args: Any) -> None:
    for hook in hooks.values():
        hook(*args)


def _add_hook(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
