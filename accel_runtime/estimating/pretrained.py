"""A transformers model by its configuration on disk; nothing is fetched, and no code but that of transformers is run."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from accel_runtime.estimating.errors import EstimateError, raised
from accel_runtime.estimating.factory import Made, Sizes

__all__ = ["is_configuration", "made_of"]

_BATCH = 1
_LONGEST = 2048
"""Models that could read more are estimated with so many tokens, unless another number is said."""
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
    """Whether a target is a configuration on disk, rather than a factory."""
    path = Path(target)
    return path.is_dir() or path.suffix == ".json"


def made_of(target: str, sizes: Sizes) -> Made:
    """The model that a configuration describes, on the meta device, and a batch for it.

    Args:
        target: A folder with a `config.json`, or that file.
        sizes: One sample, and as many tokens as the model reads at most but no more than 2048, where nothing is said.

    Raises:
        EstimateError: transformers is missing or does not know such a model; there is no configuration; making it failed.
    """
    path = Path(target)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise EstimateError(f"{file} is not there: a transformers model is described by its config.json")
    if importlib.util.find_spec("transformers") is None:
        raise EstimateError(
            f"{file} is a configuration of transformers, which is not installed here: python -m pip install transformers"
        )
    transformers: Any = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            model = _class(transformers, config)(config)
    except Exception as error:  # noqa: BLE001 - transformers raises what it likes
        raise EstimateError(f"{file}: transformers could not make the model: {raised(error)}") from None
    return Made(model, _inputs(model, config, sizes))


def _class(transformers: Any, config: Any) -> Any:
    """The class the configuration names, else what is trained most often of such a model."""
    for name in config.architectures or ():
        found: Any = getattr(transformers, name, None)
        if isinstance(found, type) and hasattr(found, "_from_config"):
            return found._from_config  # noqa: SLF001 - the one way from a configuration to the class itself
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return (
        transformers.AutoModelForCausalLM if type(config) in known else transformers.AutoModel
    ).from_config


def _inputs(model: Any, config: Any, sizes: Sizes) -> dict[str, torch.Tensor] | None:
    """A batch for the forward pass, with labels where the model makes a loss of them; None where it takes something else."""
    rows, kind = sizes.batch_size or _BATCH, type(model).__name__
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if model.main_input_name == "input_ids":
        # Where nothing limits it, so does what a person may say.
        most = getattr(text, "max_position_embeddings", None) or _LONGEST
        length = sizes.seq_length or min(most, _LONGEST)
        batch = {"input_ids": _numbers(rows, length)}
        labels = (rows, length) if kind.endswith(_PER_TOKEN) else (rows,)
    elif model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        side = config.image_size
        batch = {
            "pixel_values": torch.empty(rows, getattr(config, "num_channels", 3), side, side, device="meta")
        }
        labels = (rows,)
    else:
        return None
    if kind.endswith((*_PER_TOKEN, *_PER_SAMPLE)):
        batch["labels"] = _numbers(*labels)
    return batch


def _numbers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")
