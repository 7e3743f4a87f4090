"""Variables of Accelerate's launcher become the section `deepspeed`, and the section becomes variables that Accelerate reads."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.environment.accelerate import encode_variables
from accel_runtime.environment.accelerate.export import build_export, read_user_variables
from accel_runtime.environment.settings import (
    EXPORTED,
    Parallel,
    Settings,
    SettingsError,
    accelerate_variables,
)
from accel_runtime.extensions.deepspeed.settings import PATHS, DeepSpeed, find_value

pytestmark = pytest.mark.usefixtures("on_the_cpu")

ON = {"ACCELERATE_USE_DEEPSPEED": "true"}
ZERO_3 = ON | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
P = "ACCELERATE_DEEPSPEED_"
FILE = {"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}, "gradient_clipping": "auto"}


def export(settings, device="cuda"):
    return build_export(settings, device, 2, {}, read_user_variables({}))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILE))
    return str(path)


@pytest.mark.parametrize(
    ("environ", "section"),
    [
        (ON, DeepSpeed("2")),
        (ON | {f"{P}ZERO_STAGE": "0"}, DeepSpeed("0")),
        (ZERO_3, DeepSpeed("3", zero3_init=True)),
        (ZERO_3 | {f"{P}ZERO3_INIT": "false"}, DeepSpeed("3")),
        (ON | {f"{P}ZERO3_INIT": "true"}, DeepSpeed("2")),
        (
            ON | {f"{P}OFFLOAD_OPTIMIZER_DEVICE": "cpu", f"{P}OFFLOAD_PARAM_DEVICE": "none"},
            DeepSpeed("2", offload_optimizer="cpu"),
        ),
        (
            ZERO_3
            | {
                f"{P}OFFLOAD_PARAM_DEVICE": "nvme",
                f"{P}OFFLOAD_PARAM_NVME_PATH": "/x",
                f"{P}OFFLOAD_OPTIMIZER_NVME_PATH": "none",
                f"{P}ZERO3_SAVE_16BIT_MODEL": "true",
                "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage",
            },
            DeepSpeed("3", offload_param="nvme", nvme_path="/x", zero3_init=True),
        ),
        (ON | {f"{P}OFFLOAD_PARAM_DEVICE": "cpu"}, DeepSpeed("2")),
        (
            ON | {f"{P}OFFLOAD_OPTIMIZER_DEVICE": "nvme", f"{P}OFFLOAD_OPTIMIZER_NVME_PATH": "/x"},
            DeepSpeed("2", offload_optimizer="cpu"),
        ),
        (ON | {f"{P}OFFLOAD_PARAM_DEVICE": "nvme", f"{P}OFFLOAD_PARAM_NVME_PATH": "/x"}, DeepSpeed("2")),
        (
            ON
            | {
                f"{P}ZERO_STAGE": "0",
                f"{P}OFFLOAD_OPTIMIZER_DEVICE": "nvme",
                f"{P}OFFLOAD_OPTIMIZER_NVME_PATH": "/x",
            },
            DeepSpeed("0"),
        ),
        (ON | {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, DeepSpeed("2", gradient_clipping=0.5)),
        (ON | {"ACCELERATE_GRADIENT_CLIPPING": "auto"}, DeepSpeed("2")),
        ({"ACCELERATE_USE_DEEPSPEED": "false", f"{P}ZERO_STAGE": "3"}, DeepSpeed()),
    ],
)
def test_the_variables_of_deepspeed_become_the_section(environ, section):
    settings = Settings.from_env(environ)
    assert settings == Settings(engines=(section,))


def test_a_json_file_gives_the_stage_and_keeps_its_path(file, monkeypatch, tmp_path):
    settings = Settings.from_env(ON | {f"{P}CONFIG_FILE": file})
    assert settings.engine == DeepSpeed("auto", file, zero3_init=True)
    monkeypatch.chdir(tmp_path)
    assert Settings.from_env(ON | {f"{P}CONFIG_FILE": "ds.json"}) == settings


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({f"{P}ZERO_STAGE": "4"}, f"Invalid {P}ZERO_STAGE '4': expected 0, 1, 2 or 3"),
        ({f"{P}OFFLOAD_PARAM_DEVICE": "disk"}, f"Invalid {P}OFFLOAD_PARAM_DEVICE 'disk'"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "some"}, "Invalid ACCELERATE_GRADIENT_CLIPPING 'some'"),
        ({f"{P}MOE_LAYER_CLS_NAMES": "A"}, f"{P}MOE_LAYER_CLS_NAMES=A is not supported"),
        ({f"{P}CONFIG_FILE": "gone.json"}, "gone.json"),
        (
            {
                f"{P}ZERO_STAGE": "3",
                f"{P}OFFLOAD_PARAM_DEVICE": "nvme",
                f"{P}OFFLOAD_OPTIMIZER_DEVICE": "nvme",
                f"{P}OFFLOAD_PARAM_NVME_PATH": "/a",
                f"{P}OFFLOAD_OPTIMIZER_NVME_PATH": "/b",
            },
            f"{P}OFFLOAD_OPTIMIZER_NVME_PATH=/b with {P}OFFLOAD_PARAM_NVME_PATH=/a",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true"},
            "Cannot use ACCELERATE_USE_DEEPSPEED 2 with ACCELERATE_USE_FSDP auto",
        ),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_refused_by_name(environ, word):
    with pytest.raises(SettingsError) as caught:
        Settings.from_env(ON | environ)
    assert word in str(caught.value)


def test_a_variable_without_effect_is_reported():
    idle = accelerate_variables(ON | {f"{P}ZERO3_INIT": "1", f"{P}OFFLOAD_PARAM_NVME_PATH": "/x"}).idle
    assert any("it applies to ZeRO stage 3 only" in each for each in idle)
    assert any("is not nvme" in each for each in idle)


SECTIONS = st.builds(
    DeepSpeed,
    stage=st.sampled_from(["0", "1", "2"]),
    gradient_clipping=st.sampled_from([0.0, 0.5]),
) | st.builds(
    DeepSpeed,
    stage=st.just("3"),
    offload_optimizer=st.just("nvme"),
    offload_param=st.sampled_from(["no", "cpu", "nvme"]),
    nvme_path=st.just("/x"),
    zero3_init=st.booleans(),
)


@given(SECTIONS)
def test_the_exported_variables_mean_the_section(section):
    settings = Settings(engines=(section,))
    variables = export(settings).variables
    assert Settings.from_env(variables) == settings
    environ = {**settings.to_env(), **variables, EXPORTED: encode_variables(variables)}
    assert Settings.from_env(environ) == settings
    assert accelerate_variables(environ).idle == ()


ALL_FIELDS = st.fixed_dictionaries(
    {"stage": st.just("3")},
    optional={
        "offload_optimizer": st.just("cpu"),
        "offload_param": st.just("cpu"),
        "gradient_clipping": st.just(0.5),
        "reduce_bucket_size": st.just(7),
        "prefetch_bucket_size": st.just(8),
        "param_persistence_threshold": st.just(9),
        "zero3_init": st.booleans(),
        "config_file": st.just("FILE"),
    },
)


@given(ALL_FIELDS)
def test_accelerate_itself_reads_every_field_of_the_section(tmp_path_factory, fields):
    """Also those for which it has no variable, and those that a JSON file leaves out."""
    from accelerate.utils import DeepSpeedPlugin

    if "config_file" in fields:
        path = tmp_path_factory.mktemp("ds") / "ds.json"
        path.write_text(json.dumps(FILE))
        fields = {**fields, "config_file": str(path)}
    section = DeepSpeed(**fields)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in export(Settings(engines=(section,))).variables.items():
            patch.setenv(name, text)
        plugin = DeepSpeedPlugin()
    for name, path in PATHS.items():
        if name in fields:
            expected = 3 if name == "stage" else fields[name]
            assert find_value(plugin.deepspeed_config, path) == expected, name
    assert (plugin.zero_stage, plugin.zero3_init_flag) == (3, section.zero3_init)


def test_a_file_that_says_everything_is_passed_as_it_is(file):
    variables = export(Settings(engines=(DeepSpeed("auto", file),))).variables
    assert variables == ON | {f"{P}CONFIG_FILE": file, f"{P}ZERO3_INIT": "false"}


def test_a_file_without_a_stage_is_completed_for_accelerate(tmp_path):
    from accelerate.utils import DeepSpeedPlugin

    (tmp_path / "a.json").write_text(json.dumps({"bf16": {"enabled": True}}))
    settings = Settings(engines=(DeepSpeed("auto", str(tmp_path / "a.json")),), mixed_precision="bf16")
    with pytest.MonkeyPatch.context() as patch:
        for name, text in export(settings).variables.items():
            patch.setenv(name, text)
        plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["zero_optimization"] == {"stage": 0}


def test_deepspeed_replaces_the_variables_of_fsdp():
    environ = {"ACCELERATE_USE_FSDP": "true"}
    settings = Settings(engines=(DeepSpeed("2"),))
    exported = build_export(settings, "cuda", 2, environ, read_user_variables(environ))
    assert exported.variables == ON | {f"{P}ZERO_STAGE": "2", "ACCELERATE_USE_FSDP": "false"}
    environ = ON
    settings = Settings(parallel=Parallel(dp_shard="auto"))
    exported = build_export(settings, "cuda", 2, environ, read_user_variables(environ))
    assert exported.variables["ACCELERATE_USE_DEEPSPEED"] == "false"


def test_accelerate_on_the_cpu_is_refused_since_it_would_replicate():
    assert "deepspeed.stage is 2" in export(Settings(engines=(DeepSpeed("2"),)), "cpu").refusal


def test_clipping_that_accelerate_adds_is_reported():
    limits = export(Settings(engines=(DeepSpeed("2"),))).limits
    assert any("deepspeed.gradient_clipping: 0 is 1.0" in each for each in limits)
    assert export(Settings(engines=(DeepSpeed("2", gradient_clipping=1.0),))).limits == ()
