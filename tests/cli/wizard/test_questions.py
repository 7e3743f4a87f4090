import socket

import pytest

from accel_cli.errors import ProfileError
from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
from accel_cli.launchers.launcher import LaunchSpec
from accel_cli.planning import network
from accel_cli.planning.machine import Machine
from accel_cli.profile.layers import flatten, nest, to_data
from accel_cli.profile.schema import Profile, describe
from accel_cli.profile.store import render
from accel_cli.profile.yaml_io import parse
from accel_cli.wizard.questions import build_values, complete_suggestions, next_step, suggest_values

MACHINES = [
    Machine(1),
    Machine(8),
    Machine(8, "mps", ("Apple M3",)),
    Machine(8, "cuda", ("T4",)),
    Machine(8, "cuda", ("H100",) * 8, bf16=True),
]


def suggested(machine, before=None):
    return Profile.model_validate(nest(suggest_values(machine, before)))


def profile_from(answers, before):
    return Profile.model_validate(nest(build_values(answers, before)))


def list_questions(answers):
    """List the keys that are asked with these answers, and Enter for the others."""
    answers_given, keys = {}, []
    while step := next_step(answers_given):
        keys.append(step.key)
        answers_given[step.key] = answers.get(step.key, step.suggest(MACHINES[-1], answers_given, {}))
    return keys


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.summary)
@pytest.mark.parametrize("kind", ["single", "torchrun", "slurm", "sagemaker", None])
def test_enter_on_every_question_gives_a_profile_that_can_be_planned(machine, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile = suggested(machine, {"launcher.kind": kind} if kind else None)
    plan = profile.launcher.plan(
        LaunchSpec("x.py", (), "script", profile.settings, {}, {}, machine, "python")
    )
    assert plan.nnodes * plan.nproc_per_node >= 1


def test_the_default_path_has_five_questions():
    several = ["launcher.kind", "launcher.nnodes", "launcher.nproc_per_node", "mixed_precision"]
    assert list_questions({}) == [*several, "parallel.dp_shard"]
    assert list_questions({"launcher.kind": "single"}) == ["launcher.kind", "mixed_precision"]


def test_the_rendezvous_is_asked_only_for_several_nodes():
    assert "launcher.rdzv_endpoint" in list_questions({"launcher.nnodes": 2})


def test_the_suggested_rendezvous_is_an_address_that_other_nodes_reach(monkeypatch):
    answers = {"launcher.kind": "torchrun", "launcher.nnodes": 3, "launcher.nproc_per_node": 1}
    step = next_step(answers)
    assert step.key == "launcher.rdzv_endpoint"
    for address, suggested_ in (("10.0.0.7", "10.0.0.7:29400"), ("fd00::7", "[fd00::7]:29400")):
        monkeypatch.setattr(network, "find_own_address", lambda address=address: address)
        assert step.suggest(MACHINES[0], answers, {}) == suggested_
    monkeypatch.setattr(network, "find_own_address", lambda: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    assert step.suggest(MACHINES[0], answers, {}) == "node0:29400"
    assert step.find_problem("node0:29400", answers) is None
    refused = step.find_problem("localhost:29400", answers)
    assert refused == "only this machine reaches this address: give one that all nodes reach"
    assert step.find_problem("localhost", answers).startswith("expected host:port")
    assert len(refused) < 80  # what the line of a terminal shows
    before = {"launcher.rdzv_endpoint": "localhost:29400"}
    assert step.suggest(MACHINES[0], answers, before) == "node0:29400"


def test_slurm_asks_for_nodes_gpus_and_account():
    keys = ["launcher.kind", "launcher.nnodes", "launcher.gpus_per_node", "launcher.nproc_per_node"]
    remaining = ["launcher.partition", "launcher.account", "launcher.time", "mixed_precision"]
    assert list_questions({"launcher.kind": "slurm"}) == [*keys, *remaining]
    with_gpus = list_questions({"launcher.kind": "slurm", "launcher.gpus_per_node": "a100:4"})
    assert with_gpus == [*keys[:-1], *remaining, "parallel.dp_shard"]
    assert suggested(MACHINES[0], {"launcher.kind": "slurm"}).launcher.partition is None


FITS = "parallel.dp_shard"
DIVIDED = [FITS, "fully_shard.cpu_offload", "fully_shard.activation_checkpointing"]


@pytest.mark.parametrize(
    ("answers", "keys"),
    [
        ({"kind": "single"}, []),
        ({"kind": "xla"}, []),
        ({"kind": "torchrun", "nproc_per_node": 1}, []),
        ({"kind": "torchrun", "nproc_per_node": 2}, [FITS]),
        ({"kind": "torchrun", "nproc_per_node": 2, FITS: "auto"}, DIVIDED),
        ({"kind": "torchrun", "nproc_per_node": 1, "nnodes": 2, FITS: "auto"}, [FITS, "parallel.dp_replicate", *DIVIDED[1:]]),
        ({"kind": "slurm", "gpus_per_node": 1}, []),
        ({"kind": "slurm", "gpus_per_node": 0, "nproc_per_node": 2}, [FITS]),
        ({"kind": "sagemaker", "instance_type": "ml.g5.2xlarge"}, []),
        ({"kind": "sagemaker", "instance_type": "ml.g5.12xlarge"}, [FITS]),
        ({"kind": "sagemaker", "instance_type": "ml.m5.xlarge", "instance_count": 2}, [FITS]),
    ],
)  # fmt: skip
def test_sharding_is_asked_only_for_several_processes(answers, keys):
    full_answers = {key if "." in key else f"launcher.{key}": value for key, value in answers.items()}
    asked_keys = [
        key for key in list_questions(full_answers) if key.startswith(("parallel.", "fully_shard."))
    ]
    assert sorted(asked_keys) == sorted(keys)
    assert asked_keys[:1] == keys[:1]


def test_sharding_values_are_kept_or_dropped_with_sharding():
    before = {
        "launcher.kind": "torchrun",
        "launcher.nproc_per_node": 4,
        FITS: "auto",
        "parallel.tp": 2,
        "fully_shard.wrap": "Block",
        "fully_shard.cpu_offload": True,
    }
    suggestion = suggested(MACHINES[-1], before)
    assert (suggestion.parallel.dp_shard, suggestion.parallel.tp, suggestion.fully_shard.wrap) == (
        "auto",
        2,
        "Block",
    )
    assert suggestion.fully_shard.cpu_offload
    answers = {"launcher.kind": "torchrun", "launcher.nnodes": 1, "launcher.nproc_per_node": 4}
    fits = profile_from({**answers, "mixed_precision": "no", FITS: 1}, {**before, "parallel.tp": 1})
    assert fits.settings.parallel.plain
    assert "fully_shard" not in fits.data()
    alone = profile_from({"launcher.kind": "single", "mixed_precision": "no"}, before)
    assert {"parallel", "fully_shard"}.isdisjoint(alone.data())


START = {
    "launcher.kind": "torchrun",
    "launcher.nnodes": 1,
    "launcher.nproc_per_node": 4,
    "mixed_precision": "no",
}


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        ("no", ["fully_shard.cpu_offload", "fully_shard.activation_checkpointing"]),
        ("auto", ["deepspeed.config_file"]),
        (1, ["deepspeed.config_file", "deepspeed.offload_optimizer"]),
        (3, ["deepspeed.config_file", "deepspeed.offload_optimizer", "deepspeed.offload_param"]),
    ],
)
def test_the_questions_of_the_library_that_shards_are_asked(stage, keys):
    asked = list_questions({**START, FITS: "auto", "deepspeed.stage": stage})
    assert [key for key in asked if key.startswith(("deepspeed.", "fully_shard."))] == sorted(
        ["deepspeed.stage", *keys], key=asked.index
    )


def test_nvme_is_offered_for_stage_3_and_needs_a_directory():
    answers = {**START, FITS: "auto", "deepspeed.stage": 2, "deepspeed.config_file": ""}
    assert "nvme" not in [choice.value for choice in next_step(answers).choices(MACHINES[-1], answers)]
    answers |= {"deepspeed.stage": 3, "deepspeed.offload_optimizer": "no"}
    step = next_step(answers)
    assert (step.key, [choice.value for choice in step.choices(MACHINES[-1], answers)]) == (
        "deepspeed.offload_param",
        ["no", "cpu", "nvme"],
    )
    answers["deepspeed.offload_param"] = "nvme"
    step = next_step(answers)
    assert step.key == "deepspeed.nvme_path"
    assert "expected a directory" in step.find_problem("", answers)


def test_the_json_file_is_checked_when_it_is_typed(tmp_path):
    answers = {**START, FITS: "auto", "deepspeed.stage": "auto"}
    step = next_step(answers)
    assert step.key == "deepspeed.config_file"
    assert "expected the path of a JSON file" in step.find_problem("", answers)
    assert "Cannot read" in step.find_problem(str(tmp_path / "gone.json"), answers)
    (tmp_path / "ds.json").write_text("{}")
    assert step.find_problem(str(tmp_path / "ds.json"), answers) is None


def test_deepspeed_replaces_the_other_library_in_the_profile_and_back():
    before = {**START, FITS: "auto", "fully_shard.wrap": "Block", "parallel.tp": 2}
    answers = {
        **START,
        FITS: "auto",
        "deepspeed.stage": 2,
        "deepspeed.config_file": "",
        "deepspeed.offload_optimizer": "cpu",
    }
    profile = profile_from(answers, before)
    assert profile.data()["deepspeed"] == {"stage": 2, "offload_optimizer": "cpu"}
    assert {"parallel", "fully_shard"}.isdisjoint(profile.data())
    before = {
        **START,
        "deepspeed.stage": 3,
        "deepspeed.gradient_clipping": 1.0,
        "deepspeed.offload_param": "cpu",
    }
    fully_sharded = {**START, FITS: "auto", "deepspeed.stage": "no", "fully_shard.cpu_offload": False}
    profile = profile_from({**fully_sharded, "fully_shard.activation_checkpointing": False}, before)
    assert "deepspeed" not in profile.data()
    assert "deepspeed" not in profile_from({**START, FITS: 1}, before).data()


def test_a_profile_with_deepspeed_is_suggested_again_with_keys_that_have_no_question():
    before = {
        **START,
        "deepspeed.stage": 3,
        "deepspeed.gradient_clipping": 1.0,
        "deepspeed.offload_param": "cpu",
    }
    profile = Profile.model_validate(nest(suggest_values(MACHINES[-1], complete_suggestions(before))))
    assert profile.data()["deepspeed"] == {"stage": 3, "offload_param": "cpu", "gradient_clipping": 1.0}
    single = {key: value for key, value in before.items() if not key.startswith("launcher.n")}
    alone = {"launcher.kind": "single", "mixed_precision": "no"}
    alone = profile_from(alone, {**single, "launcher.kind": "single"})
    assert alone.deepspeed.gradient_clipping == 1.0


def test_suggestions_match_the_detected_hardware():
    best = suggested(MACHINES[-1])
    assert (best.launcher.kind, best.launcher.nproc_per_node, best.mixed_precision) == (
        "torchrun",
        "auto",
        "bf16",
    )
    assert (suggested(MACHINES[1]).launcher.kind, suggested(MACHINES[1]).mixed_precision) == ("single", "no")


def test_values_of_the_previous_profile_are_suggested_and_others_are_kept():
    before = {
        "launcher.kind": "torchrun",
        "launcher.nproc_per_node": 3,
        "launcher.max_restarts": 2,
        "env.A": "1",
    }
    profile = suggested(MACHINES[1], before)
    assert (profile.launcher.nproc_per_node, profile.launcher.max_restarts, profile.env) == (3, 2, {"A": "1"})


@pytest.mark.parametrize("kind", ["single", "torchrun", "slurm", "sagemaker"])
def test_only_answered_keys_are_written(kind):
    written = suggest_values(MACHINES[-1], {"launcher.kind": kind})
    assert set(written) <= set(list_questions({"launcher.kind": kind}))
    text = render(to_data(written), describe(kind))
    assert parse(text, "").data == to_data(written)
    lines = text.splitlines()[2:]
    values = [
        index for index, line in enumerate(lines) if not line.strip().startswith("#") and line[-1] != ":"
    ]
    assert all(lines[index - 1].strip().startswith("#") for index in values)


def test_other_values_of_the_file_are_kept():
    written = build_values(
        {"launcher.kind": "single", "mixed_precision": "no"}, {"env.A": "1", "resume": True}
    )
    assert written == {"env.A": "1", "resume": True, "launcher.kind": "single", "mixed_precision": "no"}


def test_an_answer_that_no_longer_applies_is_dropped():
    before = {"launcher.kind": "torchrun", "launcher.nnodes": 2, "launcher.rdzv_endpoint": "a:1"}
    answers = {
        "launcher.kind": "torchrun",
        "launcher.nnodes": 1,
        "launcher.nproc_per_node": 2,
        "mixed_precision": "no",
    }
    assert "launcher.rdzv_endpoint" not in flatten(profile_from(answers, before).data())


def test_changing_the_launcher_drops_its_previous_keys():
    before = {"launcher.kind": "torchrun", "launcher.nproc_per_node": 3, "device": "cpu"}
    profile = profile_from({"launcher.kind": "single", "mixed_precision": "no"}, before)
    assert (profile.launcher.kind, profile.device) == ("single", "cpu")


@pytest.mark.parametrize(
    ("value", "message"), [(0, True), ("x", True), (1.5, True), (3, False), ("auto", False)]
)
def test_an_answer_is_validated_by_its_field(value, message):
    answers = {"launcher.kind": "torchrun", "launcher.nnodes": 1}
    step = next_step(answers)
    assert step.key == "launcher.nproc_per_node"
    problem = step.find_problem(value, answers)
    assert (problem.startswith("expected ") and problem.endswith(" or auto")) if message else problem is None


CHIPS = Tpu(("TPU v4",) * 4, "PCI")
TPU = Machine(8, others=(XlaDevices(CHIPS, Packages("2.9.0", "2.9.0", "0.0.21")),))


def test_xla_asks_three_questions_and_suggests_bf16():
    profile = suggested(TPU)
    assert (profile.launcher.kind, profile.launcher.replicas, profile.launcher.spmd) == ("xla", "all", False)
    assert profile.mixed_precision == "bf16"
    keys = ["launcher.kind", "launcher.replicas", "launcher.spmd", "mixed_precision"]
    assert list_questions({"launcher.kind": "xla"}) == keys
    assert list_questions({"launcher.kind": "xla", "launcher.replicas": 1}) == [*keys[:2], keys[3]]
    assert (
        profile.launcher.plan(
            LaunchSpec("x.py", (), "script", profile.settings, {}, {}, TPU, "python")
        ).launcher
        == "xla"
    )


@pytest.mark.parametrize(
    ("machine", "there"),
    [
        (Machine(8), False),
        (Machine(8, others=(XlaDevices(packages=Packages("2.9.0", "2.9.0")),)), True),
        (Machine(8, others=(XlaDevices(CHIPS, Packages(None, "2.13.0")),)), True),
    ],
)
def test_xla_is_offered_only_with_a_tpu_or_torch_xla(machine, there):
    kinds = [choice.value for choice in next_step({}).choices(machine, {})]
    assert kinds == [
        "single",
        "torchrun",
        "slurm",
        "ssh",
        *(["xla"] if there else []),
        "sagemaker",
        "kubernetes",
        "ray",
        "skypilot",
    ]


def test_an_unsupported_precision_is_neither_offered_nor_kept():
    answers = {"launcher.kind": "xla", "launcher.replicas": "all", "launcher.spmd": False}
    step = next_step(answers)
    assert [choice.value for choice in step.choices(TPU, answers)] == ["no", "bf16"]
    assert step.suggest(TPU, answers, {"mixed_precision": "fp16"}) == "bf16"
    assert step.suggest(TPU, answers, {"mixed_precision": "no"}) == "no"
    others = next_step({"launcher.kind": "single"})
    assert "fp16" in [choice.value for choice in others.choices(TPU, {"launcher.kind": "single"})]


SAGEMAKER = [
    f"launcher.{key}"
    for key in ("kind", "aws_profile", "region", "role", "instance_type", "instance_count", "spot", "max_run")
]
MORE = [
    f"launcher.{key}"
    for key in (
        "image_uri", "pytorch_version", "inputs", "metrics", "secrets", "model_dir", "checkpoint_dir",
    )
]  # fmt: skip


def test_sagemaker_asks_advanced_questions_only_on_request():
    first = [*SAGEMAKER, "launcher.keep_alive", "launcher.requirements", "more"]
    assert list_questions({"launcher.kind": "sagemaker"}) == [*first, "mixed_precision"]
    assert list_questions({"launcher.kind": "sagemaker", "more": True}) == [*first, *MORE, "mixed_precision"]


def test_dependent_questions_follow_their_answer():
    on_spot = list_questions({"launcher.kind": "sagemaker", "launcher.spot": True, "more": True})
    assert "launcher.max_wait" in on_spot
    assert "launcher.keep_alive" not in on_spot
    questions = list_questions({"launcher.kind": "sagemaker", "more": True, "launcher.image_uri": "mine:1"})
    assert "launcher.pytorch_version" not in questions


def step_of(key, answers):
    full_answers = {"launcher.kind": "sagemaker", **answers}
    while (step := next_step(full_answers)).key != key:
        full_answers[step.key] = step.suggest(MACHINES[0], full_answers, {})
    return step, full_answers


@pytest.mark.parametrize(
    ("key", "answers", "value", "message"),
    [
        ("launcher.max_run", {}, "2 hours", "expected seconds, or text such as 90m, 2h or 1d"),
        ("launcher.max_run", {}, 0, "at least 1"),
        ("launcher.max_run", {}, "1d", None),
        ("launcher.keep_alive", {}, "7h", "at most 21600"),
        ("launcher.max_wait", {"launcher.spot": True, "launcher.max_run": "2h", "more": True}, 60, "at least max_run, 7200"),
        ("launcher.inputs", {"more": True}, {"accel": "s3://b/x"}, "but not accel as the key"),
        ("launcher.inputs", {"more": True}, {"a": "https://b/x"}, "s3://bucket/folder"),
        ("launcher.instance_type", {}, "ml.g5.xlrge", "Did you mean ml.g5.xlarge"),
        ("launcher.instance_type", {}, "g5xlarge", "Did you mean ml.g5.xlarge"),
        ("launcher.instance_type", {}, "ml.trn1.2xlarge", "Neuron"),
        ("launcher.instance_type", {}, "ml.g5.xlarge", None),
    ],
)  # fmt: skip
def test_values_that_sagemaker_rejects_are_reported_at_the_question(key, answers, value, message):
    step, full_answers = step_of(key, answers)
    problem = step.find_problem(value, full_answers)
    assert (message in problem) if message else problem is None


def test_values_of_advanced_questions_are_kept_without_asking():
    before = {"launcher.kind": "sagemaker", "launcher.tags": {"team": "007"}, "launcher.spot": True,
              "launcher.max_wait": 90000, "launcher.bucket": "mine-of-me"}  # fmt: skip
    suggestion = suggested(MACHINES[0], before).launcher
    assert (suggestion.tags, suggestion.max_wait, suggestion.bucket) == ({"team": "007"}, 90000, "mine-of-me")


def test_values_that_an_answer_excludes_are_dropped():
    before = {"launcher.kind": "sagemaker", "launcher.spot": True, "launcher.max_wait": 90000}
    answers = {}
    while step := next_step(answers):
        spot = step.key == "launcher.spot"
        answers[step.key] = False if spot else step.suggest(MACHINES[0], answers, before)
    assert profile_from(answers, before).launcher.max_wait is None


def test_answers_that_contradict_kept_values_are_reported():
    before = {"launcher.kind": "sagemaker", "launcher.network_isolation": True}
    answers = {"launcher.kind": "sagemaker", "launcher.requirements": "more.txt", "mixed_precision": "no"}
    with pytest.raises(ProfileError, match="network_isolation: requirements need a network"):
        profile_from(answers, before)


def test_a_launcher_with_missing_requirements_is_offered_with_their_names(monkeypatch):
    title = next(
        choice.title for choice in next_step({}).choices(MACHINES[0], {}) if choice.value == "sagemaker"
    )
    assert title == "A training job on Amazon SageMaker"
    monkeypatch.setattr("accel_cli.extensions.sagemaker.fields.find_spec", lambda _: None)
    title = next(
        choice.title for choice in next_step({}).choices(MACHINES[0], {}) if choice.value == "sagemaker"
    )
    assert title == "A training job on Amazon SageMaker (needs boto3, sagemaker-core)"


def test_a_printed_profile_omits_empty_values():
    data = suggested(MACHINES[0], {"launcher.kind": "sagemaker"}).data()
    assert {"tags", "inputs", "subnets", "role"}.isdisjoint(data["launcher"])
    assert "env" not in data
