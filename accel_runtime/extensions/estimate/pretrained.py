"""Models of transformers by their configuration: a `config.json`, or the id of a model of the Hub."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel_runtime.environment.installation import format_install
from accel_runtime.extensions.estimate.memory import EstimateError, ModelSpec, describe_user_error

__all__ = ["build_from_configuration", "is_configuration"]

Sizes = Mapping[str, int]
"""`batch_size` and `seq_length` on each device, as far as they are given."""
_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""The id of a model of the Hub, such as `gpt2` and `Qwen/Qwen3-8B`."""
_MAX_LENGTH = 2048
"""Default limit of the sequence length."""
_PER_TOKEN = (
    "CausalLM",
    "MaskedLM",
    "ConditionalGeneration",
    "LMHeadModel",
    "TokenClassification",
    "PreTraining",
)
_PER_SAMPLE = ("SequenceClassification", "ImageClassification", "MultipleChoice")


def is_configuration(target: str) -> bool:
    """Return whether a target is a configuration on disk or of the Hub, and not a factory."""
    path = Path(target)
    return path.is_dir() or path.suffix == ".json" or _is_model_id(target)


def _is_model_id(target: str) -> bool:
    """Return whether a target is an id; an old one, without an organization, is none if a module has its name."""
    if not _MODEL_ID.fullmatch(target) or target.endswith(".py") or Path(target).exists():
        return False
    is_module = importlib.machinery.PathFinder.find_spec(target.partition("/")[0]) is not None
    return "/" in target or not (is_module or "." in target)


def build_from_configuration(target: str, sizes: Sizes) -> ModelSpec:
    """Build the model of a configuration of transformers on the meta device, and a batch for it.

    Of a model of the Hub, the configuration only is read, from the cache or the network. The defaults are one sample, and the
    longest sequence up to 2048 tokens.
    """
    path = Path(target)
    is_id = _is_model_id(target)
    file = path / "config.json" if path.is_dir() else path
    if not (is_id or file.is_file()):
        raise EstimateError(f"File not found: {file}. A transformers model is described by its config.json.")
    source = target if is_id else str(file)
    if importlib.util.find_spec("transformers") is None:
        kind = (
            "looks like the id of a model of the Hub, which needs transformers"
            if is_id
            else ("is a configuration of transformers")
        )
        raise EstimateError(f"{source} {kind}, which is not installed. Run: {format_install('transformers')}")
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(
            source, local_files_only=not is_id, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - transformers raises many types
        if is_id:
            raise EstimateError(
                f"Cannot read the configuration of {target} from the Hub: {str(error).splitlines()[0]} Check the id and the "
                "network, log in (hf auth login) for a gated model, or pass a folder with its config.json."
            ) from None
        raise EstimateError(
            f"{file}: transformers could not build the model: {describe_user_error(error)}"
        ) from None
    try:
        with torch.device("meta"):
            model = _find_class(transformers, config)(config)
    except Exception as error:  # noqa: BLE001 - as above
        raise EstimateError(
            f"{source}: transformers could not build the model: {describe_user_error(error)}"
        ) from None
    with torch.device("meta"):
        return ModelSpec(model, _build_batch(model, config, sizes))


def _find_class(transformers: Any, config: Any) -> Any:
    """Return the class that the configuration names, else the usual one for training."""
    for name in config.architectures or ():
        model_class: Any = getattr(transformers, name, None)
        if isinstance(model_class, type) and hasattr(model_class, "_from_config"):
            return model_class._from_config  # noqa: SLF001 - the only way from a configuration to the class itself
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return (transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel).from_config


def _build_batch(model: Any, config: Any, sizes: Sizes) -> dict[str, torch.Tensor] | None:
    """Return a batch, with labels if the model computes a loss; None for unknown kinds of input."""
    rows, class_name = sizes.get("batch_size", 1), type(model).__name__
    if "seq_length" in sizes and model.main_input_name != "input_ids":
        raise EstimateError(
            f"--seq-length has no effect on {class_name}: its input {model.main_input_name} has no tokens. Leave it out."
        )
    labels: tuple[int, ...] = (rows,)
    if model.main_input_name == "input_ids":
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        longest = getattr(text_config, "max_position_embeddings", None) or _MAX_LENGTH
        length = sizes.get("seq_length", min(longest, _MAX_LENGTH))
        batch = {"input_ids": torch.empty(rows, length, dtype=torch.long)}
        if class_name.endswith(_PER_TOKEN):
            labels = (rows, length)
    elif model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = config.image_size
        batch = {"pixel_values": torch.empty(rows, getattr(config, "num_channels", 3), size, size)}
    elif "batch_size" in sizes:
        raise EstimateError(
            f"--batch-size has no effect on {class_name}: no batch is known for its input {model.main_input_name}. Leave it "
            "out, or write a factory that returns (model, inputs)."
        )
    else:
        return None
    if class_name.endswith((*_PER_TOKEN, *_PER_SAMPLE)):
        batch["labels"] = torch.empty(labels, dtype=torch.long)
    return batch
