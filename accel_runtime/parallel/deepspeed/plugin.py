"""Options of DeepSpeed in a script, named as in Accelerate; imports no deepspeed."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.environment.deepspeed import (
    AUTO,
    DeepSpeed,
    DeepSpeedConfig,
    parse_deepspeed_config,
    read_deepspeed_config,
    read_deepspeed_file,
    resolve_deepspeed,
)
from accel_runtime.foundation.options import Configuration
from accel_runtime.parallel.strategy import Placeholder

__all__ = ["DeepSpeedOptions", "DeepSpeedPlugin", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"]

_DEFAULT_STAGE = 2
"""The stage of a plugin without one, where the profile has none; that of Accelerate."""


class HfDeepSpeedConfig:
    """A configuration of DeepSpeed with functions to read it.

    Args:
        config_file_or_dict: The path of a JSON file, its text (also in base64), or a dict, which is copied.

    Raises:
        SettingsError: The file cannot be read, is not JSON, or has keys that are not supported.
    """

    def __init__(self, config_file_or_dict: str | Mapping[str, Any]) -> None:
        self.config = _read_config(config_file_or_dict)
        """The nested keys."""

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section of a path, such as `zero_optimization.stage`, or None; and the key in it."""
        *parents, key = ds_key_long.split(".")
        section: Any = self.config
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        return section, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a path."""
        section, key = self.find_config_node(ds_key_long)
        return default if section is None else section.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove the key at a path; raise ValueError if it `must_exist` and does not."""
        section, key = self.find_config_node(ds_key_long)
        if section is not None and key in section:
            del section[key]
        elif must_exist:
            raise ValueError(
                f"Cannot remove {ds_key_long}: the configuration of DeepSpeed has no such key. Check the path."
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether the value at a path is set, and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether the value at a path is set, and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the stage is 2."""
        return bool(self.get_value("zero_optimization.stage") == 2)  # noqa: PLR2004 - the stage

    def is_zero3(self) -> bool:
        """Return whether the stage is 3."""
        return bool(self.get_value("zero_optimization.stage") == 3)  # noqa: PLR2004 - the stage

    def is_offload(self) -> bool:
        """Return whether optimizer state or parameters are offloaded."""
        paths = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
        return any(self.get_value(path) in {"cpu", "nvme"} for path in paths)


def _read_config(source: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return parse_deepspeed_config(deepcopy(dict(source)), "the configuration of DeepSpeed")
    if Path(source).is_file():
        return read_deepspeed_file(source)
    for text in (source, _decode(source)):
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(values, dict):
            return parse_deepspeed_config(values, "the configuration of DeepSpeed")
    raise ValueError(
        f"Invalid configuration of DeepSpeed {source!r}: expected the path of a JSON file, or a dict."
    )


def _decode(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode()
    except ValueError:
        return ""


_PATHS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Fields of the plugin, and their paths in a JSON file."""


@dataclass
class DeepSpeedPlugin(Configuration):
    """Options of DeepSpeed, for `Accelerator(deepspeed_plugin=...)`.

    An option of None is taken from the profile, or is DeepSpeed's default. Two that contradict each other are an error.

    Raises:
        ValueError: An option is not supported.
    """

    hf_ds_config: Any = None
    """The path of a JSON file, a dict, or an `HfDeepSpeedConfig`."""
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    """The norm to which gradients are clipped before each step."""
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    """Without effect: batch sizes are those of the loaders."""
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    """Let `from_pretrained` of transformers shard a model while it loads; None does so in stage 3."""
    zero3_save_16bit_model: bool | None = None
    """Without effect: `save_model` and `get_state_dict` gather the weights of every stage."""
    transformer_moe_cls_names: str | None = None
    """Classes of modules whose parameters stage 3 gathers together, with commas between."""
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    @override
    def _check(self) -> None:
        if self.enable_msamp:
            raise ValueError("DeepSpeedPlugin: enable_msamp is not supported. Use mixed_precision bf16.")
        config = self.hf_ds_config
        if config is not None and not isinstance(config, HfDeepSpeedConfig):
            object.__setattr__(self, "hf_ds_config", None if config == "none" else HfDeepSpeedConfig(config))
        if self.zero_stage is not None and (
            isinstance(self.zero_stage, bool) or self.zero_stage not in {0, 1, 2, 3}
        ):
            raise ValueError(
                f"Invalid DeepSpeedPlugin.zero_stage {self.zero_stage!r}: expected 0, 1, 2 or 3."
            )

    @property
    def _sources(self) -> Mapping[str, str]:
        """Return where values of `deepspeed_config` come from, if they are not of the script."""
        sources: Mapping[str, str] = vars(self).get("_profile_sources", {})
        return sources

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The nested keys of DeepSpeed's JSON, which scripts may change until `prepare`."""
        if self.hf_ds_config is None:
            object.__setattr__(self, "hf_ds_config", HfDeepSpeedConfig({}))
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @property
    def selected(self) -> bool:
        """Return whether models that are prepared now use this plugin."""
        return bool(vars(self).get("_selected"))

    def select(self, *, is_selected: bool = True) -> None:
        """Set `selected`; scripts call `AcceleratorState.select_deepspeed_plugin`."""
        self._selected = is_selected

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a path of the configuration."""
        return HfDeepSpeedConfig.get_value(self._config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the value at a path is `auto`."""
        return bool(self.get_value(ds_key_long) == AUTO)

    @property
    def _config(self) -> HfDeepSpeedConfig:
        assert self.deepspeed_config is not None
        config: HfDeepSpeedConfig = self.hf_ds_config
        return config

    def resolve(self, section: DeepSpeed, stated: Mapping[str, tuple[Any, str]]) -> DeepSpeedConfig:
        """Return the configuration of the plugin, the profile's section, and other statements.

        Raises:
            SettingsError: Two of them contradict each other.
        """
        profile = _list_profile(section)
        statements = {
            path: (getattr(self, name), f"DeepSpeedPlugin.{name}")
            for name, path in _PATHS.items()
            if getattr(self, name) not in (None, AUTO, "none")
        }
        stage = _PATHS["zero_stage"]
        if not {*profile, *statements, *dict(_flatten(self.deepspeed_config))} & {stage}:
            statements[stage] = (_DEFAULT_STAGE, "the default of DeepSpeedPlugin")
        name = "DeepSpeedPlugin.hf_ds_config"
        # Twice, as each compares one set of statements with all values.
        config = resolve_deepspeed(
            DeepSpeed(), self.deepspeed_config, {**profile, **statements}, name=name, sources=self._sources
        )
        for each in (profile, statements, stated):
            config = resolve_deepspeed(DeepSpeed(), config.values, each, sources=config.sources)
        return config

    def fill(self, config: DeepSpeedConfig) -> None:
        """Set options of None to the values of a configuration."""
        for name, path in _PATHS.items():
            if getattr(self, name) is None and (value := config.get(path)) is not None:
                object.__setattr__(self, name, value)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Return a context in which `from_pretrained` shards models while it loads, or not."""
        from accel_runtime.parallel.deepspeed.initialization import set_sharded_loading  # noqa: PLC0415 - needs transformers

        with set_sharded_loading(enable=enable):
            yield

    def is_zero3_init_enabled(self) -> bool:
        """Return whether `from_pretrained` shards models while it loads."""
        is_stage_3 = self.zero_stage == 3 or self._config.is_zero3()  # noqa: PLR2004 - the stage
        if self.zero3_init_flag is None:
            return is_stage_3 and importlib.util.find_spec("transformers") is not None
        return is_stage_3 and self.zero3_init_flag

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Let stage 3 gather the parameters of the modules of `transformer_moe_cls_names` together.

        Raises:
            ValueError: The model has no module of such a class.
        """
        if not self.transformer_moe_cls_names:
            return
        from accel_runtime.parallel.deepspeed.library import set_leaf_modules  # noqa: PLC0415 - needs deepspeed

        names = {name.strip() for name in self.transformer_moe_cls_names.split(",")}
        classes = {type(module) for module in model.modules() if type(module).__name__ in names}
        if missing := names - {kind.__name__ for kind in classes}:
            raise ValueError(
                f"Invalid DeepSpeedPlugin.transformer_moe_cls_names: {type(model).__name__} has no module of class "
                f"{', '.join(sorted(missing))}. Correct the names."
            )
        set_leaf_modules(model, sorted(classes, key=lambda kind: kind.__name__))


def _list_profile(section: DeepSpeed) -> dict[str, tuple[Any, str]]:
    """Return the values that the profile and its file set, by path, with their sources."""
    if not section.is_used:
        return {}
    config = read_deepspeed_config(section)
    return {path: (value, config.sources.get(path, "")) for path, value in _flatten(config.values)}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif value != AUTO:
            yield f"{prefix}{key}", value


def build_deepspeed_plugin(config: DeepSpeedConfig, *, zero3_init: bool) -> DeepSpeedPlugin:
    """Return the configuration of the profile as a plugin."""
    plugin = DeepSpeedPlugin(hf_ds_config=config.values, zero3_init_flag=zero3_init)
    plugin._profile_sources = dict(config.sources)  # noqa: SLF001 - of this module
    return plugin


class DeepSpeedOptions:
    """The configuration of DeepSpeed, by the plugin of the script that is selected.

    Args:
        plugins: Plugins by name; the first is selected.
        section: The section of the profile.
        stated: Values that other options state, with the name of that place.
    """

    def __init__(
        self,
        plugins: Mapping[str, DeepSpeedPlugin],
        section: DeepSpeed,
        stated: Mapping[str, tuple[Any, str]],
    ) -> None:
        self.plugins, self._section, self._stated = dict(plugins), section, stated
        self.select(next(iter(self.plugins)))
        self.config = self.plugin.resolve(section, stated)
        """The configuration of models that are prepared now."""
        self.plugin.fill(self.config)

    @classmethod
    def build(
        cls,
        plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
        section: DeepSpeed,
        stated: Mapping[str, tuple[Any, str]],
    ) -> DeepSpeedOptions:
        """Return the options of the plugins of a script, or of the profile alone."""
        if plugins is None:
            config = resolve_deepspeed(
                section, read_deepspeed_file(section.config_file) if section.config_file else None, stated
            )
            plugins = build_deepspeed_plugin(config, zero3_init=section.zero3_init)
        named = dict(plugins) if isinstance(plugins, Mapping) else {"default": plugins}
        for plugin in named.values():
            if not isinstance(plugin, DeepSpeedPlugin):
                raise TypeError(
                    f"Invalid Accelerator(deepspeed_plugin) {plugin!r}: expected a DeepSpeedPlugin, or a dict of them."
                )
        return cls(named, section, stated)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """Return the selected plugin."""
        return next(plugin for plugin in self.plugins.values() if plugin.selected)

    def select(self, name: str) -> None:
        """Select the plugin of models that are prepared from now on; raise ValueError if there is none of this name."""
        if name not in self.plugins:
            raise ValueError(
                f"Invalid name of a DeepSpeedPlugin {name!r}: expected one of {', '.join(self.plugins)}."
            )
        for key, plugin in self.plugins.items():
            plugin.select(is_selected=key == name)

    def read_plugin(self) -> bool:
        """Read the selected plugin as it is now; return whether the configuration has changed."""
        config = self.plugin.resolve(self._section, self._stated)
        is_changed = config.values != self.config.values
        self.config = config
        return is_changed


class DummyOptim(Placeholder):
    """The optimizer that the section `optimizer` of DeepSpeed's JSON file describes.

    Args:
        params: Parameters, or dicts of parameter groups.
        lr: Learning rate, if the file has `auto` there.
        weight_decay: Weight decay, if the file has `auto` there.
        **kwargs: Other arguments of the optimizer, if the file does not have them.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params: Sequence[Any] = list(params)
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs


class DummyScheduler(Placeholder):
    """The scheduler that the section `scheduler` of DeepSpeed's JSON file describes.

    Args:
        optimizer: The optimizer, or a `DummyOptim`.
        total_num_steps: Steps of the schedule, counted in batches of one process, if the file has `auto` there.
        warmup_num_steps: Optimizer steps of the warmup, if the file has `auto` there.
        lr_scheduler_callable: Returns a scheduler of torch for an optimizer; for a file without a section `scheduler`.
        **kwargs: Other arguments of the scheduler, if the file does not have them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | DummyOptim,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Any = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs
