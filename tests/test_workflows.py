"""The workflow files: what they may do, what they install, and that the wheel is tested with each extra."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import wheel
import yaml

from accel_cli.launchers import LAUNCHERS
from accel_cli.profile.schema import SCHEMA_VERSION
from accel_runtime.observe.step_records import record
from accel_runtime.storage import manifest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TESTS = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
POLICIES = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_action_is_pinned_by_a_hash_with_its_version(path):
    """A tag can be moved to other code; the comment is what Dependabot updates with the hash."""
    used = re.findall(r"^\s*-? *uses: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    loose = [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)]
    assert not loose


def test_one_version_of_each_action_is_used():
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for name, pin in re.findall(r"uses: ([\w-]+/[\w-]+)\S*@(.*)", path.read_text(encoding="utf-8")):
            pins.setdefault(name, set()).add(pin)
    assert {name: pin for name, pin in pins.items() if len(pin) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_can_only_read_and_a_job_gets_what_it_writes(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        for step in job["steps"]:
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False, name


def test_the_wheel_is_tested_with_each_extra_of_users():
    extras = set(PROJECT["optional-dependencies"])
    matrix = TESTS["wheel"]["strategy"]["matrix"]
    assert set(matrix["extra"]) == set(wheel.CHECKS) == {"none"} | extras - wheel.FOR_DEVELOPMENT
    assert extras >= wheel.FOR_DEVELOPMENT


def test_the_wheel_is_tested_in_the_oldest_and_newest_versions_of_python_and_torch():
    matrix = TESTS["wheel"]["strategy"]["matrix"]
    oldest, newest = (
        next(each for each in matrix["include"] if each["versions"] == name and "extra" not in each)
        for name in matrix["versions"]
    )
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    tested = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert tested is not None
    assert (oldest["python"], newest["python"]) == (pythons[0], pythons[-1])
    assert PROJECT["requires-python"] == f">={oldest['python']}"
    assert [each for each in wheel.list_lowest("none") if each.startswith("torch=")] == ["torch==2.9"]
    assert (oldest["torch"], newest["torch"]) == ("2.9.0", tested[1])
    versions = TESTS["versions"]["strategy"]["matrix"]
    assert (versions["python"], versions["torch"]) == (pythons, [oldest["torch"], newest["torch"]])


def test_the_lowest_versions_are_those_of_pyproject():
    assert "typer==0.29" in wheel.list_lowest("none")
    assert "ray==2.40" in wheel.list_lowest("ray")
    assert {"torch==2.9.0", "torch_xla==2.9.0"} <= set(wheel.list_lowest("xla"))


def test_the_platforms_of_the_policies_are_those_of_the_jobs():
    rows = [
        line.strip("| ").split(" | ") for line in POLICIES.splitlines() if line.startswith("| Linux x86_64")
    ]
    tested = [re.findall(r"\d+\.[\d.]+\d", f"{row[1]} {row[2]}") for row in rows]
    versions, matrix = TESTS["versions"]["strategy"]["matrix"], TESTS["wheel"]["strategy"]["matrix"]
    oldest, newest, xla, tpu = matrix["include"]
    everything = TESTS["all"]["steps"][1]["with"]["python-version"]
    assert tested == [
        [everything, newest["torch"]],
        [*versions["python"], *versions["torch"]],
        [oldest["python"], oldest["torch"]],
        [newest["python"], newest["torch"], xla["torch"]],
    ]
    assert xla["torch"] == tpu["torch"]
    assert {job["runs-on"] for job in TESTS.values()} == {"ubuntu-24.04"}
    assert ".ci/run" in TESTS["all"]["steps"][-1]["run"]


def test_the_proof_of_each_launcher_is_in_the_policies():
    rows = []
    for kind, launcher in LAUNCHERS.items():
        proof, _, details = launcher.proven_on.partition(": ")
        assert proof in {"real service", "emulator", "CPU only"}, kind
        rows.append(f"| `{kind}` | {proof} | {details} |")
    table = POLICIES.partition("| `launcher.kind` |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == rows


def test_the_versions_of_the_formats_are_in_the_policies():
    assert f"`version: {manifest.VERSION}`, and the versions of accel" in POLICIES
    assert f"`schema_version: {SCHEMA_VERSION}`" in POLICIES
    assert f"(`steps.jsonl`) | `version: {record.VERSION}` |" in POLICIES
