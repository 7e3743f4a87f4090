"""Setting values in the file of a profile."""

from multiprocessing import get_context

import pytest

from accel_cli.errors import ProfileError
from accel_cli.profile.edit import remove_keys, update_profile
from accel_cli.profile.layers import read_file
from accel_cli.profile.store import ProfileStore

Process = get_context("fork").Process


@pytest.fixture
def store(tmp_path):
    return ProfileStore(tmp_path / "profiles", tmp_path)


def test_a_file_is_created_and_changed_with_comments_kept(store):
    file = store.get_path("gpu")
    update_profile(store, file, {"mixed_precision": "bf16", "parallel.dp_shard": 2}, "test")
    file.write_text(file.read_text() + "# mine\n")
    profile, lost = update_profile(
        store, file, {"mixed_precision": None, "parallel.dp_shard": "auto"}, "test"
    )
    assert (profile.mixed_precision, profile.parallel.dp_shard, lost) == ("no", "auto", [])
    assert "# mine" in file.read_text()
    assert "mixed_precision" not in file.read_text()


def test_values_set_by_concurrent_processes_are_all_kept(store):
    file = store.get_path("gpu")
    processes = [
        Process(target=update_profile, args=(store, file, {f"env.V{n}": str(n)}, "test")) for n in range(20)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert update_profile(store, file, {}, "test")[0].env == {f"V{n}": str(n) for n in range(20)}


def test_the_user_profile_is_the_base_of_other_profiles(store):
    update_profile(store, store.get_path("default"), {"log_level": "info"}, "test")
    profile, _ = update_profile(store, store.get_path("gpu"), {"mixed_precision": "bf16"}, "test")
    assert profile.log_level == "info"
    assert "log_level" not in store.get_path("gpu").read_text()


def test_an_invalid_value_is_rejected_and_nothing_is_written(store):
    file = store.get_path("gpu")
    with pytest.raises(ProfileError, match="test"):
        update_profile(store, file, {"parallel.dp_shard": 0}, "test")
    assert not file.exists()


def test_an_error_of_a_section_does_not_name_a_missing_file(store):
    with pytest.raises(
        ProfileError, match=r"^test: launcher.kind: expected .* \(set launcher.kind too: torchrun"
    ):
        update_profile(store, store.get_path("gpu"), {"launcher.nproc_per_node": 2}, "test")


def test_a_profile_with_several_mistakes_is_repaired_key_by_key(store):
    file = store.get_path("gpu")
    file.parent.mkdir()
    file.write_text("launcher:\n  kind: torchrun\n  nprocs: 3\n  ranks: all\ndevise: cpu\n")
    remaining = remove_keys(store, file, ["launcher.nprocs"], "test")
    assert [problem.key for problem in remaining] == ["schema_version", "devise"]
    assert [problem.key for problem in remove_keys(store, file, ["devise"], "test")] == ["schema_version"]
    with pytest.raises(ProfileError) as caught:
        remove_keys(store, file, ["launcher.kind"], "test")
    assert [problem.key for problem in caught.value.problems] == ["launcher.kind"]
    assert file.read_text() == "launcher:\n  kind: torchrun\n  ranks: all\n"


def test_numbers_of_variables_stay_as_written_when_other_keys_change(store):
    file = store.get_path("gpu")
    file.parent.mkdir()
    file.write_text("schema_version: 1\nenv: {A: 012345678901, B: 12.10, C: 1234567e8, D: true}\n")
    expected = {"A": "012345678901", "B": "12.10", "C": "1234567e8", "D": "true"}
    assert update_profile(store, file, {"env.E": "1e3"}, "test")[0].env == {**expected, "E": "1e3"}
    profile, _ = update_profile(store, file, {"env.E": None, "mixed_precision": "bf16"}, "test")
    assert profile.env == expected
    assert read_file(file, "gpu").values == {f"env.{key}": text for key, text in expected.items()} | {
        "mixed_precision": "bf16"
    }
