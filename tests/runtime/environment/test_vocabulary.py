"""Accelerate's words: each is declared once, and means something that accel has."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from accel_cli.extensions.sagemaker.accelerate_rules import SETTINGS as JOB_SETTINGS
from accel_runtime.environment.accelerate import launch, sharding
from accel_runtime.environment.accelerate.sharding import explain_fsdp1_option, find_strategy
from accel_runtime.environment.settings import Device, LogLevel, MixedPrecision, Settings, flatten_settings

SETTINGS = list(dict.fromkeys([*launch.list_settings(), *JOB_SETTINGS]))


def find_repeated(names):
    return [name for name, count in Counter(name for name in names if name).items() if count > 1]


def test_no_word_is_declared_twice():
    # The key of a nested section, and those of early releases, may have the same name in two sections.
    assert not find_repeated(setting.key for setting in launch.list_settings())
    assert not find_repeated(setting.key for setting in JOB_SETTINGS)
    assert not find_repeated(setting.variable for setting in SETTINGS)
    assert not find_repeated(name for name, _ in launch.list_options())


def test_values_that_accel_has_too_are_all_of_its_own():
    assert get_args(MixedPrecision) == launch.MIXED_PRECISION.values.words
    assert set(launch.LOG_LEVEL.words) == {*get_args(LogLevel)} - {"auto"}
    assert {device for _, device in launch.DISTRIBUTED_TYPES.values()} == {*get_args(Device)}
    (refusal,) = set(launch.DISTRIBUTED_TYPE.values.refused.values())
    assert ", ".join(device for device in get_args(Device) if device != "auto") in refusal


def test_translated_variables_set_existing_settings():
    fields = {name for name, _ in flatten_settings(Settings())}
    translated = (
        launch.MIXED_PRECISION, launch.USE_CPU, launch.TORCH_DEVICE, launch.LOG_LEVEL, *sharding.MESH_SIZES,
        *(setting for setting in sharding.FSDP.settings if setting.profile_key),
    )  # fmt: skip
    assert {setting.field for setting in translated} <= fields
    assert all(setting.variable for setting in translated)


@pytest.mark.parametrize(
    "setting", sharding.FSDP.settings, ids=lambda setting: setting.key or setting.argument
)
def test_options_of_fsdp1_are_explained_with_and_without_their_prefix(setting):
    names = {setting.key.removeprefix("fsdp_"), *setting.aliases} - {""}
    assert {explain_fsdp1_option(name) for name in names} <= {setting.instead or None}
    assert {explain_fsdp1_option(f"fsdp_{name}") for name in names} <= {setting.instead or None}
    # The profile has this option itself.
    assert explain_fsdp1_option(setting.profile_key.rpartition(".")[2]) is None


def test_a_strategy_is_found_by_its_name_and_its_number():
    for number, strategy in enumerate(sharding.STRATEGIES, 1):
        assert find_strategy(strategy.name) is find_strategy(str(number)) is strategy
        assert not strategy.instead or strategy is not sharding.STRATEGIES[0]
    assert find_strategy("0") is find_strategy("6") is find_strategy("true") is None
