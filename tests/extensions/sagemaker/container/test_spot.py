"""Spot instances: an interrupted container, and another that resumes from its checkpoints."""

import os
import shutil
import signal

import pytest
from support.runs.slow_example import EXAMPLES, checkpointing

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path):
    """The scripts of a job, slow as long as the folder has a file `hold`."""
    digits = (EXAMPLES / "digits.py").read_text()
    return {"checkpointing.py": checkpointing(tmp_path / "hold"), "digits.py": digits}


def started(containers, source, *names, start=lambda host: host.start()):
    hosts = containers.hosts(
        *names,
        source=source,
        target="checkpointing.py",
        args=["--every", "10"],
        section={"nproc_per_node": 2 // len(names), "checkpoint_dir": "checkpointing"},
    )
    hosts = hosts if isinstance(hosts, list) else [hosts]
    for host in hosts:
        start(host)
    return hosts


def ended(hosts, code):
    results = [host.end() for host in hosts]
    assert [each for each, _ in results] == [code] * len(hosts), results
    assert [host.failure for host in hosts] == [None] * len(hosts)
    return results[0][1]


def weights(output):
    return next(line.rpartition("weights ")[2] for line in output.splitlines() if ", weights " in line)


@pytest.mark.full
def test_an_interrupted_container_saves_and_the_next_one_ends_with_the_same_weights(
    containers, source, tmp_path
):
    uninterrupted = started(containers, source, "algo-1")
    expected = weights(ended(uninterrupted, 0))
    for host in uninterrupted:
        shutil.rmtree(host.root)

    (tmp_path / "hold").touch()
    taken = started(containers, source, "algo-1")
    taken[0].until("step 20")
    for host in taken:
        host.process.send_signal(signal.SIGTERM)
    assert "saved, and leaving" in ended(taken, 143)
    (tmp_path / "hold").unlink()

    # All that new containers find is what the platform has kept, and each of them all of it.
    for host in taken:
        shutil.copytree(host.root / "checkpoints", tmp_path / "kept", dirs_exist_ok=True)
        shutil.rmtree(host.root)
    for host in taken:
        shutil.copytree(tmp_path / "kept", host.root / "checkpoints")
    output = ended(started(containers, source, "algo-1"), 0)
    assert "has checkpoints of an earlier run: accelerator.resume() continues from there" in output
    assert weights(output) == expected
    assert "step 10:" not in output


@pytest.mark.full
def test_two_hosts_with_separate_folders_resume_from_the_checkpoint_of_the_first(
    containers, source, names_of_hosts, port, tmp_path
):
    def contain(host):
        return host.contain(names_of_hosts, port)

    uninterrupted = started(containers, source, "algo-1", "algo-2", start=contain)
    expected = weights(ended(uninterrupted, 0))
    for host in uninterrupted:
        shutil.rmtree(host.root)
    (tmp_path / "hold").touch()
    taken = started(containers, source, "algo-1", "algo-2", start=contain)
    taken[0].until("step 20")
    for host in taken:
        os.kill(host.first, signal.SIGTERM)
    assert "saved, and leaving" in ended(taken, 143)
    (tmp_path / "hold").unlink()
    assert not any((taken[1].root / "checkpoints").rglob("checkpoint.json"))

    # The platform puts together what is in all of them, and gives each new container all of it.
    for host in taken:
        shutil.copytree(host.root / "checkpoints", tmp_path / "kept", dirs_exist_ok=True)
        shutil.rmtree(host.root)
    for host in taken:
        shutil.copytree(tmp_path / "kept", host.root / "checkpoints")
    output = ended(started(containers, source, "algo-1", "algo-2", start=contain), 0)
    assert "accelerator.resume() continues from there" in output
    assert "step 10:" not in output
    assert weights(output) == expected
