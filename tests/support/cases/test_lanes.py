"""Tests that share a service or an interpreter are in one group."""

from pathlib import Path

import pytest
from support.cases.lanes import find_group

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/test_site.py::test_the_menu_of_a_phone_leads_to_a_page", "Chromium"),
        ("tests/extensions/slurm/test_service.py::test_a_job_trains_on_two_nodes", "Slurm"),
        ("tests/integration/test_trials.py::test_a_loop", "Transformers"),
        ("tests/extensions/object_stores/test_launch.py::test_a_run[Ceph-1]", "Ceph"),
        ("tests/extensions/object_stores/test_launch.py::test_a_run[moto-1]", None),
        ("tests/extensions/xla/device/test_data.py::test_a_loop[2 replicas]", "2 replicas"),
    ],
)
def test_tests_that_share_what_takes_long_to_start_are_in_a_group(nodeid, group):
    assert find_group(ROOT, nodeid) == group
