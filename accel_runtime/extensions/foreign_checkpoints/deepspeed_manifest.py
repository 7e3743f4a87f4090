"""Checkpoints of DeepSpeed as snapshots: a manifest says where each part of each tensor is in its files.

A reader takes the parts that it needs, as those of a checkpoint of accel, so that memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from accel_runtime.extensions.foreign_checkpoints.deepspeed_folder import SavedEngine, read_engine
from accel_runtime.extensions.foreign_checkpoints.folders import find_engine_folders
from accel_runtime.extensions.foreign_checkpoints.manifest_builder import ManifestBuilder
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileSnapshot
from accel_runtime.storage.manifest import Manifest

__all__ = ["open_deepspeed_checkpoint"]


def open_deepspeed_checkpoint(
    folder: Path, adapt: Callable[[Manifest], Manifest] = lambda manifest: manifest
) -> FileSnapshot:
    """Open a checkpoint of DeepSpeed for reading, with a manifest that is built from its files.

    The items are `model`, `optimizer`, `scheduler` and `scaler`, numbered if there are several engines. Weights are the float32
    ones where DeepSpeed has them, and optimizer state is by the name of the parameter, `model.layer.weight`. The checkpoint has
    no checksums, and those of its parts are empty. `adapt` changes the manifest before the checkpoint is opened.

    Raises:
        CheckpointError: Files are missing, damaged, or of a feature that is not supported.
    """
    try:
        folders = find_engine_folders(folder)
        builder = _EngineManifest(folder.absolute())
        engines = [read_engine(path.absolute()) for path in folders]
        for index, engine in enumerate(engines):
            builder.add_engine(engine, f"_{index}" if index else "")
        for path in folders:
            for file in sorted(path.absolute().rglob("*.pt")):
                builder.add_file(file)
        modified = (folders[0] / engines[0].model_file).stat().st_mtime
        manifest = builder.build(engines[0], modified)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} cannot be read as a checkpoint of DeepSpeed: {type(error).__name__}: {error}"
        ) from error
    return builder.open(adapt(manifest))


class _EngineManifest(ManifestBuilder):
    """The manifest of a checkpoint of DeepSpeed."""

    def add_engine(self, engine: SavedEngine, suffix: str) -> None:
        """Add the items of an engine; `suffix` is `_1` for the second."""
        model = {name: self.encode(value, f"model{suffix}", name) for name, value in engine.weights.items()}
        self.values[f"model{suffix}"] = model | {alias: model[name] for alias, name in engine.ties.items()}
        if engine.optimizer is not None:
            state = engine.optimizer
            if "groups" in state:
                prefix = f"model{suffix}."
                state = {
                    **state,
                    "groups": [
                        {**group, "params": [prefix + name for name in group["params"]]}
                        for group in state["groups"]
                    ],
                    "state": {prefix + name: each for name, each in state["state"].items()},
                }
            else:
                state = {"format": "torch", "state_dict": state}
            self.values[f"optimizer{suffix}"] = self.encode(state, f"optimizer{suffix}", "")
        scheduler = engine.common.get("lr_scheduler")
        # DeepSpeed's own schedulers have other states than those of torch.
        if isinstance(scheduler, dict) and "last_epoch" in scheduler:
            self.values[f"scheduler{suffix}"] = self.encode(scheduler, f"scheduler{suffix}", "")
        if engine.scaler is not None:
            self.values["scaler"] = engine.scaler

    def build(self, engine: SavedEngine, modified: float) -> Manifest:
        """Return the manifest."""
        saved_at = datetime.fromtimestamp(modified, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        version = str(engine.common.get("ds_version") or "of an unknown version")
        return Manifest(
            "",
            saved_at,
            engine.world_size,
            engine.steps,
            {"deepspeed": version},
            self.values,
            {},
            self.tensors,
            self.files,
            run={"precision": engine.precision} if engine.precision else {},
        )
