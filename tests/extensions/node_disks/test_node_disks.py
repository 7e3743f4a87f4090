"""Saves go often to the disk of each node and seldom to the store, and a run resumes from the newest that all ranks can read.

A node is a directory of its own here: ranks that share a directory are on one node, whatever the launcher calls a node.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import shutil
import signal
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from support.processes.commands import call_accel
from support.runs.file_system import flip_bit
from support.runs.sharded_runs import build_accelerator, set_settings, to_full
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import ProjectConfiguration
from accel_runtime.collectives.handshake import Handshake
from accel_runtime.extensions.node_disks.node_disks import locate_project
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.utils import set_seed

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")

LAYOUTS = {
    "replicated": {},
    "sharded": {"dp_shard": "auto"},
    "sharded on each node": {"dp_replicate": 2, "dp_shard": 2},
}
KILLS = int(os.environ.get("NODE_DISK_KILLS", "6"))
EVERY_LAYOUT = ["replicated", "sharded", pytest.param("sharded on each node", marks=pytest.mark.full)]


class Training:
    """A run on some nodes, whose state has values that differ between ranks."""

    def __init__(self, folder, layout, *, nodes=2, resume=True, **options):
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.node_dir = folder / f"node-{rank * nodes // size}"
        project = ProjectConfiguration(
            project_dir=folder / "project",
            automatic_checkpoint_naming=True,
            **{"node_dir": self.node_dir, "store_every": 3} | options,
        )
        set_seed(3, device_specific=True)
        with set_settings({"resume": int(resume)}):
            self.accelerator = build_accelerator(LAYOUTS[layout], project_config=project)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(1)))
        loader = DataLoader(data, batch_size=24 // size, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.found, self.notes = None, []

    def resume(self):
        """Resume, and return the name of the checkpoint and its tier."""
        output = io.StringIO()
        with redirect_stderr(output):
            self.found = self.accelerator.resume()
        self.notes = output.getvalue().splitlines()
        if self.found is None:
            return None
        return self.found.number, "node" if self.node_dir in self.found.path.parents else "store"

    def train(self, steps, save_at=()):
        """Train to this number of steps, and return the losses and the keys of the saves at some of them."""
        losses, keys = [], []
        while True:
            for (inputs,) in self.loader:
                loss = self.model(inputs).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
                if self.optimizer.steps in save_at:
                    keys.append(self.accelerator.save_state())
                if self.optimizer.steps == steps:
                    return losses, keys

    def state(self):
        """Return the state of this rank, bit for bit."""
        weights = [to_full(tensor.detach()).tolist() for tensor in self.model.state_dict().values()]
        return weights, torch.get_rng_state().tolist()


def train_and_save(folder, layout, steps, saves, options=None):
    """Train with some saves; return the losses, the keys, and the state."""
    run = Training(folder, layout, **options or {})
    losses, keys = run.train(steps, saves)
    run.accelerator.wait_for_checkpoint()
    return losses, keys, run.state()


def resume_and_train(folder, layout, steps, options=None):
    """Resume; return what was found, the losses, the state, and the notes."""
    run = Training(folder, layout, **options or {})
    found = run.resume()
    losses, _ = run.train(steps)
    return found, losses, run.state(), run.notes


def list_names(folder):
    """Return the names of checkpoints on each node and in the store."""
    found = {}
    for path in sorted(folder.glob("node-*/project-*/*")):
        found.setdefault(path.parts[-3], []).append(path.name)
    return found, sorted(path.name for path in (folder / "project" / "checkpoints").glob("*"))


@pytest.fixture(scope="module")
def four(clusters):
    """Return a cluster of four ranks, which have imported what sharding needs."""
    return clusters[4]


@pytest.mark.smoke
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_a_run_resumes_from_the_nodes_bit_for_bit_and_from_the_store_if_a_node_is_lost(four, layout, memory):
    first = four.run(train_and_save, memory, layout, 8, (1, 2, 3, 4, 5))
    for rank, (_, keys, _) in enumerate(first):
        places = [Path(key).relative_to(memory).parts[0] for key in keys]
        node = f"node-{rank // 2}"
        assert places == [node, node, "project", node, node]
        assert [Path(key).name for key in keys] == [f"checkpoint_{number}" for number in range(5)]
    kept = ["checkpoint_3", "checkpoint_4"]
    assert list_names(memory) == ({"node-0": kept, "node-1": kept}, ["checkpoint_2"])
    sizes = [
        sum(path.stat().st_size for path in memory.glob(f"node-{node}/*/checkpoint_4/model*"))
        for node in (0, 1)
    ]
    full = sum(path.stat().st_size for path in memory.glob("project/checkpoints/*/model*"))
    assert all((size < 0.9 * full) == (layout == "sharded") for size in sizes), (sizes, full)

    def require_same(resumed, found, step):
        for (_, losses, state, _), (all_losses, _, end) in zip(resumed, first, strict=True):
            assert losses == all_losses[step:]
            assert state == end
        assert {each[0] for each in resumed} == {found}

    resumed = four.run(resume_and_train, memory, layout, 8)
    require_same(resumed, (4, "node"), 5)
    assert [len(notes) for *_, notes in resumed] == [1, 0, 0, 0]
    assert "checkpoint_4 (step 5), on the disks of the nodes" in resumed[0][3][0]

    shutil.rmtree(memory / "node-1")
    resumed = four.run(resume_and_train, memory, layout, 8)
    require_same(resumed, (2, "store"), 3)
    notes = resumed[0][3]
    assert "checkpoint_4 on the disks of the nodes is not used: missing on the node of rank 2, 3" in notes[0]
    assert "(step 3), in the project directory" in notes[-1]


def test_a_damaged_file_on_one_node_leads_to_the_checkpoint_before_with_the_reason(four, memory):
    first = four.run(train_and_save, memory, "sharded", 5, (1, 2))
    [damaged, *_] = sorted(memory.glob("node-1/*/checkpoint_1/model*"))
    flip_bit(damaged, -5)
    resumed = four.run(resume_and_train, memory, "sharded", 5)
    assert [(each[0], each[1]) for each in resumed] == [((0, "node"), each[0][1:]) for each in first]
    notes = resumed[0][3]
    assert f"checkpoint_1 is not used: {damaged} is damaged: model/" in notes[0]
    assert "checkpoint_0 (step 1), on the disks of the nodes" in notes[1]

    # A part whose size or manifest is wrong is left out before anything is read.
    damaged.write_bytes(b"")
    notes = four.run(resume_and_train, memory, "sharded", 5)[0][3]
    assert f"checkpoint_1 on the disks of the nodes is not used: {damaged} is damaged" in notes[0]


class EndsInCommit(FileSystem):
    """The file system of a node whose first process fails, or is killed, in a step of its commit."""

    def __init__(self, ranks, step, code=None, folder=None):
        self.ranks, self.step, self.code, self.folder = ranks, step, code, folder

    def put(self, path, data, size):
        if self.step == "manifest" and path.name == "checkpoint.json":
            self.end(path)
        if self.step == "files":
            self.end(path)
        super().put(path, data, size)

    def rename(self, source, target):
        if self.step == "rename" and ".removing" not in target.name:
            self.end(target)
        super().rename(source, target)
        if self.step == "renamed" and target.name == "checkpoint_1":
            self.end(target)

    def end(self, path):
        if int(os.environ["RANK"]) not in self.ranks:
            return
        deadline = time.monotonic() + 60
        while self.folder and not any(
            self.folder.glob("node-0/*/checkpoint_1")
        ):  # the other node has committed
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if self.code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.code, os.strerror(self.code), str(path))


def save_and_end_between_commits(folder, step):
    """Save twice, and kill the first process of the second node in its commit, after that of the first node."""
    run = Training(folder, "sharded")
    run.train(1, (1,))
    run.accelerator._checkpoints._store = FileStore(EndsInCommit([2], step, folder=folder))
    run.train(2, (2,))


def resume_and_save(folder):
    """Resume, and save on the nodes and in the store; return what was found, and the notes."""
    run = Training(folder, "sharded", store_every=2)
    found = run.resume()
    for _ in range(3):
        run.accelerator.save_state()
    run.accelerator.wait_for_everyone()
    return found, run.notes


@pytest.mark.smoke
def test_a_crash_between_the_commits_of_two_nodes_leaves_the_checkpoint_before(four, memory):
    assert four.run_until_killed(save_and_end_between_commits, memory, "manifest")
    on_nodes, _ = list_names(memory)
    assert on_nodes["node-0"] == ["checkpoint_0", "checkpoint_1"]
    assert [name.partition("-")[0] for name in on_nodes["node-1"]] == [".checkpoint_1.saving", "checkpoint_0"]
    resumed = four.run(resume_and_save, memory)
    assert {found for found, _ in resumed} == {(0, "node")}
    assert (
        "checkpoint_1 on the disks of the nodes is not used: missing on the node of rank 2, 3"
        in resumed[0][1][0]
    )
    # The number is not used again, what is on one node only is removed, and so are leftovers.
    kept = ["checkpoint_0", "checkpoint_3"]
    assert list_names(memory) == ({"node-0": kept, "node-1": kept}, ["checkpoint_2", "checkpoint_4"])


@pytest.mark.full
@pytest.mark.parametrize("step", ["rename", "renamed"])
def test_a_crash_at_the_rename_of_the_last_node_loses_nothing(four, memory, step):
    assert four.run_until_killed(save_and_end_between_commits, memory, step)
    assert {found for found, _ in four.run(resume_and_save, memory)} == {(1, "node")}


def save_until_killed(folder, layout, victim, delay):
    """Resume, and save after each step until a rank is killed; note the steps whose saves have returned on this rank."""
    run = Training(folder, layout, store_every=4)
    run.resume()
    rank = run.accelerator.process_index
    saved = max(map(int, (folder / f"saved-{rank}").read_text().split()), default=0)
    assert run.optimizer.steps >= saved, "a save that has returned is lost"
    state = [run.optimizer.steps, run.model.state_dict()["0.bias"].sum().item()]
    if layout == "replicated":
        assert run.accelerator.gather(torch.tensor(state)).view(-1, 2).unique(dim=0).shape[0] == 1
    first = run.optimizer.steps
    while True:
        if rank == victim and run.optimizer.steps == first + 1:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        step = run.optimizer.steps + 1
        run.train(step, (step,))
        with (folder / f"saved-{rank}").open("a") as log:
            log.write(f"{step}\n")


@pytest.mark.full
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_processes_that_are_killed_at_random_lose_no_save_that_has_returned(four, memory, layout):
    draw = random.Random(7)
    for rank in range(4):
        (memory / f"saved-{rank}").touch()
    for _ in range(KILLS):
        assert four.run_until_killed(
            save_until_killed, memory, layout, draw.randrange(4), draw.uniform(0, 0.3)
        )
    steps = [int(step) for step in (memory / "saved-0").read_text().split()]
    assert len(steps) > KILLS
    assert all(len(names) <= 3 for names in list_names(memory)[0].values()), "leftovers are removed"


def fail_to_save(folder, ranks, step):
    """Save; then fail in a step of some ranks, and save again."""
    run = Training(folder, "sharded", store_every=9)
    run.train(1, (1,))
    run.accelerator._checkpoints._store = FileStore(EndsInCommit(ranks, step, errno.EIO))
    with pytest.raises(CheckpointError) as raised:
        run.train(2, (2,))
    run.accelerator.wait_for_everyone()
    names = list_names(folder)
    run.accelerator._checkpoints._store = FileStore()
    run.accelerator.wait_for_everyone()
    run.accelerator.save_state()
    run.accelerator.wait_for_everyone()
    return str(raised.value), names, list_names(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), [(3, "files"), (2, "manifest"), (2, "rename")])
def test_a_failure_on_one_node_removes_the_checkpoint_on_all(four, memory, rank, step):
    results = four.run(fail_to_save, memory, [rank], step)
    assert len({text for text, *_ in results}) == 1
    assert results[0][0].startswith(f"rank {rank}: ")
    assert os.strerror(errno.EIO) in results[0][0]
    for _, failed, saved in results:
        assert failed == ({"node-0": ["checkpoint_0"], "node-1": ["checkpoint_0"]}, [])
        assert saved == ({node: ["checkpoint_0", "checkpoint_2"] for node in failed[0]}, [])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sharded", pytest.param("replicated", marks=pytest.mark.full)])
def test_another_world_size_resumes_from_the_store_unless_one_node_has_all(four, clusters, layout, memory):
    first = four.run(train_and_save, memory, layout, 8, (1, 2, 3, 4))
    resumed = clusters[2].run(resume_and_train, memory, layout, 8)
    assert {each[0] for each in resumed} == {(2, "store")}
    assert "checkpoint_3 is not used: rank 0: " in resumed[0][3][0]
    assert " does not have the state of " in resumed[0][3][0]
    assert resumed[0][1] != first[0][0][3:], "two ranks have dropout masks of their own"

    one = memory / "one"
    four.run(train_and_save, one, layout, 4, (1, 2, 3, 4), {"nodes": 1})
    resumed = clusters[2].run(resume_and_train, one, layout, 5, {"nodes": 1})
    assert {each[0] for each in resumed} == {(3, "node")}


def test_a_layout_whose_shards_are_on_the_other_node_resumes_from_the_store(four, memory):
    first = four.run(train_and_save, memory, "sharded", 5, (1, 2, 3, 4))
    resumed = four.run(resume_and_train, memory, "replicated", 5)
    assert {each[0] for each in resumed} == {(2, "store")}
    assert "does not have the shard of model/" in resumed[0][3][0]
    for (_, losses, *_), (expected, *_) in zip(resumed, first, strict=True):
        assert losses == pytest.approx(expected[3:], rel=1e-4)


def test_async_saves_go_to_both_and_resume_bit_for_bit(four, memory):
    first = four.run(train_and_save, memory, "sharded", 8, (1, 2, 3, 4, 5), {"async_save": True})
    resumed = four.run(resume_and_train, memory, "sharded", 8)
    assert [(each[0], *each[1:3]) for each in resumed] == [
        ((4, "node"), each[0][5:], each[2]) for each in first
    ]
    kept = ["checkpoint_3", "checkpoint_4"]
    assert list_names(memory) == ({"node-0": kept, "node-1": kept}, ["checkpoint_2"])


def save_when_preempted(folder):
    run = Training(folder, "replicated")
    _, keys = run.train(1, (1,))
    assert not run.accelerator.preempted([signal.SIGUSR1])
    if run.accelerator.process_index == 3:
        os.kill(os.getpid(), signal.SIGUSR1)
    run.accelerator.wait_for_everyone()
    assert run.accelerator.preempted([signal.SIGUSR1])
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return [*keys, run.accelerator.save_state()]


def test_a_run_that_is_preempted_saves_to_the_store(four, memory):
    for rank, keys in enumerate(four.run(save_when_preempted, memory)):
        assert [Path(key).relative_to(memory).parts[0] for key in keys] == [f"node-{rank // 2}", "project"]


def save_by_restarts(folder, starts):
    """Start several times, save twice each time, and return the tier of each save."""
    keys = []
    for _ in range(starts):
        run = Training(folder, "replicated", nodes=1, store_every=4)
        run.resume()
        keys += [run.accelerator.save_state(), run.accelerator.save_state()]
    return [Path(key).relative_to(folder).parts[0] for key in keys]


def test_the_saves_since_the_last_one_to_the_store_are_counted_over_restarts(four, memory):
    for places in four.run(save_by_restarts, memory, 4):
        assert places == [*["node-0"] * 3, "project"] * 2
    on_nodes, stored = list_names(memory)
    assert (on_nodes["node-0"], stored) == (
        ["checkpoint_5", "checkpoint_6"],
        ["checkpoint_3", "checkpoint_7"],
    )


def count_exchanges(folder, nodes):
    """Return the sizes of what this rank sends in the exchanges of a save to the nodes, and of one to the store."""
    run = Training(folder, "replicated", nodes=nodes, store_every=2)
    sizes, exchange = [], Handshake.exchange

    def record(self, call, size=0, *args, **options):
        sizes[-1].append(size)
        return exchange(self, call, size, *args, **options)

    Handshake.exchange = record
    try:
        for _ in range(2):
            sizes.append([])
            run.accelerator.save_state()
    finally:
        Handshake.exchange = exchange
    return sizes


def test_a_save_to_the_nodes_needs_the_exchanges_of_one_to_the_store_and_fewer_bytes(four, memory):
    for on_nodes, in_store in four.run(count_exchanges, memory, 2):
        assert len(on_nodes) == len(in_store)
        assert sum(on_nodes) < sum(in_store)


# Options, hooks and commands -----------------------------------------------------------------


def save_with_settings(folder, naming):
    """Save twice with `node_dir` and `store_every` of the profile; return the keys and the warnings."""
    rank = int(os.environ["RANK"])
    with set_settings({"node_dir": folder / f"node-{rank // 2}", "store_every": 2}):
        project = ProjectConfiguration(project_dir=folder / "project", automatic_checkpoint_naming=naming)
        accelerator = build_accelerator({}, project_config=project)
    accelerator.prepare(nn.Linear(2, 2))
    warnings, handler = [], logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("accel_runtime.checkpoint").addHandler(handler)
    try:
        keys = [accelerator.save_state(None if naming else folder / "named") for _ in range(2)]
    finally:
        logging.getLogger("accel_runtime.checkpoint").removeHandler(handler)
    described = accelerator.describe().options["node_dir"]
    return [Path(key).relative_to(folder).parts[0] for key in keys], warnings, described.origin


def test_the_profile_sets_the_disk_of_a_script_that_does_not(four, memory):
    for rank, (places, warnings, origin) in enumerate(four.run(save_with_settings, memory, True)):
        assert places == [f"node-{rank // 2}", "project"]
        assert (warnings, origin) == ([], "ACCEL_NODE_DIR")


def test_a_disk_of_the_profile_without_automatic_names_is_reported_once(four, memory):
    results = four.run(save_with_settings, memory, False)
    assert [places for places, *_ in results] == [["named", "named"]] * 4
    assert [len(warnings) for _, warnings, _ in results] == [1, 0, 0, 0]
    assert results[0][1][0].startswith("node_dir has no effect: the script names its checkpoints.")


def test_the_disk_of_the_script_replaces_that_of_the_profile(tmp_path):
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, node_dir=tmp_path / "own")
    with set_settings({"node_dir": tmp_path / "profile", "store_every": 7}):
        accelerator = build_accelerator({}, project_config=project)
    options = accelerator.describe().options
    assert (options["node_dir"].value, options["node_dir"].origin) == (str(tmp_path / "own"), "argument")
    assert (options["store_every"].value, options["store_every"].origin) == (7, "ACCEL_STORE_EVERY")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_dir": "x"}, "Set automatic_checkpoint_naming=True, or leave out node_dir"),
        ({"node_dir": "s3://b/x", "automatic_checkpoint_naming": True}, "Pass a local directory"),
        ({"store_every": 0}, "expected at least 1"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ProjectConfiguration(**options)


def test_projects_of_one_name_have_directories_of_their_own(tmp_path, monkeypatch):
    first, second = (
        locate_project("/local", tmp_path / "a" / "run"),
        locate_project("/local", tmp_path / "b" / "run"),
    )
    assert first != second
    assert first.parent == Path("/local")
    assert first.name.startswith("run-")
    monkeypatch.chdir(tmp_path / "..")
    assert locate_project("/local", f"{tmp_path.name}/a/run/") == first
    assert locate_project("/local", "s3://bucket/run") == locate_project("/local", "s3://bucket/run/")


def save_with_hook(folder, where):
    """Save with a hook that writes a note on each node or on the first rank, and load it with a hook."""
    run = Training(folder, "replicated")
    leads = run.accelerator.process_index in ((0, 2) if where == "each node" else (0,))
    run.accelerator.register_save_state_pre_hook(
        lambda _models, _weights, output_dir: leads and Path(output_dir, "note").write_text("kept")
    )
    run.train(1)
    error = notes = None
    try:
        run.accelerator.save_state()
    except CheckpointError as raised:
        error = str(raised)
    else:
        notes = []
        run.accelerator.register_load_state_pre_hook(
            lambda _models, input_dir: notes.append(Path(input_dir, "note").read_text())
        )
        assert run.resume() == (0, "node")
    run.accelerator.wait_for_everyone()
    return error, notes, list_names(folder)[0]


@pytest.mark.slow
def test_files_of_hooks_are_read_from_the_own_node_or_their_lack_is_an_error(four, memory):
    assert [each[:2] for each in four.run(save_with_hook, memory, "each node")] == [(None, ["kept"])] * 4
    shutil.rmtree(memory)
    errors = four.run(save_with_hook, memory, "first rank")
    assert len({text for text, *_ in errors}) == 1
    assert "a save hook wrote note on the node of rank 0, and not on that of rank 2" in errors[0][0]
    assert errors[0][2] == {}


def load_part(folder):
    """Load the newest checkpoint of the nodes by its path, on fewer ranks than saved it."""
    run = Training(folder, "sharded", nodes=1)
    [part] = folder.glob("node-0/*/checkpoint_0")
    before = run.state()
    with pytest.raises(CheckpointError) as raised:
        run.accelerator.load_state(part)
    assert run.state() == before
    return str(raised.value)


@pytest.mark.slow
def test_the_commands_name_the_part_of_a_node_and_export_no_incomplete_tensor(four, clusters, memory, capfd):
    four.run(train_and_save, memory, "sharded", 1, (1,))
    [part] = memory.glob("node-1/*/checkpoint_0")

    def call(*arguments):
        return call_accel(capfd, "checkpoint", *map(str, arguments))

    assert "complete (the part of one node: ranks 2, 3 of 4)" in call("list", part.parent).stdout
    assert " is complete (the part of one node: ranks 2, 3 of 4)" in call("verify", part).stdout
    assert "processes\t4 (the part of one node: ranks 2, 3 of 4)" in call("show", part).stdout
    refused = call("export", part, "-o", memory / "m.safetensors")
    assert refused.returncode == 2
    assert "it is the part of one node, and other nodes have the rest of model/" in refused.stderr
    text = clusters[2].run(load_part, memory)[0]
    assert text.startswith("Cannot load the part of one node: rank 0: ")
