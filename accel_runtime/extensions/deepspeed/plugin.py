"""Options of DeepSpeed in a script, named as in Accelerate; imports no deepspeed."""

from __future__ import annotations

import base64
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import nn
from typing_extensions import override

from accel_runtime.environment.text import parse_json
from accel_runtime.extensions.deepspeed.settings import (
    AUTO,
    ZERO_3,
    DeepSpeed,
    DeepSpeedConfig,
    ZeroStage,
    find_value,
    iterate_leaves,
    parse_deepspeed_config,
    read_deepspeed_config,
    read_deepspeed_file,
    resolve_deepspeed,
    state_accumulation,
    state_precision,
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

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> None:
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
        return bool(self.get_value("zero_optimization.stage") == ZERO_3)

    def is_offload(self) -> bool:
        """Return whether optimizer state or parameters are offloaded."""
        paths = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
        return any(self.get_value(path) in {"cpu", "nvme"} for path in paths)


def _read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    # The class of transformers with the same interface has the dict as an attribute.
    values = getattr(source, "config", source)
    if isinstance(values, Mapping):
        return parse_deepspeed_config(deepcopy(dict(values)), "the configuration of DeepSpeed")
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"Invalid configuration of DeepSpeed {source!r}: expected the path of a JSON file, or a dict."
        )
    content = os.fspath(source)
    if os.path.isfile(content):  # noqa: PTH113 - a Path of a long text is an OSError
        return read_deepspeed_file(content)
    for text in (content, _decode(content)):
        try:
            values = parse_json(text)
        except ValueError:
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
_UNSET = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": "none",
    "offload_param_nvme_path": "none",
    "zero3_save_16bit_model": False,
    "enable_msamp": False,
    "msamp_opt_level": "O1",
}
"""Values of fields of None that nothing else sets, once an Accelerator has the plugin; those of Accelerate."""
_DEVICES = ("none", "cpu", "nvme")


@dataclass
class DeepSpeedPlugin(Configuration):
    """Options of DeepSpeed, for `Accelerator(deepspeed_plugin=...)`.

    An option of None is taken from the profile, or is DeepSpeed's default. Two that contradict each other are an error.

    Raises:
        ValueError: An option is not supported.
    """

    engine: ClassVar[str] = DeepSpeed.name

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
        if self.enable_msamp or self.msamp_opt_level not in {None, _UNSET["msamp_opt_level"]}:
            raise ValueError(
                "DeepSpeedPlugin: enable_msamp and msamp_opt_level are not supported. Use mixed_precision bf16."
            )
        config = self.hf_ds_config
        if config is not None and not isinstance(config, HfDeepSpeedConfig):
            object.__setattr__(self, "hf_ds_config", None if config == "none" else HfDeepSpeedConfig(config))
        if self.zero_stage is not None and (
            isinstance(self.zero_stage, bool) or self.zero_stage not in {0, 1, 2, 3}
        ):
            raise ValueError(
                f"Invalid DeepSpeedPlugin.zero_stage {self.zero_stage!r}: expected 0, 1, 2 or 3."
            )
        steps, norm = self.gradient_accumulation_steps, self.gradient_clipping
        if steps not in (None, AUTO) and (isinstance(steps, (bool, str)) or steps < 1):
            raise ValueError(
                f"Invalid DeepSpeedPlugin.gradient_accumulation_steps {steps!r}: expected a number from 1, or auto."
            )
        if norm not in (None, AUTO) and (isinstance(norm, (bool, str)) or not 0 <= norm < float("inf")):
            raise ValueError(
                f"Invalid DeepSpeedPlugin.gradient_clipping {norm!r}: expected a number above 0, 0 for no clipping, or auto."
            )
        for field in ("offload_optimizer_device", "offload_param_device"):
            if (device := getattr(self, field)) not in (None, *_DEVICES):
                raise ValueError(
                    f"Invalid DeepSpeedPlugin.{field} {device!r}: expected one of {', '.join(_DEVICES)}."
                )

    @property
    def _sources(self) -> Mapping[str, str]:
        """Return where values of `deepspeed_config` come from, if they are not of the script."""
        filled: Mapping[str, tuple[Any, str]] = vars(self).get("_filled_values", {})
        return {
            path: source
            for path, (value, source) in filled.items()
            if find_value(self.deepspeed_config, path) == value
        }

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

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Raise ValueError: the state selects a plugin, and unselects the others."""
        raise ValueError(
            "DeepSpeedPlugin.select() is not supported. Call accelerator.state.select_deepspeed_plugin(name)."
        )

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a path of the configuration."""
        return HfDeepSpeedConfig.get_value(self._config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the value at a path is `auto`."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Set the value at a path to that of `kwargs` if it is `auto`; otherwise compare them if they `must_match`.

        Args:
            ds_key_long: The path, such as `zero_optimization.reduce_bucket_size`.
            mismatches: Receives a line if the values differ.
            must_match: If true, compare the values.
            **kwargs: Values by path.
        """
        section, key = self._config.find_config_node(ds_key_long)
        if section is None or ds_key_long not in kwargs:
            return
        known, value = section.get(key), kwargs[ds_key_long]
        if known == AUTO:
            section[key] = value
        elif must_match and known not in (None, value) and mismatches is not None:
            mismatches.append(f"{ds_key_long} is {known} in the configuration and {value} in the call")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Set all values that are `auto` to those of `kwargs`, which has values by path; others may stay `auto`.

        Args:
            prefix: The path of `config`, with a dot at its end.
            mismatches: Receives a line for each value that differs.
            config: The section to fill in; by default the whole configuration.
            must_match: If true, values that are not `auto` must equal those of `kwargs`.
            **kwargs: Values by path.

        Raises:
            ValueError: A value that must match differs.
        """
        mismatches = [] if mismatches is None else mismatches
        for path, _ in list(iterate_leaves(self.deepspeed_config if config is None else config, prefix)):
            self.fill_match(path, mismatches, must_match=must_match, **kwargs)
        if mismatches and not prefix:
            raise ValueError(
                f"Invalid configuration of DeepSpeed: {'; '.join(mismatches)}. Set these values to auto, or to those of the call."
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable a number format in the configuration, where it is `auto` or missing.

        Raises:
            ValueError: The configuration enables another one, or it is not supported.
        """
        formats = ("fp16", "bf16")
        if mixed_precision not in ("no", *formats):
            raise ValueError(
                f"Invalid mixed_precision {mixed_precision!r}: expected one of no, {', '.join(formats)}."
            )
        for name in formats:
            section = self.deepspeed_config.setdefault(name, {})
            if section.get("enabled", AUTO) == AUTO:
                section["enabled"] = name == mixed_precision
            elif section["enabled"] and mixed_precision not in {"no", name}:
                raise ValueError(
                    f"DeepSpeedPlugin.set_mixed_precision({mixed_precision!r}) contradicts {name}.enabled: true in the configuration. "
                    "Set it to auto."
                )

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
        filled: Mapping[str, Any] = vars(self).get("_filled_fields", {})
        statements = {
            path: (value, f"DeepSpeedPlugin.{name}")
            for name, path in _PATHS.items()
            if (value := getattr(self, name)) not in (None, AUTO, "none")
            and not (name in filled and filled[name] == value)
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
        names = self.transformer_moe_cls_names
        if names and config.stage != ZERO_3:
            raise ValueError(
                f"DeepSpeedPlugin.transformer_moe_cls_names has no effect in ZeRO stage {config.stage}. Use stage 3, or leave it out."
            )
        return replace(config, leaf_modules=tuple(name.strip() for name in names.split(",")) if names else ())

    def fill(self, config: DeepSpeedConfig) -> None:
        """Set options of None, and missing keys of `deepspeed_config`, to the values of a configuration."""
        fields: dict[str, Any] = {name: config.get(path) for name, path in _PATHS.items()}
        for name in {*_PATHS, *_UNSET}:
            if getattr(self, name) is None:
                value = fields.get(name)
                object.__setattr__(self, name, _UNSET.get(name) if value is None else value)
        if self.zero3_init_flag is None:
            object.__setattr__(self, "zero3_init_flag", self.is_zero3_init_enabled())
        _fill_missing(self.deepspeed_config, config.values)
        self._mark_filled(config, {name: getattr(self, name) for name in _PATHS})

    def _mark_filled(self, config: DeepSpeedConfig, fields: Mapping[str, Any]) -> None:
        """Take values that equal those of a configuration as its own, and not as those of the script."""
        self._filled_fields = dict(fields)
        self._filled_values = {
            path: (value, config.sources[path])
            for path, value in iterate_leaves(config.values)
            if path in config.sources
        }

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Return a context in which `from_pretrained` shards models while it loads, or not; it does in stage 3 only."""
        if not self._is_stage_3:
            yield
            return
        from accel_runtime.extensions.deepspeed.modules import set_sharded_loading  # noqa: PLC0415 - needs transformers

        with set_sharded_loading(enable=enable):
            yield

    def is_zero3_init_enabled(self) -> bool:
        """Return whether `from_pretrained` shards models while it loads."""
        if self.zero3_init_flag is None:
            return self._is_stage_3 and importlib.util.find_spec("transformers") is not None
        return self._is_stage_3 and self.zero3_init_flag

    @property
    def _is_stage_3(self) -> bool:
        return self.zero_stage == ZERO_3 or self._config.is_zero3()

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Let stage 3 gather the parameters of the modules of `transformer_moe_cls_names` together.

        Raises:
            ValueError: The model has no module of such a class.
        """
        if not self.transformer_moe_cls_names:
            return
        from accel_runtime.extensions.deepspeed.modules import mark_leaf_modules  # noqa: PLC0415 - needs deepspeed

        mark_leaf_modules(model, [name.strip() for name in self.transformer_moe_cls_names.split(",")])


def _list_profile(section: DeepSpeed) -> dict[str, tuple[Any, str]]:
    """Return the values that the profile and its file set, by path, with their sources."""
    if not section.is_used:
        return {}
    config = read_deepspeed_config(section)
    return {path: (value, config.sources.get(path, "")) for path, value in _flatten(config.values)}


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values that are not `auto`, with their paths."""
    return ((path, value) for path, value in iterate_leaves(values) if value != AUTO)


def _fill_missing(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set keys that are missing or `auto` to those of other nested values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _fill_missing(target[key], value)
        elif target.get(key, AUTO) == AUTO:
            target[key] = deepcopy(value)


def build_deepspeed_plugin(config: DeepSpeedConfig, *, zero3_init: bool) -> DeepSpeedPlugin:
    """Return the configuration of the profile as a plugin."""
    plugin = DeepSpeedPlugin(hf_ds_config=config.values, zero3_init_flag=zero3_init)
    plugin._mark_filled(config, {})  # noqa: SLF001 - of this module
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
        self._selected = next(iter(self.plugins))
        self._mark_selected()
        self.config = self.plugin.resolve(section, stated)
        """The configuration of models that are prepared now."""
        self.plugin.fill(self.config)
        self._fixed = {path: self.config.get(path) for path in _FIXED}

    @classmethod
    def build(
        cls,
        plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
        section: DeepSpeed,
        mixed_precision: str = "no",
        accumulation_steps: int = 1,
    ) -> DeepSpeedOptions:
        """Return the options of the plugins of a script, or of the profile alone."""
        stated: dict[str, tuple[Any, str]] = {}
        if mixed_precision != "no":
            stated |= state_precision(None, mixed_precision, "mixed_precision")
        if accumulation_steps != 1:
            stated |= state_accumulation(accumulation_steps, "gradient_accumulation_steps")
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
        return self.plugins[self._selected]

    @property
    def section(self) -> DeepSpeed:
        """Return the section of the profile, or of the plugin if the profile does not use DeepSpeed."""
        section = (
            self._section
            if self._section.is_used
            else DeepSpeed(stage=cast("ZeroStage", str(self.config.stage)))
        )
        return replace(section, zero3_init=self.plugin.is_zero3_init_enabled())

    def select(self, name: str) -> None:
        """Select the plugin of models that are prepared from now on; raise ValueError if there is none of this name."""
        if name not in self.plugins:
            raise ValueError(
                f"Invalid name of a DeepSpeedPlugin {name!r}: expected one of {', '.join(self.plugins)}."
            )
        self._selected = name
        self._mark_selected()
        self.plugin.fill(self.plugin.resolve(self._section, self._stated))

    def _mark_selected(self) -> None:
        for name, plugin in self.plugins.items():
            plugin._selected = name == self._selected  # noqa: SLF001 - of this module

    def read_plugin(self, configure: Callable[[DeepSpeedConfig], None]) -> None:
        """Read the selected plugin as it is now; pass a changed configuration to the strategy, which may refuse it.

        Raises:
            SettingsError: Its options contradict each other.
            ValueError: It has another number format or accumulation than the Accelerator was made with.
        """
        config = self.plugin.resolve(self._section, self._stated)
        for path, before in self._fixed.items():
            if (value := config.get(path)) not in (None, before) and (before is not None or value):
                raise ValueError(
                    f"{path} is {value} in DeepSpeedPlugin.deepspeed_config, and the Accelerator was made with {_show(before)}. Set it "
                    "before the Accelerator is made, or pass it to Accelerator()."
                )
        is_changed = (config.values, config.leaf_modules) != (self.config.values, self.config.leaf_modules)
        if is_changed:
            configure(config)
        self.config = config


_FIXED = (
    "gradient_accumulation_steps", "bf16.enabled", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power",
    "fp16.loss_scale_window", "fp16.min_loss_scale", "fp16.hysteresis", "fp16.consecutive_hysteresis",
)  # fmt: skip
"""Values that the Accelerator reads once."""


def _show(value: Any) -> str:
    return "another one" if value is None else str(value)


class _Dummy(Placeholder):
    builder = "DeepSpeed"
    cure = "Set deepspeed.stage in the profile, or create the object with torch."


class DummyOptim(_Dummy):
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


class DummyScheduler(_Dummy):
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
