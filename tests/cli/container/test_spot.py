"""Spot instances: a container that is taken away, and another one that goes on from its checkpoints."""

import shutil
import signal
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.slow


def source():
    return {name: (EXAMPLES / name).read_text() for name in ("checkpointing.py", "digits.py")}


def started(containers, names, port):
    hosts = containers.hosts(
        *names,
        source=source(),
        target="checkpointing.py",
        args=["--every", "10"],
        nproc_per_node=2 // len(names),
        checkpoint_dir="checkpointing",
    )
    hosts = hosts if isinstance(hosts, list) else [hosts]
    return [host.start(SM_MASTER_PORT=port) for host in hosts]


def ended(hosts, code):
    found = [host.end() for host in hosts]
    assert [each for each, _ in found] == [code] * len(hosts), found
    assert [host.failure for host in hosts] == [None] * len(hosts)
    return found[0][1]


def weights(said):
    return next(line.rpartition("weights ")[2] for line in said.splitlines() if ", weights " in line)


@pytest.mark.parametrize("names", [("algo-1",), ("127.0.0.1", "127.0.0.2")], ids=["one host", "two hosts"])
def test_containers_that_are_taken_away_save_and_the_next_ones_end_with_the_weights_of_a_run_in_one_go(
    containers, tmp_path, port, names
):
    whole = started(containers, names, port)
    wanted = weights(ended(whole, 0))
    for host in whole:
        shutil.rmtree(host.root)

    taken = started(containers, names, port)
    taken[0].until("step 20")
    for host in taken:
        host.process.send_signal(signal.SIGTERM)
    assert "saved, and leaving" in ended(taken, 143)

    # All that new containers find is what the platform has kept of all of them, each of them all of it.
    for host in taken:
        shutil.copytree(host.root / "checkpoints", tmp_path / "kept", dirs_exist_ok=True)
        shutil.rmtree(host.root)
    for host in taken:
        shutil.copytree(tmp_path / "kept", host.root / "checkpoints")
    said = ended(started(containers, names, port), 0)
    assert "holds what was saved before: accelerator.resume() goes on from there" in said
    assert weights(said) == wanted
    assert "step 10:" not in said
