import sys

import pytest

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import instances, service


def refused(check, *args, **options):
    with pytest.raises(UsageError) as caught:
        check(*args, **options)
    return str(caught.value)


def test_the_known_types_are_those_of_botocore():
    assert len(instances.known()) > 200
    assert {"ml.g5.2xlarge", "ml.p5.48xlarge", "ml.m5.large"} <= set(instances.known())


@pytest.mark.parametrize("kind", sorted({*instances.SMDDP, *instances.MODEL_PARALLEL, *instances._EFA}))
def test_every_type_that_is_spelled_here_exists(kind):
    assert kind in instances.known()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ml.g5.3xlarge", "ml.g5.2xlarge"),
        ("ml.p4dn.24xlarge", "ml.p4d.24xlarge"),
        ("p4d.24xlarge", "ml.p4d.24xlarge"),
        ("ML.G5.2XLARGE", "ml.g5.2xlarge"),
        ("ml_g5_2xlarge", "ml.g5.2xlarge"),
        ("ml.g5", "ml.g5.xlarge"),
        ("ml.m5.xlage", "ml.m5.xlarge"),
    ],
)
def test_a_misspelt_type_is_refused_with_the_one_that_was_meant(typed, meant):
    said = refused(instances.check_known, typed)
    assert typed in said
    assert meant in said.partition("did you mean")[2]


def test_a_type_that_is_newer_than_boto3_is_taken_when_that_is_said():
    said = refused(instances.check_known, "ml.g9.xlarge")
    assert "launcher.allow_unknown_instance: true" in said
    instances.check_known("ml.g9.xlarge", allow_unknown=True)


def test_what_is_no_name_of_a_type_is_never_taken():
    assert "expected a name like" in refused(instances.check_known, "large", allow_unknown=True)
    assert "expected a name like" in refused(instances.check_known, "ml.g5.2xlarge\n", allow_unknown=True)


@pytest.mark.parametrize("kind", ["ml.trn1.2xlarge", "ml.trn2.48xlarge", "ml.inf2.xlarge"])
def test_neuron_is_refused_even_where_unknown_types_are_allowed(kind):
    assert "Neuron" in refused(instances.check_known, kind, allow_unknown=True)


@pytest.mark.parametrize("kind", instances.known())
def test_every_known_type_has_a_processor_or_is_neuron(kind):
    if ".trn" in kind:
        assert "Neuron" in refused(instances.processor, kind)
    else:
        gpu = kind.split(".")[1][0] in "gp"
        assert instances.has_gpu(kind) is gpu
        instances.check_known(kind)


def test_arm_is_graviton_and_grace_and_nothing_else():
    arm = ["ml.m7g.large", "ml.c6gn.xlarge", "ml.g5g.xlarge", "ml.t4g.medium", "ml.p6e-gb200.36xlarge"]
    assert all(instances.is_arm(kind) for kind in arm)
    assert [kind for kind in instances.known() if instances.is_arm(kind)] == ["ml.p6e-gb200.36xlarge"]


def test_efa_is_for_the_large_gpu_types():
    assert instances.has_efa("ml.p5.48xlarge")
    assert not instances.has_efa("ml.g5.2xlarge")
    assert not instances.has_efa("ml.m5.large")


def test_smddp_is_refused_elsewhere_with_the_types_it_runs_on():
    instances.check_smddp("ml.p4de.24xlarge")
    for kind in ("ml.p3.16xlarge", "ml.p5.48xlarge", "ml.m5.large"):
        said = refused(instances.check_smddp, kind)
        assert "ml.p4d.24xlarge or ml.p4de.24xlarge; it is " + kind in said


def test_model_parallel_is_refused_elsewhere_with_the_types_it_runs_on():
    instances.check_model_parallel("ml.p5.48xlarge")
    said = refused(instances.check_model_parallel, "ml.g5.48xlarge")
    assert "ml.p4d.24xlarge, ml.p4de.24xlarge, ml.p5.48xlarge or ml.p5e.48xlarge" in said


def test_gpus_are_counted_of_types_that_are_known_and_of_no_others():
    counted = {
        kind: instances.gpus(f"ml.{kind}")
        for kind in ("p4d.24xlarge", "g5.xlarge", "g5.12xlarge", "m5.large")
    }
    assert counted == {"p4d.24xlarge": 8, "g5.xlarge": 1, "g5.12xlarge": 4, "m5.large": 1}
    assert instances.gpus("ml.g99.xlarge") is None
    assert instances.gpus(None) is None
    for family, sizes in instances._GPUS.items():
        for size in " ".join(sizes.values()).split():
            assert instances.gpus(f"ml.{family}.{size}")


def test_the_types_whose_gpus_are_counted_are_types_of_aws():
    names = [
        f"ml.{family}.{size}"
        for family, sizes in instances._GPUS.items()
        for size in " ".join(sizes.values()).split()
    ]
    assert {*names} <= {*instances.known()}


def test_without_boto3_the_message_says_what_to_install(monkeypatch):
    service.model.cache_clear()
    monkeypatch.setitem(sys.modules, "botocore.loaders", None)
    assert 'pip install "accel[sagemaker]"' in refused(instances.known)


def test_an_aws_profile_that_is_not_there_does_not_matter(monkeypatch):
    service.model.cache_clear()
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    assert instances.known()
