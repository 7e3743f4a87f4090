import pytest

from accel_cli.errors import ProfileError
from accel_cli.profile.schema import SCHEMA_VERSION
from accel_cli.profile.store import MIGRATIONS, migrate_profile

STEPS = {
    1: lambda data: {"schema_version": 1, "device": "cpu" if data["use_cpu"] else "auto"},
    2: lambda data: {**data, "precision": data["device"]},
}


def test_every_older_version_has_a_step():
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_an_old_file_walks_through_every_version():
    data = migrate_profile({"schema_version": 1, "use_cpu": True}, "x", STEPS, 3)
    assert data == {"schema_version": 3, "device": "cpu", "precision": "cpu"}


def test_a_file_of_today_stays_as_it_is():
    assert migrate_profile({"schema_version": SCHEMA_VERSION, "a": 1}, "x") == {
        "schema_version": SCHEMA_VERSION,
        "a": 1,
    }


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "add the line: schema_version: 1"),
        ({"schema_version": 99}, "written by a newer accel; this one reads up to version 1"),
        ({"schema_version": "1"}, "expected a whole number above 0"),
        ({"schema_version": True}, "expected a whole number above 0"),
        ({"schema_version": 0}, "expected a whole number above 0"),
    ],
)
def test_a_version_we_cannot_read_says_what_to_do(data, said):
    with pytest.raises(ProfileError) as caught:
        migrate_profile(data, "x.yaml:1")
    assert said in str(caught.value)
    assert "x.yaml:1: schema_version" in str(caught.value)
