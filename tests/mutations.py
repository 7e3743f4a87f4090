"""Break features on purpose, one at a time, in a copy of the repository, and check that `make test` notices each.

Run by `make test-full`; `python tests/mutations.py NAME ...` runs some of them. The tests of a mutation are named, so that
one takes seconds: they are tests of `make test` (of `make test-xla`, where the mutation needs torch_xla), have to pass
without the mutation, and have to fail with it. A mutation names a function and an operator of `tests/support/mutants.py`,
so that it survives changes elsewhere; one that no longer applies is an error with its name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.mutants import (
    NotApplicableError,
    Operator,
    drop_argument,
    drop_element,
    find_file,
    force_condition,
    mutate,
    normalize,
    replace_argument,
    replace_call,
    replace_name,
    return_value,
    reverse_update,
    set_value,
    skip_assignment,
    skip_call,
    skip_loop,
)

ROOT = Path(__file__).parent.parent
SELECTED = "not slow and not full"
"""What `make test` selects."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest. Others mean that no test has run: those count as neither."""


@dataclass(frozen=True)
class Mutation:
    """A change of one function that breaks a feature."""

    name: str
    target: str
    """The module and the definition to change: `accel_runtime.checkpoint.manifest:Manifest.parse`."""
    operator: Operator
    tests: tuple[str, ...]
    """Node ids of pytest; at least one of these tests fails with the mutation."""
    environment: str = ""
    """The folder of another virtual environment than that of this interpreter."""

    @property
    def python(self) -> str:
        """The interpreter that runs the tests."""
        return str(ROOT / self.environment / "bin" / "python") if self.environment else sys.executable

    def apply(self, root: Path) -> tuple[Path, str]:
        """Return the file to change below `root`, and its source with the mutation.

        Raises:
            NotApplicableError: The sources have changed; the message has the name of the mutation.
        """
        try:
            file = find_file(self.target, root)
            return file, mutate(file.read_text(encoding="utf-8"), self.target, self.operator)
        except NotApplicableError as error:
            raise NotApplicableError(
                f"Mutation {self.name!r} does not apply to {self.target}: {error}. Adapt it in tests/mutations.py."
            ) from None


MUTATIONS = (
    Mutation(
        "resume of a run after a lost node",
        "accel_cli.ray.plan:RayRun.build_command",
        force_condition("resume", False),
        ("tests/cli/ray/test_plan.py",),
    ),
    Mutation(
        "end of a launch on a host whose launcher is gone",
        "accel_cli.ssh.supervisor:HostSupervisor.serve",
        skip_call("_end_launch"),
        ("tests/cli/ssh/test_run.py::test_the_launch_of_every_host_ends_with_the_launcher",),
    ),
    Mutation(
        "host of the first failure",
        "accel_cli.ssh.run:_Run._report.get_order",
        replace_name("is_cause", "not it"),
        ("tests/cli/ssh/test_run.py::test_the_host_with_the_reason_gives_the_last_line_and_the_exit_code",),
    ),
    Mutation(
        "launcher of an option",
        "accel_cli.launchers:find_selected",
        force_condition("selects_launcher", False),
        ("tests/cli/ssh/test_config.py",),
    ),
    Mutation(
        "different models in one accumulation cycle",
        "accel_runtime.training.accumulation:Accumulation.record_models",
        set_value("is_mixed", "False"),
        ("tests/runtime/test_accumulation.py",),
    ),
    Mutation(
        "iterations of torchdata's loader",
        "accel_runtime.data.iterable:_StreamIterator",
        set_value("_finished", "True"),
        (
            "tests/runtime/data/test_streams.py::test_the_stateful_loader_of_torchdata_reads_every_epoch_and_continues",
        ),
    ),
    Mutation(
        "keys of a mapping",
        "accel_runtime.nested:_flatten_into",
        replace_call("keys", "data"),
        ("tests/runtime/utils/test_collective_functions.py",),
    ),
    Mutation(
        "clipping of parameters from before prepare",
        "accel_runtime.accelerator.prepare:ParameterMap.find_current",
        return_value("parameter"),
        ("tests/runtime/parallel/test_norms.py",),
    ),
    Mutation(
        "sharded after an evaluation",
        "accel_runtime.backends.fsdp:_reshard_after_evaluation",
        force_condition("is_grad_enabled", True),
        ("tests/runtime/parallel/test_gathering.py",),
    ),
    Mutation(
        "save_pretrained of shards",
        "accel_runtime.parallel.dtensor:_save_pretrained",
        force_condition("is_sharded_model", False),
        ("tests/runtime/parallel/test_gathering.py",),
    ),
    Mutation(
        "gather order",
        "accel_runtime.collectives.metrics:GatheredSteps.select_rows",
        replace_call("_row_indices", "it.flip(0)"),
        ("tests/runtime/test_exactness.py",),
    ),
    Mutation(
        "padding count",
        "accel_runtime.data.sharding:BatchSharding._split_count",
        replace_call("max", "count"),
        ("tests/runtime/data/test_batch_ownership.py",),
    ),
    Mutation(
        "model that averages once",
        "accel_runtime.training.accumulation:_Model.end_backward",
        set_value("averaging", "True"),
        ("tests/runtime/test_averaging_check.py",),
    ),
    Mutation(
        "batch of another rank",
        "accel_runtime.training.accumulation:FirstInput._compare",
        force_condition("fingerprint", False),
        ("tests/runtime/test_identical_batches.py",),
    ),
    Mutation(
        "variables of accel win",
        "accel_runtime.accelerate_env:translate",
        force_condition("overrides", False),
        ("tests/runtime/test_accelerate_env.py",),
    ),
    Mutation(
        "steps between two calls of a scheduler",
        "accel_runtime.scheduler:PreparedScheduler._warn_interval",
        set_value("_interval", "1"),
        ("tests/runtime/test_scheduler.py",),
    ),
    Mutation(
        "names of DDP in a loaded state",
        "accel_runtime.backends.ddp:ReplicatedModel.load_state_dict",
        skip_call("consume_prefix_in_state_dict_if_present"),
        ("tests/runtime/backends/test_ddp.py",),
    ),
    Mutation(
        "lines of own exchanges",
        "accel_runtime.collectives.handshake:all_gather_objects",
        drop_argument("call_at_site", "anywhere"),
        ("tests/runtime/data/test_loader.py::test_one_rank_can_read_a_loader_through_a_library",),
    ),
    Mutation(
        "rank beyond a save",
        "accel_runtime.heartbeat:ProgressCounts.is_beyond",
        replace_call("any", "False"),
        (
            "tests/runtime/backends/test_status.py::test_progress_counts_are_beyond_others_if_any_counter_is_larger",
        ),
    ),
    Mutation(
        "number of another run",
        "accel_runtime.checkpoint.directory:_check_alone",
        set_value("others", "[]"),
        ("tests/runtime/checkpoint/test_concurrency.py",),
    ),
    Mutation(
        "fields of newer versions",
        "accel_runtime.checkpoint.manifest:_select_fields",
        return_value("dict(values)"),
        ("tests/runtime/checkpoint/test_corruption.py",),
    ),
    Mutation(
        "resume offset",
        "accel_runtime.data.loader:PreparedLoader._begin_epoch",
        force_condition("position", False),
        ("tests/runtime/data/test_resume.py",),
    ),
    Mutation(
        "seed of a saved order",
        "accel_runtime.data.map_style:MapStyleSource.iterate",
        skip_assignment("seed"),
        ("tests/runtime/data/test_resume.py",),
    ),
    Mutation(
        "order of an epoch that is begun again",
        "accel_runtime.data.source:Source.restart",
        return_value("{}", instead_of="_EPOCH_KEYS"),
        ("tests/runtime/checkpoint/test_exact_resume.py",),
    ),
    Mutation(
        "random states of batches that are skipped",
        "accel_runtime.data.loader:PreparedLoader._iterate_batches.iterate",
        force_condition("replayed", True),
        ("tests/runtime/checkpoint/test_exact_resume.py",),
    ),
    Mutation(
        "objects that differ over the ranks",
        "accel_runtime.accelerator.prepare:check_consistent",
        force_condition("all", True),
        ("tests/runtime/accelerator/test_consistency.py",),
    ),
    Mutation(
        "manifest checksum",
        "accel_runtime.checkpoint.manifest:Manifest.parse",
        force_condition("checksum", False),
        (
            "tests/runtime/checkpoint/test_manifest.py",
            "tests/runtime/checkpoint/test_corruption.py",
        ),
    ),
    Mutation(
        "gradient of a padded batch",
        "accel_runtime.data.sharding:loss_scale",
        return_value("1.0"),
        (
            "tests/runtime/test_weighted_losses.py",
            "tests/runtime/data/test_batch_ownership.py",
        ),
    ),
    Mutation(
        "restart count",
        "accel_cli.runner.rendezvous:RestartBudget.use",
        force_condition("index", True),
        (
            "tests/cli/runner",
            "tests/integration/test_launch.py",
            "tests/integration/test_output.py",
        ),
    ),
    Mutation(
        "signal forwarding",
        "accel_cli.runner.shutdown:SignalHandlers._forward",
        replace_call("_get_running", "it[:1]"),
        (
            "tests/integration/test_signals.py",
            "tests/integration/test_launch.py",
        ),
    ),
    Mutation(
        "exit code",
        "accel_cli.runner.failures:Failure.code",
        return_value("1", instead_of="exitcode"),
        (
            "tests/cli/runner/test_failures.py",
            "tests/integration/test_failures.py",
            "tests/integration/test_launch.py",
        ),
    ),
    Mutation(
        "profile layer order",
        "accel_cli.profile.layers:resolve",
        reverse_update("values"),
        ("tests/cli/profile/test_layers.py",),
    ),
    Mutation(
        "fully_shard wrap",
        "accel_runtime.parallel.fully_shard:shard_model",
        skip_loop("units"),
        ("tests/runtime/parallel",),
    ),
    Mutation(
        "XLA step",
        "accel_runtime.backends.xla.host:build_step_hook.after_step",
        drop_element("last_count"),
        ("tests/runtime/backends/test_step_hook.py",),
    ),
    Mutation(
        "GPUs that ranks share",
        "accel_runtime.backends.distributed:check_gpus_differ",
        replace_argument("setdefault", 0, "(gpu, rank)"),
        ("tests/runtime/test_cuda_branches.py",),
    ),
    Mutation(
        "event of a copy",
        "accel_runtime.data.iteration:StreamCopies.take",
        skip_call("wait_event"),
        ("tests/runtime/data/test_prefetch.py",),
    ),
    Mutation(
        "position one batch ahead",
        "accel_runtime.data.iteration:prefetch_batches",
        replace_name("state", "ahead.state_dict()"),
        ("tests/runtime/data/test_prefetch.py",),
    ),
    Mutation(
        "XLA sync",
        "accel_runtime.backends.xla.backend:_execute_graph",
        skip_call("sync"),
        (
            "tests/xla/test_training.py",
            "tests/xla/test_watching.py",
        ),
        environment=".venv-xla",
    ),
    Mutation(
        "SageMaker argument",
        "accel_cli.sagemaker.request:build_job_spec",
        replace_name("args", "it[1:]"),
        (
            "tests/cli/sagemaker/test_config.py",
            "tests/cli/sagemaker/test_submit.py",
        ),
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
    try:
        file, mutated = mutation.apply(copy)
    except NotApplicableError as error:
        return str(error)
    source = file.read_text(encoding="utf-8")
    try:
        # Both sources have the same layout, so that the mutation is the only difference.
        file.write_text(normalize(source), encoding="utf-8")
        if (code := run_tests(mutation, copy)) != PASSED:
            return f"{mutation.name}: the tests end with {code} without the mutation. Repair them first."
        file.write_text(mutated, encoding="utf-8")
        code = run_tests(mutation, copy)
    finally:
        file.write_text(source, encoding="utf-8")
    if code != FAILED:
        return f"{mutation.name}: the tests end with {code} though {mutation.target} is broken. Add a test."
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
