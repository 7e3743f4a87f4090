import json
import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from accel_cli.errors import ProfileError
from accel_cli.extensions.deepspeed.section import DeepSpeedSection
from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.single import Single
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.profile import yaml_io
from accel_cli.profile.layers import Layer, flatten, read_environment, resolve
from accel_cli.profile.schema import Profile, json_schema, known_keys
from accel_cli.profile.settings_sections import FullyShardSection, ParallelSection
from accel_cli.profile.validation_errors import explain

NAMES = st.text(
    alphabet=st.characters(exclude_characters="=\0", codec="utf-8").filter(
        lambda letter: not letter.isspace()
    ),
    min_size=1,
    max_size=12,
)
VALUES = st.text(alphabet=st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
TORCHRUN = st.builds(
    Torchrun,
    nnodes=st.integers(1, 99),
    nproc_per_node=st.integers(1, 99) | st.just("auto"),
    rdzv_endpoint=st.just("host:29400") | st.just("[fd00::1]:1"),
    rdzv_id=st.text(min_size=1, max_size=9),
    max_restarts=st.integers(0, 9),
    monitor_interval=st.floats(0.001, 99),
    omp_num_threads=st.none() | st.integers(1, 64),
)
NUMBERS = st.sampled_from(["auto", "fp32", "bf16", "fp16"])
MODULES = st.from_regex(r"[a-z*]+(\.[a-z*]+)*", fullmatch=True)
PARALLEL = st.builds(
    lambda form, size, **others: ParallelSection(**{form: size}, **others),
    st.sampled_from(["cp", "sp"]),
    st.integers(1, 9),
    dp_replicate=st.integers(1, 9),
    dp_shard=st.integers(1, 9) | st.just("auto"),
    tp=st.integers(1, 9),
    tp_plan=st.dictionaries(MODULES, st.sampled_from(["colwise", "rowwise"]), max_size=2),
)
FULLY_SHARD = st.builds(
    FullyShardSection,
    wrap=st.sampled_from(["auto", "none", 1, 10**8, "Block", "A,B", ["A", "B"]]),
    reshard_after_forward=st.booleans() | st.integers(2, 9),
    param_dtype=NUMBERS,
    reduce_dtype=NUMBERS,
    output_dtype=NUMBERS,
    cast_forward_inputs=st.booleans(),
    cpu_offload=st.booleans(),
    activation_checkpointing=st.booleans(),
    ignore=st.lists(MODULES, max_size=2),
)
STAGES = st.sampled_from([0, 1, 2, 3])
SIZES = st.just("auto") | st.integers(1, 10**9)
DEEPSPEED = st.builds(
    DeepSpeedSection,
    stage=STAGES,
    offload_optimizer=st.sampled_from(["no", "cpu"]),
    offload_param=st.sampled_from(["no", "cpu"]),
    zero3_init=st.booleans(),
    gradient_clipping=st.floats(0, 99),
    reduce_bucket_size=SIZES,
    prefetch_bucket_size=SIZES,
    param_persistence_threshold=SIZES,
) | st.builds(
    DeepSpeedSection,
    stage=STAGES | st.just("auto"),
    config_file=st.just("/a/ds.json"),
    nvme_path=st.sampled_from(["", "/nvme"]),
)
PROFILES = st.builds(
    Profile,
    launcher=st.builds(Single) | TORCHRUN,
    device=st.sampled_from(["auto", "cpu", "cuda", "mps", "xpu"]),
    mixed_precision=st.sampled_from(["no", "bf16", "fp16"]),
    process_group_backend=st.sampled_from(["auto", "gloo", "nccl", "smddp"]),
    process_group_timeout=st.integers(1, 10**6),
    parallel=PARALLEL,
    fully_shard=FULLY_SHARD,
    env=st.dictionaries(NAMES, VALUES, max_size=3),
) | st.builds(
    Profile,
    launcher=st.builds(Single) | TORCHRUN,
    device=st.sampled_from(["auto", "cpu", "cuda", "xpu"]),
    mixed_precision=st.sampled_from(["no", "bf16", "fp16"]),
    deepspeed=DEEPSPEED,
)


@given(PROFILES)
def test_a_profile_is_equal_after_writing_and_reading(profile):
    data = yaml_io.parse(yaml_io.dump(profile.data()), "x").data
    assert Profile.model_validate(data) == profile


@given(PROFILES)
def test_a_profile_resolved_from_layers_is_equal(profile):
    values = {key: value for key, value in flatten(profile.data()).items() if key != "schema_version"}
    assert resolve([Layer("file", values)]).profile == profile


@given(PROFILES)
def test_settings_read_from_the_environment_of_a_launch_are_equal(profile):
    assert resolve([read_environment(profile.settings.to_env())]).profile.settings == profile.settings


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=5)
)
VALUES_OF_YAML = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2)
    ),
)


@pytest.mark.parametrize("kind", [None, *LAUNCHERS])
@given(st.dictionaries(st.sampled_from([*known_keys(), "nonsense"]), VALUES_OF_YAML, max_size=4))
def test_any_values_are_a_profile_or_problems_with_their_keys(kind, values):
    if kind:
        values |= {"launcher.kind": kind}
    try:
        resolve([Layer("file", values)])
    except ProfileError as error:
        assert all(problem.key and problem.expected for problem in error.problems)


ODD_VALUES = ([], [[]], {}, [{}], {"a": {}}, {1: 2}, None, True, 10**400, math.nan, "", "\0", "\ud800")


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_an_odd_value_of_any_key_is_valid_or_a_problem(kind):
    """Also of the kind of launcher itself, and nested as a file has it; keys that are not of this launcher by turns."""
    own, turn = {f"launcher.{name}" for name in LAUNCHERS[kind].model_fields}, list(LAUNCHERS).index(kind)
    keys = [key for number, key in enumerate(known_keys()) if key in own or number % len(LAUNCHERS) == turn]
    for key in keys:
        for value in ODD_VALUES:
            section, _, name = key.rpartition(".")
            data = {"launcher": {"kind": kind}}
            (data.setdefault(section, {}) if section else data)[name] = value
            with suppress(ProfileError):
                resolve([Layer("file", {"launcher.kind": kind, key: value})])
            with suppress(ValidationError):
                Profile.model_validate(data)


def validate_and_fail(data):
    with pytest.raises(ValidationError) as caught:
        Profile.model_validate(data)
    return "\n".join(map(str, explain(caught.value, {"": "f.yaml"})))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mixed_precison": "bf16"}, "mixed_precison: unknown key (did you mean mixed_precision?)"),
        ({"mixed_precision": "bf61"}, "mixed_precision: expected no, bf16 or fp16, got 'bf61' (did you mean bf16?)"),
        ({"mixed_precision": False}, "mixed_precision: expected no, bf16 or fp16, got False"),
        ({"nproc_per_node": 2}, "did you mean launcher.nproc_per_node?"),
        ({"launcher": {"kind": "single", "nnodes": 2}}, "launcher.nnodes: this key belongs to launcher.kind: torchrun or slurm"),
        ({"launcher": {"kind": "torchrun", "nproc_per_node": "2"}}, "expected a whole number or auto, got '2'"),
        ({"launcher": {"kind": "torchrun", "nproc_per_node": 0}}, "at least 1 or auto, got 0"),
        ({"launcher": {"kind": "torchrun", "nproc_per_node": -1}}, "at least 1 or auto, got -1"),
        ({"launcher": {"kind": "torchrun", "nproc_per_node": True}}, "expected a whole number or auto, got True"),
        ({"launcher": {"kind": "torchrun", "nnodes": 2}}, "rdzv_endpoint (host:port) is needed if nnodes is above 1"),
        ({"launcher": {"kind": "torchrun", "nnodes": 2, "rdzv_endpoint": "localhost:1"}}, "f.yaml: launcher.rdzv_endpoint: localhost:1 is not reachable from other nodes, and nnodes is 2. Use"),
        ({"launcher": {"kind": "torchrun", "rdzv_endpoint": "host"}}, "expected host:port with a port from 1 to 65535"),
        ({"launcher": {"kind": "torchrun", "rdzv_endpoint": "h:70000"}}, "expected host:port"),
        ({"launcher": {"kind": "torchrn"}}, "launcher.kind: expected single, torchrun, slurm, ssh, xla, sagemaker, kubernetes, ray or skypilot, got 'torchrn' (did you mean torchrun?)"),
        ({"launcher": {"nproc_per_node": 2}}, "got nothing (set launcher.kind too: torchrun or slurm or ssh or sagemaker or kubernetes or ray or skypilot)"),
        ({"launcher": {}}, "launcher.kind: expected single, torchrun, slurm, ssh, xla, sagemaker, kubernetes, ray or skypilot, got nothing"),
        ({"launcher": {"kind": "slurm", "setup": "module load cuda"}}, "launcher.setup: expected a list, got 'module load"),
        ({"launcher": {"kind": "slurm", "setup": [1]}}, "launcher.setup: expected text in quotes, got 1"),
        ({"launcher": {"kind": "slurm", "time": "soon"}}, "launcher.time: expected minutes, or text such as 30:00"),
        ({"launcher": {"kind": "slurm", "gpus_per_node": True}}, "launcher.gpus_per_node: expected a whole number"),
        ({"launcher": {"kind": "ssh", "hosts": ["a", "b:22"]}}, "(a port belongs in ~/.ssh/config), got 'b:22'\n"),
        ({"launcher": {"kind": "kubernetes", "image": "a b"}}, "launcher.image: expected text without spaces, got 'a b'\n"),
        ({"launcher": 3}, "launcher: expected keys and values, got 3"),
        ({"process_group_timeout": 0}, "process_group_timeout: expected at least 1, got 0"),
        ({"parallel": {"dp_shard": 0}}, "parallel.dp_shard: expected at least 1 or auto, got 0"),
        ({"parallel": {"dp_shard": "all"}}, "parallel.dp_shard: expected a whole number or auto, got 'all'"),
        ({"parallel": {"tp": 0}}, "parallel.tp: expected at least 1, got 0"),
        ({"parallel": {"tp": "2"}}, "parallel.tp: expected a whole number, got '2'"),
        ({"parallel": {"pp": 2}}, "parallel.pp: unknown key"),
        ({"parallel": {"dp_shards": 2}}, "parallel.dp_shards: unknown key (did you mean parallel.dp_shard?)"),
        ({"dp_shard": 2}, "dp_shard: unknown key (did you mean parallel.dp_shard?)"),
        ({"parallel": {"tp_plan": {"a,b": "colwise"}}}, "tp_plan 'a,b=colwise': expected pairs like layers.*.up=colwise, without commas"),
        ({"parallel": {"tp": 2, "tp_plan": {"a": "colwize"}}}, "Did you mean colwise?"),
        ({"parallel": 3}, "parallel: expected keys and values, got 3"),
        ({"fully_shard": {"wrap": 0}}, "fully_shard.wrap: expected auto, none, a number of parameters above 0, or names"),
        ({"fully_shard": {"wrap": "a b"}}, "fully_shard.wrap: expected auto, none"),
        ({"fully_shard": {"wrap": "Auto,none"}}, "fully_shard.wrap: expected auto, none"),
        ({"fully_shard": {"wrap": ["auto"]}}, "expected auto, none, a number of parameters above 0, or names of classes, got ['auto']"),
        ({"fully_shard": {"reshard_after_forward": 1}}, "expected true, false or a number above 1, got 1"),
        ({"fully_shard": {"wrap": 1.5}}, "fully_shard.wrap: expected auto, none"),
        ({"fully_shard": {"wrap": True}}, "fully_shard.wrap: expected auto, none"),
        ({"fully_shard": {"reshard_after_forward": "yes"}}, "expected true, false or a whole number, got 'yes'"),
        ({"fully_shard": {"cpu_offload": "yes"}}, "fully_shard.cpu_offload: expected true or false, got 'yes'"),
        ({"fully_shard": {"param_dtype": "bfloat16"}}, "expected auto, fp32, bf16 or fp16, got 'bfloat16'"),
        ({"fully_shard": {"ignore": ["a,b"]}}, "ignore 'a,b': expected names without commas or spaces"),
        ({"fully_shard": {"fsdp_version": 2}}, "fully_shard.fsdp_version: this is an option of FSDP1; under fully_shard, there is only"),
        ({"sharding_strategy": "FULL_SHARD"}, "this is an option of FSDP1; under fully_shard, say reshard_after_forward"),
        ({"deepspeed": {"stage": 4}}, "deepspeed.stage: expected no, auto, 0, 1, 2 or 3, got 4"),
        ({"deepspeed": {"stage": True}}, "deepspeed.stage: expected no, auto, 0, 1, 2 or 3, got True"),
        ({"deepspeed": {"stage": "auto"}}, "f.yaml: deepspeed.config_file: expected the path of a JSON file"),
        ({"deepspeed": {"offload_param": "cpu"}}, "offload_param has no effect with deepspeed.stage: no."),
        ({"deepspeed": {"stage": 3, "offload_param": "nvme"}}, "f.yaml: deepspeed.nvme_path: expected a directory"),
        ({"deepspeed": {"stage": 3, "nvme_path": "/x"}}, "f.yaml: deepspeed: nvme_path has no effect"),
        ({"deepspeed": {"stage": 3, "gradient_clipping": -1}}, "deepspeed.gradient_clipping: expected at least 0.0, got -1"),
        ({"deepspeed": {"stage": 3, "zero_stage": 3}}, "deepspeed.zero_stage: unknown key"),
        ({"env": {"A": [1]}}, "env.A: expected text, got [1]"),
        ({"env": {"A=B": "x"}}, "'A=B' cannot name an environment variable"),
        ({"env": {"A B": "x"}}, "'A B' cannot name an environment variable"),
    ],
)  # fmt: skip
def test_an_error_has_key_expectation_value_and_suggestion(data, message):
    assert message in f"{validate_and_fail(data)}\n"


def test_all_mistakes_are_reported_at_once():
    messages = validate_and_fail(
        {"devise": "cpu", "mixed_precision": 3, "launcher": {"kind": "torchrun", "nnodes": 0, "x": 1}}
    )
    assert all(key in messages for key in ("devise", "mixed_precision", "launcher.nnodes", "launcher.x"))


@pytest.mark.parametrize(("kind", "hint"), [("tochrun", " (did you mean torchrun?)"), ("pbs", "")])
def test_an_unknown_kind_does_not_hide_other_mistakes_of_the_launcher(kind, hint):
    assert validate_and_fail({"launcher": {"kind": kind, "nprocs": 3}}).splitlines() == [
        f"f.yaml: launcher.kind: expected single, torchrun, slurm, ssh, xla, sagemaker, kubernetes, ray or skypilot, got '{kind}'{hint}",
        "f.yaml: launcher.nprocs: unknown key (did you mean launcher.nproc_per_node?)",
    ]
    more = validate_and_fail({"launcher": {"kind": "tochrun", "nproc_per_node": 0}})
    assert "launcher.nproc_per_node: expected at least 1 or auto" in more


def test_an_editor_accepts_numbers_and_truth_values_in_env():
    assert json_schema()["properties"]["env"]["additionalProperties"]["type"] == [
        "string",
        "number",
        "boolean",
    ]


def test_numbers_for_text_are_rejected_with_the_advice_to_quote_them():
    assert validate_and_fail({"launcher": {"kind": "torchrun", "rdzv_id": 12}}) == (
        "f.yaml: launcher.rdzv_id: expected text in quotes, got 12"
    )
    tags = {"kind": "sagemaker", "tags": {"team": 12.1}}
    assert validate_and_fail({"launcher": tags}) == "f.yaml: launcher.tags: expected text in quotes, got 12.1"


def test_the_json_schema_contains_every_key():
    text = json.dumps(json_schema())
    assert all(f'"{key.rpartition(".")[2]}"' in text for key in known_keys())


def test_every_key_has_a_description():
    assert all(known_keys().values())


def test_sections_without_sharding_are_omitted_from_a_file():
    assert {"parallel", "fully_shard"}.isdisjoint(Profile().data())
    profile = Profile.model_validate(
        {"parallel": {"dp_shard": "auto", "tp": 1}, "fully_shard": {"wrap": "100"}}
    )
    assert profile.data()["parallel"] == {"dp_shard": "auto"}
    assert profile.data()["fully_shard"] == {"wrap": "100"}


def test_a_single_name_becomes_a_list():
    assert Profile.model_validate({"fully_shard": {"ignore": "lm_head"}}).fully_shard.ignore == ["lm_head"]


def test_a_profile_is_immutable():
    with pytest.raises(ValidationError, match="frozen"):
        Profile().device = "cpu"
