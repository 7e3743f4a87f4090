"""Break features on purpose, one at a time, in a copy of the repository, and check that `make test` notices each.

Run by `make test-full`; `python tests/mutations.py NAME ...` runs some of them. The tests of a mutation are named, so that
one takes seconds: they are tests of `make test` (of `make test-xla`, where the mutation needs torch_xla), have to pass
without the mutation, and have to fail with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SELECTED = "not slow and not full"
"""What `make test` selects."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest. Others mean that no test has run: those count as neither."""


@dataclass(frozen=True)
class Mutation:
    """A change of one line that breaks a feature."""

    name: str
    file: str
    before: str
    """Text that is in the file once."""
    after: str
    tests: tuple[str, ...]
    environment: str = ""
    """The folder of another virtual environment than that of this interpreter."""

    @property
    def python(self) -> str:
        """The interpreter that runs the tests."""
        return str(ROOT / self.environment / "bin" / "python") if self.environment else sys.executable


MUTATIONS = (
    Mutation(
        "resume of a run after a lost node",
        "accel_cli/ray/plan.py",
        '        nodes += ["--resume"] if resume else []',
        "        pass",
        ("tests/cli/ray/test_plan.py",),
    ),
    Mutation(
        "end of a launch on a host whose launcher is gone",
        "accel_cli/ssh/supervisor.py",
        "            self._end_launch()",
        "            pass",
        ("tests/cli/ssh/test_run.py::test_the_launch_of_every_host_ends_with_the_launcher",),
    ),
    Mutation(
        "host of the first failure",
        "accel_cli/ssh/run.py",
        "            return not is_cause, connection.ended_at or 0.0",
        "            return is_cause, connection.ended_at or 0.0",
        ("tests/cli/ssh/test_run.py::test_the_host_with_the_reason_gives_the_last_line_and_the_exit_code",),
    ),
    Mutation(
        "launcher of an option",
        "accel_cli/launchers/__init__.py",
        "        if option.selects_launcher and option.name in options:",
        "        if False:",
        ("tests/cli/ssh/test_config.py",),
    ),
    Mutation(
        "different models in one accumulation cycle",
        "accel_runtime/training/accumulation.py",
        "        is_mixed = self._count > 0 and bool(previous) and previous != self._models",
        "        is_mixed = False",
        ("tests/runtime/test_accumulation.py",),
    ),
    Mutation(
        "iterations of torchdata's loader",
        "accel_runtime/data/iterable.py",
        "    _finished = False",
        "    _finished = True",
        (
            "tests/runtime/data/test_streams.py::test_the_stateful_loader_of_torchdata_reads_every_epoch_and_continues",
        ),
    ),
    Mutation(
        "keys of a mapping",
        "accel_runtime/nested.py",
        "        structure.append(ContainerSpec(type(data).__name__, tuple(data.keys())))",
        "        structure.append(ContainerSpec(type(data).__name__, tuple(data)))",
        ("tests/runtime/utils/test_collective_functions.py",),
    ),
    Mutation(
        "clipping of parameters from before prepare",
        "accel_runtime/accelerator/prepare.py",
        "        return self._sharded.get(parameter, parameter)",
        "        return parameter",
        ("tests/runtime/parallel/test_norms.py",),
    ),
    Mutation(
        "sharded after an evaluation",
        "accel_runtime/backends/fsdp.py",
        "    if torch.is_grad_enabled() or is_gathered(model):",
        "    if True:",
        ("tests/runtime/parallel/test_gathering.py",),
    ),
    Mutation(
        "save_pretrained of shards",
        "accel_runtime/parallel/dtensor.py",
        "    if state_dict is None and is_sharded_model(module) and not is_gathered(module):",
        "    if False:",
        ("tests/runtime/parallel/test_gathering.py",),
    ),
    Mutation(
        "gather order",
        "accel_runtime/collectives/metrics.py",
        "        return joined.index_select(0, self._row_indices(per_sample).to(joined.device))",
        "        return joined.index_select(0, self._row_indices(per_sample).flip(0).to(joined.device))",
        ("tests/runtime/test_exactness.py",),
    ),
    Mutation(
        "padding count",
        "accel_runtime/data/sharding.py",
        "            return tuple(min(size, max(0, count - rank * size)) for rank in range(self.world_size))",
        "            return (min(size, count),) * self.world_size",
        ("tests/runtime/data/test_batch_ownership.py",),
    ),
    Mutation(
        "model that averages once",
        "accel_runtime/training/accumulation.py",
        "            self.passes.averaging = _version_of(self._first) == self._before",
        "            self.passes.averaging = True",
        ("tests/runtime/test_averaging_check.py",),
    ),
    Mutation(
        "batch of another rank",
        "accel_runtime/training/accumulation.py",
        "        if self._backend.get_store_key(key) != fingerprint:",
        "        if self._backend.get_store_key(key) is None:",
        ("tests/runtime/test_identical_batches.py",),
    ),
    Mutation(
        "variables of accel win",
        "accel_runtime/accelerate_env.py",
        "        if field in overrides:",
        "        if not field:",
        ("tests/runtime/test_accelerate_env.py",),
    ),
    Mutation(
        "steps between two calls of a scheduler",
        "accel_runtime/scheduler.py",
        "        self._interval = steps - before",
        "        self._interval = 1",
        ("tests/runtime/test_scheduler.py",),
    ),
    Mutation(
        "names of DDP in a loaded state",
        "accel_runtime/backends/ddp.py",
        "            consume_prefix_in_state_dict_if_present(state_dict, _PREFIX)",
        "            pass",
        ("tests/runtime/backends/test_ddp.py",),
    ),
    Mutation(
        "lines of own exchanges",
        "accel_runtime/collectives/handshake.py",
        "    call = call_at_site(operation, anywhere=not compare_lines)",
        "    call = call_at_site(operation)",
        ("tests/runtime/data/test_loader.py::test_one_rank_can_read_a_loader_through_a_library",),
    ),
    Mutation(
        "rank beyond a save",
        "accel_runtime/heartbeat.py",
        "        return any(own > others for own, others in zip(self, other, strict=True))",
        "        return False",
        (
            "tests/runtime/backends/test_status.py::test_progress_counts_are_beyond_others_if_any_counter_is_larger",
        ),
    ),
    Mutation(
        "number of another run",
        "accel_runtime/checkpoint/directory.py",
        "    others = [path for path in list_siblings(target) if path not in {scratch, _removal_path(path)}]",
        "    others: list[Path] = []",
        ("tests/runtime/checkpoint/test_concurrency.py",),
    ),
    Mutation(
        "fields of newer versions",
        "accel_runtime/checkpoint/manifest.py",
        "    return {name: value for name, value in values.items() if name in names}",
        "    return dict(values)",
        ("tests/runtime/checkpoint/test_corruption.py",),
    ),
    Mutation(
        "resume offset",
        "accel_runtime/data/loader.py",
        '        if start.get("position"):',
        "        if False:",
        ("tests/runtime/data/test_resume.py",),
    ),
    Mutation(
        "seed of a saved order",
        "accel_runtime/data/map_style.py",
        '        self._order.seed = start.get("seed", self._order.seed)',
        "        pass",
        ("tests/runtime/data/test_resume.py",),
    ),
    Mutation(
        "order of an epoch that is begun again",
        "accel_runtime/data/source.py",
        '        return {key: start[key] for key in _EPOCH_KEYS if key in start} | {"begun": True}',
        "        return {}",
        ("tests/runtime/checkpoint/test_exact_resume.py",),
    ),
    Mutation(
        "random states of batches that are skipped",
        "accel_runtime/data/loader.py",
        "    if not replayed:",
        "    if True:",
        ("tests/runtime/checkpoint/test_exact_resume.py",),
    ),
    Mutation(
        "objects that differ over the ranks",
        "accel_runtime/accelerator/prepare.py",
        "    if all(digest == gathered[0] for digest in gathered):",
        "    if gathered:",
        ("tests/runtime/accelerator/test_consistency.py",),
    ),
    Mutation(
        "manifest checksum",
        "accel_runtime/checkpoint/manifest.py",
        "        if checksum != expected:",
        "        if False:",
        ("tests/runtime/checkpoint/test_manifest.py", "tests/runtime/checkpoint/test_corruption.py"),
    ),
    Mutation(
        "gradient of a padded batch",
        "accel_runtime/data/sharding.py",
        "    return num_valid[rank] * len(num_valid) / sum(num_valid)",
        "    return 1.0",
        ("tests/runtime/test_weighted_losses.py", "tests/runtime/data/test_batch_ownership.py"),
    ),
    Mutation(
        "restart count",
        "accel_cli/runner/rendezvous.py",
        '        if index == 1:\n            self._add("spent", 1)',
        '        self._add("spent", 2)',
        ("tests/cli/runner", "tests/integration/test_launch.py", "tests/integration/test_output.py"),
    ),
    Mutation(
        "signal forwarding",
        "accel_cli/runner/shutdown.py",
        "        guard.send_signal(_get_running(self.workers), number)",
        "        guard.send_signal(_get_running(self.workers[:1]), number)",
        ("tests/integration/test_signals.py", "tests/integration/test_launch.py"),
    ),
    Mutation(
        "exit code",
        "accel_cli/runner/failures.py",
        "        return self.exitcode if self.exitcode >= 0 else 128 - self.exitcode",
        "        return 1",
        (
            "tests/cli/runner/test_failures.py",
            "tests/integration/test_failures.py",
            "tests/integration/test_launch.py",
        ),
    ),
    Mutation(
        "profile layer order",
        "accel_cli/profile/layers.py",
        "        values |= layer.values\n",
        "        values = dict(layer.values) | values\n",
        ("tests/cli/profile/test_layers.py",),
    ),
    Mutation(
        "fully_shard wrap",
        "accel_runtime/parallel/fully_shard.py",
        "        *((module, inner_policy) for _, module in units),",
        "",
        ("tests/runtime/parallel",),
    ),
    Mutation(
        "XLA step",
        "accel_runtime/backends/xla/host.py",
        "        if count in {0, last_count}:",
        "        if count == 0:",
        ("tests/runtime/backends/test_step_hook.py",),
    ),
    Mutation(
        "GPUs that ranks share",
        "accel_runtime/backends/distributed.py",
        "        ranks.setdefault(gpu, []).append(rank)",
        "        ranks.setdefault((gpu, rank), []).append(rank)",
        ("tests/runtime/test_cuda_branches.py",),
    ),
    Mutation(
        "event of a copy",
        "accel_runtime/data/iteration.py",
        "        current.wait_event(copied)\n",
        "",
        ("tests/runtime/data/test_prefetch.py",),
    ),
    Mutation(
        "position one batch ahead",
        "accel_runtime/data/iteration.py",
        "            epoch.step_info, epoch.state_at = current.step_info, _return_offset(current.state)",
        "            epoch.step_info, epoch.state_at = current.step_info, ahead.state_at",
        ("tests/runtime/data/test_prefetch.py",),
    ),
    Mutation(
        "XLA sync",
        "accel_runtime/backends/xla/backend.py",
        "        torch_xla.sync(wait=wait)",
        "        pass",
        ("tests/xla/test_training.py", "tests/xla/test_watching.py"),
        environment=".venv-xla",
    ),
    Mutation(
        "SageMaker argument",
        "accel_cli/sagemaker/request.py",
        '        "args": list(spec.args),',
        '        "args": list(spec.args[1:]),',
        ("tests/cli/sagemaker/test_config.py", "tests/cli/sagemaker/test_submit.py"),
    ),
)


def main(names: list[str]) -> int:
    """Run the mutations, all or those named; return the exit code."""
    unknown = set(names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        print(f"Unknown mutations: {', '.join(sorted(unknown))}.", file=sys.stderr)
        return 2
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    with tempfile.TemporaryDirectory(prefix="accel-mutations-") as folder:
        copy = Path(folder) / "accel"
        copy_repository(copy)
        problems = [problem for mutation in chosen if (problem := check(mutation, copy))]
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    print(f"{len(chosen) - len(problems)} of {len(chosen)} mutations are noticed by the tests")
    return 1 if problems else 0


def copy_repository(copy: Path) -> None:
    """Copy the working tree without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)


def check(mutation: Mutation, copy: Path) -> str | None:
    """Apply a mutation, run its tests, and take it back; return a sentence if it was not noticed."""
    file = copy / mutation.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutation.before) != 1:
        return f"{mutation.name}: the text to change is not once in {mutation.file}. Adapt the mutation."
    if (code := run_tests(mutation, copy)) != PASSED:
        return f"{mutation.name}: the tests end with {code} without the mutation. Repair them first."
    file.write_text(source.replace(mutation.before, mutation.after), encoding="utf-8")
    try:
        code = run_tests(mutation, copy)
    finally:
        file.write_text(source, encoding="utf-8")
    if code != FAILED:
        return f"{mutation.name}: the tests end with {code} though {mutation.file} is broken. Add a test."
    print(f"noticed: {mutation.name}", flush=True)
    return None


def run_tests(mutation: Mutation, copy: Path) -> int:
    """Run the tests of a mutation up to the first failure; return pytest's exit code."""
    options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-m", SELECTED]
    return subprocess.run(
        [mutation.python, "-m", "pytest", *options, *mutation.tests],
        cwd=copy,
        # Before the folder of the editable installation, which is the repository itself.
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
