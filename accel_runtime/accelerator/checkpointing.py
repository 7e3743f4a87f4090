"""Saving, loading and resuming of the checkpoints of a run."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_runtime.accelerator.run import Run
from accel_runtime.checkpoint.background import BackgroundWriter, StagingBuffers
from accel_runtime.checkpoint.node_saves import Candidate, NodeSaves, open_node_saves
from accel_runtime.checkpoint.project_checkpoints import Checkpoints, ResumePolicy, RetentionPolicy, RunOrigin
from accel_runtime.checkpoint.save import SaveOperation, SaveTarget, save_without_missing_ranks
from accel_runtime.checkpoint.state_items import StateItem, is_sharded
from accel_runtime.checkpoint.training_state import TrainingState
from accel_runtime.data.state import NextBatch
from accel_runtime.environment.locations import is_url, normalize_location
from accel_runtime.environment.text import print_note
from accel_runtime.foundation.options import ProjectConfiguration
from accel_runtime.parallel.big_modeling import MetaModels, compute_buffers
from accel_runtime.storage.any_store import open_store
from accel_runtime.storage.errors import CheckpointError, DamageError, NodePartError, errors_on_all_ranks
from accel_runtime.storage.formats import FORMATS, find_format
from accel_runtime.storage.manifest import Checkpoint
from accel_runtime.storage.store import Store, list_numbered, next_number
from accel_runtime.training.optimizer import PreparedOptimizer

__all__ = ["Checkpointing", "LoadHook", "SaveHook"]

_LOG = logging.getLogger("accel_runtime.checkpoint")
_Path = str | os.PathLike[str]
SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


class Checkpointing:
    """Save and load the training state of a run; see the methods of `Accelerator` with these names.

    Args:
        run: The run.
        origin: The run in which this process was started.
        node_name: The name of this node in messages.
        is_stopping: Return whether the run is being stopped, the same on all processes.
    """

    def __init__(self, run: Run, origin: RunOrigin, node_name: str, is_stopping: Callable[[], bool]) -> None:
        self._run, self._node_name, self._is_stopping = run, node_name, is_stopping
        self._node_saves: NodeSaves | None = None
        self._warned_of_node_dir = False
        self._resume_policy = ResumePolicy(run.options.settings.resume, origin)
        self._checked_directory = False
        self._load_attempted = False
        # Attempts of one launch are one run. A load continues the lineage of its checkpoint.
        self._lineage = origin.launch or secrets.token_hex(6)
        self._store: Store = open_store(origin.identity)
        self._registered: list[Any] = []
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._background_writer = BackgroundWriter(prints_progress=run.backend.topology.rank == 0)
        self._staging = StagingBuffers(pinned=run.backend.device.type == "cuda")

    @property
    def checkpoints(self) -> Checkpoints:
        """Return the checkpoints with automatic names, to list, find and verify them."""
        return Checkpoints(self._run.options.project.checkpoints, self._store)

    def check_shared_directory(self) -> None:
        """Check before the first step that all nodes can save checkpoints; free on one node, except for an object store.

        Without automatic names the script may save elsewhere, or nothing, so that a warning has to do.

        Raises:
            CheckpointError: Checkpoints with automatic names cannot be saved there.
        """
        self._connect_node_saves("prepare")
        topology = self._run.backend.topology
        if self._checked_directory:
            return
        self._checked_directory = True
        project = self._run.options.project
        if project.automatic_checkpoint_naming and project.checkpoints and is_url(project.checkpoints):
            with errors_on_all_ranks(self._run.build_all_gather("prepare")):
                if topology.local_rank == 0:
                    self._store.check_access(os.fspath(project.checkpoints))
            return
        if topology.local_world_size == topology.world_size:
            return
        sharded = any(
            is_sharded(parameter) for model in self._run.prepared.models for parameter in model.parameters()
        )
        is_first = topology.rank == 0
        directory = project.checkpoints if project.automatic_checkpoint_naming else project.project_dir
        is_needed = (
            is_first
            and directory is not None
            and not is_url(directory)
            and (self._run.options.settings.shared_files or sharded)
        )
        problem = self._store.explain_separate_nodes(
            os.fspath(directory) if is_needed and directory is not None else None,
            self._run.build_all_gather("prepare"),
            self._node_name if topology.local_rank == 0 else None,
            sharded=sharded,
        )
        if problem and project.automatic_checkpoint_naming:
            raise CheckpointError(problem)
        if problem and is_first:
            _LOG.warning("%s", problem)

    def _connect_node_saves(self, operation: str) -> NodeSaves | None:
        """Return the saves of the project on its nodes; None without `node_dir` or automatic names. Collective."""
        project, settings = self._run.options.project, self._run.options.settings
        parent = project.checkpoints
        if (
            not settings.node_dir
            or not project.automatic_checkpoint_naming
            or project.project_dir is None
            or parent is None
        ):
            return None
        if self._node_saves is None:
            rank = self._run.backend.topology.rank
            self._node_saves = open_node_saves(
                self._store, settings.node_dir, project.project_dir, settings.store_every, rank
            )
        number = self._node_saves.connect(
            self._run.build_all_gather(operation), lambda: next_number(self._store, os.fspath(parent))
        )
        project.iteration = max(project.iteration, number)
        return self._node_saves

    def _warn_of_node_dir(self) -> None:
        """Warn once that the directory of the profile has no effect."""
        is_idle = (
            self._run.options.settings.node_dir and not self._run.options.project.automatic_checkpoint_naming
        )
        if is_idle and not self._warned_of_node_dir and self._run.backend.topology.rank == 0:
            self._warned_of_node_dir = True
            _LOG.warning(
                "node_dir has no effect: the script names its checkpoints. Set "
                "ProjectConfiguration(automatic_checkpoint_naming=True), and call save_state() without a directory."
            )

    def save_state(
        self,
        output_dir: _Path | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool | None = None,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> str:
        """Save a checkpoint, and return its directory; "" if that failed and `on_error` is "warn". Collective."""
        if on_error not in {"raise", "warn"}:
            raise ValueError(f"Invalid on_error {on_error!r}: expected 'raise' or 'warn'.")
        if not safe_serialization:
            raise ValueError(
                "save_state cannot write pickles (safe_serialization=False): loading them runs code. Leave out "
                "safe_serialization, or write single objects with accelerator.save(obj, file)."
            )
        retention = RetentionPolicy(self._run.options.project, output_dir)
        if not self._load_attempted and self._run.backend.topology.rank == 0:
            if self._resume_policy.asked:
                _LOG.warning(
                    "--resume had no effect: the script calls neither resume() nor load_state(), and started from the "
                    "beginning. Call accelerator.resume() after prepare()."
                )
            elif retention.automatic is not None:
                self._report_earlier_run()
        self._load_attempted = True
        self._warn_of_node_dir()
        self._background_writer.wait()
        in_background = self._run.options.project.async_save if async_save is None else async_save
        absence = self._run.backend.wait_for_ranks("save_state")
        warn = self._warn_of_failed_save if on_error == "warn" else None
        save = partial(self._write_checkpoint, retention, output_dir, in_background=in_background, warn=warn)
        try:
            if absence is None:
                return save()
            own_data = any(loader.is_presharded for loader in self._run.prepared.loaders)
            return save_without_missing_ranks(
                absence, self._run.strategy, partial(save, one_rank=True), own_data=own_data
            )
        except CheckpointError as error:
            if warn is None:
                raise
            warn(error)
            return ""

    def _report_earlier_run(self) -> None:
        """Print the checkpoint of an earlier run that this run does not continue; without effect on the other ranks."""
        with suppress(CheckpointError):  # the save reports a store that fails, on all ranks
            self._resume_policy.report_earlier_run(self.checkpoints)

    def _warn_of_failed_save(self, error: CheckpointError) -> None:
        if self._run.backend.topology.rank == 0:
            _LOG.warning("save_state() failed, and training goes on without this checkpoint: %s", error)

    def _write_checkpoint(
        self,
        retention: RetentionPolicy,
        output_dir: _Path | None,
        *,
        in_background: bool,
        one_rank: bool = False,
        warn: Callable[[CheckpointError], None] | None = None,
    ) -> str:
        """Write a checkpoint with all other processes or without them, and return its directory.

        `warn` gets the error of a save in the background, instead of the next step.
        """
        began = time.monotonic()
        strategy, backend = self._run.strategy, self._run.backend
        strategy.synchronize()
        saves = None if one_rank else self._connect_node_saves("save_state")
        # Paths are compared by the operation itself; the project's option counts as the argument does.
        group = self._run.build_group(f"save_state with async_save={in_background}", one_rank=one_rank)

        lineage = self._lineage
        # None if this save goes to the project directory.
        on_nodes = saves if saves is not None and saves.takes_next and not self._is_stopping() else None
        saving = (SaveOperation if on_nodes is None else on_nodes.operation)(
            group,
            self._store,
            run={**self._resume_policy.origin.identity, "lineage": lineage},
            shared=on_nodes is not None or self._run.options.settings.shared_files,
            replicas=None if one_rank else self._run.checks.replicas,
            to_host=backend.runtime.state_to_host,
            ranks=None if on_nodes is None else on_nodes.ranks,
        )
        numbered = retention.automatic is not None
        target = SaveTarget(partial(retention.target, self._store), _normalize(output_dir), numbered)
        if on_nodes is not None:
            target = on_nodes.choose_target(self._run.options.project.iteration, target.directory)
        state = self._training_state(one_rank=one_rank)
        model_states = state.states()
        hooked = list(model_states)
        call_hooks = None
        if self._save_hooks:
            call_hooks = partial(_call_save_hooks, self._save_hooks, self._run.original_models, hooked)
            for model in () if one_rank else self._run.prepared.models:
                # Here, as on ranks without hooks, since DDP may rebuild its buckets with all ranks.
                strategy.capture_replica_state(model)

        def list_items() -> list[StateItem]:
            # Hooks may remove or replace states in the list; a list of the same length keeps the numbers of the models.
            if len(hooked) == len(model_states):
                return state.items(dict(enumerate(hooked)))
            remaining = {
                i: item for i, item in enumerate(model_states) if any(item is other for other in hooked)
            }
            return state.items(remaining)

        draft = saving.open(target, list_items, state.step, call_hooks)
        retention.reserve_number(draft.key)

        def finish() -> None:
            is_committed = saving.finish(group) is not None
            if saves is not None:
                saves.record_save(draft.key, on_nodes=on_nodes is not None)
            if is_committed and on_nodes is None:
                retention.prune(self._store, lineage)
            self._record_checkpoint("save", draft.key, began)

        if not in_background:
            finish()
            return draft.key
        group = group if one_rank else backend.open_object_channel()
        saving.stage(self._staging)
        self._background_writer.start(
            finish,
            draft.key,
            lambda: saving.progress,
            [prepared.optimizer for prepared in self._run.prepared.optimizers],
            warn,
        )
        return draft.key

    def load_state(
        self,
        input_dir: _Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
    ) -> Checkpoint:
        """Load a checkpoint of `save_state`; collective."""
        if load_kwargs:
            raise ValueError(
                f"load_state() does not support load_kwargs: it got {', '.join(load_kwargs)}. Leave them out."
            )
        stateful = self._run.options.loaders.use_stateful_dataloader
        position: NextBatch = "next_batch" if stateful else "epoch_start"
        if input_dir is None and (checkpoint := self._load_newest(position, lambda _: True, strict=strict)):
            return checkpoint
        return self._load_checkpoint(input_dir, position, strict=strict)

    def _load_newest(
        self, position: NextBatch, accepts: Callable[[Checkpoint], bool], *, strict: bool = True
    ) -> Checkpoint | None:
        """Load the newest checkpoint in the store or on the disks of the nodes that all ranks can read; None if there is none.

        A damaged one, and parts that do not suffice, are left out with a message.
        """
        self._load_attempted = True
        self._background_writer.wait()
        saves, is_first = self._connect_node_saves("load_state"), self._run.backend.topology.rank == 0
        if saves is None:
            return None
        all_gather = self._run.build_all_gather("search for the newest checkpoint")
        parent = os.fspath(self._run.options.project.checkpoints or "")
        candidates = saves.find_candidates(all_gather, partial(list_numbered, self._store, parent), accepts)
        for candidate in candidates:
            try:
                checkpoint = self._load_checkpoint(None, position, strict=strict, candidate=candidate)
            except (NodePartError, DamageError) as error:
                if candidate is candidates[-1]:
                    raise
                if is_first:
                    reason = error.reason if isinstance(error, NodePartError) else error.problems[0]
                    print_note(f"checkpoint_{candidate.number} is not used: {reason}")
            else:
                saves.record_load(candidate, candidates)
                if is_first and position == "exact":
                    place = "on the disks of the nodes" if candidate.save else "in the project directory"
                    print_note(f"resuming from {checkpoint.key} (step {checkpoint.manifest.step}), {place}")
                return checkpoint
        return None

    def _load_checkpoint(
        self,
        input_dir: _Path | None,
        position: NextBatch,
        *,
        strict: bool = True,
        choose: Callable[[], str] | None = None,
        candidate: Candidate | None = None,
    ) -> Checkpoint:
        self._load_attempted = True
        self._background_writer.wait()
        began = time.monotonic()
        if candidate is not None:
            choose = partial(str, candidate.key)
        checkpoint = self._restore_checkpoint(
            input_dir,
            position,
            choose or partial(_find_checkpoint, self._run.options.project, self._store, input_dir),
            strict=strict,
            part=candidate if candidate is not None and candidate.save else None,
        )
        self._run.checks.restart()
        self._lineage = checkpoint.manifest.run.get("lineage", self._lineage)
        self._record_checkpoint("load", checkpoint.key, began)
        return checkpoint

    def _record_checkpoint(self, kind: Literal["save", "load"], key: str, began: float) -> None:
        if self._run.recorder is not None:
            self._run.recorder.record_checkpoint(kind, key, time.monotonic() - began)

    def _restore_checkpoint(
        self,
        input_dir: _Path | None,
        position: NextBatch,
        choose: Callable[[], str],
        *,
        strict: bool,
        part: Candidate | None,
    ) -> Checkpoint:
        self._run.strategy.synchronize()
        operation = "resume" if position == "exact" else f"load_state with position={position}"
        all_gather = self._run.build_all_gather(operation)
        if input_dir is not None and not is_url(input_dir):
            with errors_on_all_ranks(all_gather) as step:
                is_first = self._run.backend.topology.rank == 0
                step.share((is_first and find_format(Path(input_dir), loads=True)) or None)
            if restore := FORMATS[step.values[0]].restore if step.values[0] else None:
                path, state = Path(input_dir).absolute(), self._training_state(self._run.meta_models)
                items = state.items(without=self._run_load_hooks(path), strict=strict)
                checkpoint = restore(path, state, items, all_gather, strict=strict)
                state.view.write_back()
                return checkpoint
        from accel_runtime.checkpoint.load import LoadOperation  # noqa: PLC0415 - slow to import

        loading = LoadOperation(
            all_gather,
            self._run.backend.topology.rank,
            self._run.backend.topology.world_size,
            self._store,
            strict=strict,
            copies=self._run.backend.data_rank.model_parallel_size,
            local_world_size=self._run.backend.topology.local_world_size,
            node_ranks=() if self._node_saves is None else self._node_saves.ranks,
        )
        with ExitStack() as stack:
            stack.callback(loading.close)
            has_hooks = bool(self._load_hooks)
            if part is None:
                checkpoint = loading.open(choose, _normalize(input_dir), verify=has_hooks)
            else:
                checkpoint = loading.open_node_part(part.key, part.save, verify=has_hooks)
            loaded_by_hooks: list[int] = []
            if self._load_hooks:
                with errors_on_all_ranks(all_gather):
                    loaded_by_hooks = self._run_load_hooks(loading.directory())
            # Buffers of models on the meta device that no checkpoint contains are computed before any state changes.
            with errors_on_all_ranks(all_gather):
                for model in self._run.original_models:
                    try:
                        stack.enter_context(compute_buffers(model, self._run.backend.device))
                    except ValueError as error:
                        raise CheckpointError(str(error)) from error
            state = self._training_state(self._run.meta_models)
            checkpoint = loading.load(state.items(without=loaded_by_hooks, strict=strict, position=position))
            state.view.write_back()
            self._run.strategy.synchronize()
        if checkpoint.number is not None and input_dir is None:
            self._run.options.project.continue_after(checkpoint.number)
        return checkpoint

    def resume(self, input_dir: _Path | None = None) -> Checkpoint | None:
        """Load a checkpoint to continue exactly after it; None if there is none. Collective."""
        if self._run.loops.has_returned_batches:
            raise RuntimeError(
                "Cannot resume: a loop over a prepared loader is running, and would go on with its own batches instead of those "
                "after the checkpoint. Call resume() before the loop, or leave the loop and begin it again after resume(). "
                "load_state() loads a checkpoint within a loop, which goes on as it is."
            )
        self._load_attempted = True
        if input_dir is not None:
            return self._load_checkpoint(input_dir, "exact")
        project = self._run.options.project
        if not project.automatic_checkpoint_naming or project.checkpoints is None:
            raise ValueError(
                "resume() cannot search for checkpoints: they have no automatic names. Pass a directory, or set "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        if not self._resume_policy.possible:
            if self._run.backend.topology.rank == 0:
                self._report_earlier_run()
            return None
        if checkpoint := self._load_newest("exact", self._resume_policy.accepts):
            return checkpoint
        with errors_on_all_ranks(self._run.build_all_gather("resume without input_dir")) as step:
            is_first = self._run.backend.topology.rank == 0
            chosen = self._resume_policy.choose(self.checkpoints) if is_first else None
            step.share(chosen.key if chosen else None)
        key: str | None = step.values[0]
        if key is None:
            return None
        newest = key

        def choose() -> str:
            nonlocal newest
            if not self._store.exists(newest):  # another process has removed it
                chosen = self._resume_policy.choose(self.checkpoints)
                newest = chosen.key if chosen else newest
            return newest

        checkpoint = self._load_checkpoint(key, "exact", choose=choose)
        project.continue_after(checkpoint.number or 0)
        return checkpoint

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete."""
        self._background_writer.wait()

    def register_for_checkpointing(self, objects: Iterable[Any]) -> None:
        """Include objects in checkpoints."""
        for item in objects:
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ValueError(
                    f"register_for_checkpointing() cannot save {type(item).__qualname__}: it lacks state_dict() or "
                    "load_state_dict(). Define both."
                )
        self._registered.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Add a hook that runs before a state is saved."""
        return _add_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Add a hook that runs before a state is loaded."""
        return _add_hook(self._load_hooks, hook)

    def reserve_staging(self, prepared: PreparedOptimizer) -> None:
        """Allocate the buffers of background saves after the first step of an optimizer, which creates its state."""
        if self._run.options.project.async_save:
            handles: list[RemovableHandle] = []

            def reserve(*_: Any) -> None:
                handles.pop().remove()
                self._staging.reserve(self._training_state().bytes)

            handles.append(prepared.optimizer.register_step_post_hook(reserve))

    def _run_load_hooks(self, path: Path) -> list[int]:
        """Run the hooks of the script, and return the indices of the models that they removed from the list."""
        models = self._run.original_models
        remaining = list(models)
        _run_hooks(self._load_hooks, remaining, os.fspath(path))
        return [index for index, model in enumerate(models) if not any(model is other for other in remaining)]

    def _training_state(self, memory: MetaModels | None = None, *, one_rank: bool = False) -> TrainingState:
        prepared = self._run.prepared
        return TrainingState(
            self._run.strategy,
            self._run.strategy.open_state(prepared.models, [each.optimizer for each in prepared.optimizers]),
            prepared.models,
            prepared.optimizers,
            prepared.schedulers,
            prepared.all_loaders,
            self._run.precision,
            self._run.accumulation,
            self._run.gradients,
            self._registered,
            memory,
            one_rank=one_rank,
        )


def _find_checkpoint(project: ProjectConfiguration, store: Store, input_dir: _Path | None) -> str:
    if input_dir is not None:
        return normalize_location(input_dir)
    if not project.automatic_checkpoint_naming:
        raise CheckpointError(
            "load_state() cannot search for a checkpoint: checkpoints have no automatic names. Pass a directory, or set "
            "ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return Checkpoints(project.checkpoints, store).newest().key


def _normalize(path: _Path | None) -> str | None:
    return None if path is None else normalize_location(path)


def _call_save_hooks(
    hooks: Mapping[int, SaveHook],
    models: list[nn.Module],
    states: list[dict[str, Any]],
    folder: Path,
) -> None:
    _run_hooks(hooks, models, states, os.fspath(folder))


def _run_hooks(hooks: Mapping[int, Callable[..., None]], *args: Any) -> None:
    for hook in hooks.values():
        hook(*args)


def _add_hook(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
