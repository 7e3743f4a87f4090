"""Break features on purpose, one at a time, in a copy of the repository, and check that `make test` notices each.

Run by `make test-full`; `python tests/mutations.py NAME ...` runs some of them. The tests of a mutation are named, so that
one takes seconds: they are tests of `make test` (of `make test-xla`, where the mutation needs torch_xla), have to pass
without the mutation, and have to fail with it. A mutation names a function and an operator of `tests/support/sources/mutants.py`,
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

from support.sources.mutants import (
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
    """The module and the definition to change: `accel_runtime.storage.manifest:Manifest.parse`."""
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
        "divisor of a part of a global batch",
        "accel_runtime.foundation.epoch_progress:StepInfo.weigh_for",
        set_value("divisor", "sum(self.num_valid)"),
        (
            "tests/runtime/data/test_global_batches.py::test_weights_of_a_cycle_give_the_mean_over_its_samples",
        ),
    ),
    Mutation(
        "rest of a global batch after a resume",
        "accel_runtime.data.sharding:BatchSharding.split_samples",
        replace_argument("_split_cycles", 2, "0"),
        (
            "tests/runtime/data/test_global_batches.py::test_a_run_that_continues_on_another_number_of_ranks_has_the_rest_of_the_same_cycles",
        ),
    ),
    Mutation(
        "random states of the first rank on another number of ranks",
        "accel_runtime.backends.rng:derive_random_states",
        set_value("is_first", "False"),
        (
            "tests/runtime/checkpoint/test_random_state.py::test_derived_streams_are_equal_on_all_ranks_only_if_the_saved_ones_were",
        ),
    ),
    Mutation(
        "models on the ranks that do not read",
        "accel_runtime.parallel.node_loading:NodeLoading.load",
        set_value("is_reader", "True"),
        (
            "tests/runtime/parallel/test_node_loading.py::test_each_rank_gets_the_values_that_the_first_rank_of_the_node_has_read",
        ),
    ),
    Mutation(
        "full tensors that are kept after they are sent",
        "accel_runtime.parallel.node_loading:PendingValues.fill_shards",
        set_value("value", "self.values.get(key)"),
        (
            "tests/runtime/parallel/test_node_loading.py::test_the_memory_of_a_node_is_that_of_the_model_and_a_tensor_a_rank",
        ),
    ),
    Mutation(
        "random states of the rank that reads",
        "accel_runtime.parallel.node_loading:NodeLoading.load",
        set_value("alike", "[]"),
        (
            "tests/runtime/parallel/test_node_loading.py::test_weights_that_no_file_has_are_those_of_the_first_rank",
        ),
    ),
    Mutation(
        "replay that differs",
        "accel_runtime.checks.replay:_find_difference",
        return_value("None"),
        (
            "tests/runtime/checks/test_replay.py::test_a_result_that_differs_names_rank_device_host_and_module",
        ),
    ),
    Mutation(
        "first difference of two runs",
        "accel_cli.extensions.numerics.comparison:Comparison.effect",
        return_value("self.beyond or self.first if not self.points[1:] else None"),
        (
            "tests/extensions/numerics/test_comparison.py::test_the_first_difference_is_named_whatever_differs_after_it",
        ),
    ),
    Mutation(
        "what a setting may explain",
        "accel_cli.extensions.numerics.comparison:_can_explain",
        return_value("True"),
        (
            "tests/extensions/numerics/test_comparison.py::test_a_setting_explains_no_number_that_does_not_depend_on_it",
        ),
    ),
    Mutation(
        "bound of the order of sums",
        "accel_cli.extensions.numerics.bounds:Bound.computed",
        return_value("0.5"),
        (
            "tests/extensions/numerics/test_comparison.py::test_rounding_is_up_to_the_bound_and_what_is_larger_is_different",
        ),
    ),
    Mutation(
        "end of a run in progress sinks",
        "accel_cli.runs.sink_threads:ProgressSinks.close",
        skip_call("_end"),
        (
            "tests/cli/runs/test_progress_sinks_contract.py::test_a_sink_shows_the_progress_and_the_end_of_a_run",
            "tests/cli/runs/test_progress_sinks_contract.py::test_a_sink_is_called_from_one_thread_at_most_every_interval_and_closed_once",
        ),
    ),
    Mutation(
        "moment at which a rank has its gradients",
        "accel_runtime.observe.progress:StepParts.complete_gradients",
        skip_call("begin"),
        ("tests/runtime/observe/test_heartbeat.py::test_every_part_of_a_step_is_measured",),
    ),
    Mutation(
        "answer of a node whose ranks are missing in a collective",
        "accel_cli.runner.hang_report:HangExchange.answer",
        skip_call("_publish"),
        (
            "tests/cli/runner/test_hang_exchange.py::test_a_node_that_finds_a_hang_gets_the_records_of_nodes_that_answer",
        ),
    ),
    Mutation(
        "first step that a conversion changes",
        "accel_cli.extensions.migrate.verification:find_first_difference",
        skip_loop("enumerate"),
        (
            "tests/extensions/migrate/test_verification.py::test_steps_are_equal_only_with_equal_losses_and_weights",
        ),
    ),
    Mutation(
        "samples that both processes of a conversion consume",
        "accel_cli.extensions.migrate.verification:SampleComparison.is_repeated",
        return_value("False"),
        (
            "tests/extensions/migrate/test_verification.py::test_two_processes_that_consume_the_same_samples_are_not_equal_although_all_numbers_are",
        ),
    ),
    Mutation(
        "user's files that a verified script writes",
        "accel_cli.extensions.migrate.probe:Probe._protect",
        skip_call("_replace_links"),
        (
            "tests/extensions/migrate/test_verification.py::test_a_script_writes_to_copies_of_linked_files_and_not_into_the_folder_of_the_user",
        ),
    ),
    Mutation(
        "members that a launcher keeps for itself in a patch",
        "accel_cli.launchers.manifest:PatchRules.check",
        skip_loop("items"),
        (
            "tests/cli/launchers/test_manifest.py::test_what_a_launcher_sets_is_neither_changed_nor_removed_nor_replaced",
        ),
    ),
    Mutation(
        "pods without root",
        "accel_cli.extensions.kubernetes.fields:KubernetesSection.is_restricted",
        force_condition("pod_security", False),
        (
            "tests/extensions/kubernetes/test_manifests.py::test_pods_satisfy_the_standard_restricted_unless_the_profile_asks_for_more",
        ),
    ),
    Mutation(
        "secrets of a job by their names",
        "accel_cli.launchers.job_launcher:find_exposed_secret",
        force_condition("is_secret", False),
        ("tests/extensions/skypilot/test_skypilot.py::test_what_cannot_be_a_task_is_refused",),
    ),
    Mutation(
        "names of files with secrets",
        "accel_cli.launchers.secret_files:is_secret_name",
        return_value("False"),
        ("tests/cli/launchers/test_secret_files.py::test_names_of_credentials_are_kept_back",),
    ),
    Mutation(
        "files with secrets by their text",
        "accel_cli.launchers.secret_files:is_secret_file",
        force_condition("_PACKED", False),
        ("tests/cli/launchers/test_secret_files.py::test_a_file_whose_text_cannot_be_read_is_kept_back",),
    ),
    Mutation(
        "a repository that a job does not send",
        "accel_cli.launchers.source_files:_is_below",
        return_value("True"),
        ("tests/cli/launchers/test_source_files.py::test_an_ignore_file_cannot_send_a_repository",),
    ),
    Mutation(
        "data that a job does not send",
        "accel_cli.launchers.source_files:_find_left_out",
        force_condition("is_source_file", False),
        ("tests/cli/launchers/test_source_files.py::test_what_is_left_out_is_listed_with_its_size",),
    ),
    Mutation(
        "resume of a run after a lost node",
        "accel_cli.extensions.ray.plan:RayRun.build_command",
        force_condition("resume", False),
        (
            "tests/extensions/ray/test_plan.py::test_a_retry_resumes_and_nodes_of_one_machine_may_use_loopback",
        ),
    ),
    Mutation(
        "end of a launch whose connection is lost",
        "accel_cli.control:Control._follow",
        skip_call("_end"),
        ("tests/extensions/ssh/test_run.py::test_the_launch_of_every_host_ends_with_the_launcher",),
    ),
    Mutation(
        "host of the first failure",
        "accel_cli.launchers.node_launch:get_failure_order",
        replace_name("is_cause", "not it"),
        (
            "tests/extensions/ssh/test_run.py::test_the_host_with_the_reason_gives_the_last_line_and_the_exit_code",
        ),
    ),
    Mutation(
        "launcher of an option",
        "accel_cli.launchers:find_selected",
        force_condition("selects_launcher", False),
        ("tests/extensions/ssh/test_launcher.py::test_hosts_select_the_launcher_without_a_profile",),
    ),
    Mutation(
        "different models in one accumulation cycle",
        "accel_runtime.training.accumulation:Accumulation.record_models",
        set_value("is_mixed", "False"),
        ("tests/runtime/test_accumulation.py::test_accumulating_for_alternating_models_is_reported_once",),
    ),
    Mutation(
        "loop that begins before those around it continue",
        "accel_runtime.data.active_loops:ActiveLoops.find_depth",
        return_value("0"),
        ("tests/runtime/data/test_interrupted_programs.py::test_a_program_continues_from_every_save",),
    ),
    Mutation(
        "keys of exchanged heads",
        "accel_runtime.parallel.sharded_attention:_list_needed",
        return_value("[range(max(shared // parts, 1))] * parts"),
        ("tests/runtime/parallel/test_context_parallel.py::test_heads_can_share_keys",),
    ),
    Mutation(
        "gradients of a cycle on another world size",
        "accel_runtime.checkpoint.training_state:_average",
        return_value("dict(by_rank[0])"),
        (
            "tests/runtime/test_training_equality.py::test_training_equals_that_of_one_process_also_after_a_resume_within_a_cycle",
        ),
    ),
    Mutation(
        "several micro-batches of the last batch",
        "accel_runtime.data.epoch_ends:EpochEnds._count_calls_of_batch",
        set_value("is_same", "False"),
        ("tests/runtime/test_accumulation.py::test_a_cycle_ends_with_the_loop_that_accumulate_stands_in",),
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
        "accel_runtime.foundation.nested:_flatten_into",
        replace_call("keys", "data"),
        (
            "tests/runtime/utils/test_collective_functions.py::test_a_mapping_that_iterates_over_rows_is_gathered_by_its_keys",
        ),
    ),
    Mutation(
        "clipping of parameters from before prepare",
        "accel_runtime.parallel.fully_shard:ParameterMap.find_current",
        return_value("parameter"),
        ("tests/runtime/parallel/test_norms.py::test_parameters_listed_before_prepare_can_be_clipped",),
    ),
    Mutation(
        "sharded after an evaluation",
        "accel_runtime.parallel.fully_shard:_reshard_after_evaluation",
        force_condition("is_grad_enabled", True),
        (
            "tests/runtime/parallel/test_gathering.py::test_a_moving_average_of_an_evaluated_model_equals_that_of_one_process",
        ),
    ),
    Mutation(
        "save_pretrained of shards",
        "accel_runtime.parallel.dtensor:_save_pretrained",
        force_condition("is_sharded_model", False),
        (
            "tests/runtime/parallel/test_gathering.py::test_save_pretrained_of_a_sharded_model_needs_the_gathered_state_dict",
        ),
    ),
    Mutation(
        "gather order",
        "accel_runtime.data.metrics:GatheredSteps.select_rows",
        replace_call("_row_indices", "it.flip(0)"),
        (
            "tests/runtime/test_exactness.py::test_every_sample_is_gathered_once_in_equally_many_steps_on_every_rank",
        ),
    ),
    Mutation(
        "padding count",
        "accel_runtime.data.sharding:BatchSharding._split_count",
        replace_call("max", "count"),
        (
            "tests/runtime/data/test_batch_ownership.py::test_the_local_batches_of_a_step_form_the_global_batch",
        ),
    ),
    Mutation(
        "model that averages once",
        "accel_runtime.checks.averaging:_Model.end_backward",
        set_value("averaging", "True"),
        (
            "tests/runtime/checks/test_averaging.py::test_a_backward_pass_that_averages_nothing_is_reported_once_with_its_line",
        ),
    ),
    Mutation(
        "batch of another rank",
        "accel_runtime.checks.inputs:FirstInput._compare",
        force_condition("fingerprint", False),
        (
            "tests/runtime/checks/test_inputs.py::test_different_batches_and_prepared_loaders_are_not_reported",
        ),
    ),
    Mutation(
        "variables of accel win",
        "accel_runtime.environment.accelerate.variables:translate",
        force_condition("overrides", False),
        (
            "tests/runtime/environment/test_accelerate.py::test_variables_of_accel_take_precedence_and_the_unused_ones_are_reported",
        ),
    ),
    Mutation(
        "steps between two calls of a scheduler",
        "accel_runtime.training.scheduler:PreparedScheduler._warn_interval",
        set_value("_interval", "1"),
        (
            "tests/runtime/training/test_scheduler.py::test_a_scheduler_that_seems_to_count_epochs_is_reported_once",
        ),
    ),
    Mutation(
        "names of DDP in a loaded state",
        "accel_runtime.foundation.module_names:load_state_dict",
        replace_call("match_names", "{name: name for name in state}"),
        (
            "tests/runtime/parallel/test_ddp.py::test_a_state_dict_has_the_names_of_the_script_and_loads_those_of_ddp",
        ),
    ),
    Mutation(
        "lines of own exchanges",
        "accel_runtime.collectives.handshake:all_gather_objects",
        drop_argument("call_at_site", "anywhere"),
        ("tests/runtime/data/test_loader.py::test_one_rank_can_read_a_loader_through_a_library",),
    ),
    Mutation(
        "rank beyond a save",
        "accel_runtime.observe.progress:ProgressCounts.is_beyond",
        replace_call("any", "False"),
        (
            "tests/runtime/backends/test_status.py::test_progress_counts_are_beyond_others_if_any_counter_is_larger",
        ),
    ),
    Mutation(
        "number of another run",
        "accel_runtime.storage.directory:_check_alone",
        set_value("others", "[]"),
        (
            "tests/runtime/storage/test_store_contract.py::test_of_two_processes_that_take_a_new_key_at_any_step_of_each_other_at_most_one_gets_it",
        ),
    ),
    Mutation(
        "missing fields of a manifest",
        "accel_runtime.storage.schema:_is_required",
        return_value("False"),
        (
            "tests/runtime/storage/test_schema.py::test_a_changed_field_of_a_manifest_ends_in_an_error_of_accel",
        ),
    ),
    Mutation(
        "resume offset",
        "accel_runtime.data.loader:PreparedLoader._begin_epoch",
        force_condition("is_at_start", False),
        ("tests/runtime/data/test_resume.py::test_skip_first_batches_after_loading_a_state_skips_once",),
    ),
    Mutation(
        "seed of a saved order",
        "accel_runtime.data.map_style:MapStyleSource.iterate",
        skip_assignment("seed"),
        (
            "tests/runtime/data/test_resume.py::test_a_resumed_epoch_keeps_its_order_in_a_process_with_another_seed",
        ),
    ),
    Mutation(
        "order of an epoch that is begun again",
        "accel_runtime.data.state:_EpochState.restart",
        return_value("type(self)()"),
        (
            "tests/runtime/checkpoint/test_exact_resume.py::test_scripts_that_skip_batches_after_load_state_continue_from_every_step",
        ),
    ),
    Mutation(
        "random states of batches that are skipped",
        "accel_runtime.data.loader:PreparedLoader._iterate_batches.iterate",
        force_condition("num_replayed", True),
        (
            "tests/runtime/checkpoint/test_exact_resume.py::test_scripts_that_skip_batches_after_load_state_continue_from_every_step",
        ),
    ),
    Mutation(
        "objects that differ over the ranks",
        "accel_runtime.checks.consistency:check_consistent",
        force_condition("all", True),
        (
            "tests/runtime/checks/test_consistency.py::test_objects_that_differ_between_ranks_are_rejected_on_every_rank",
        ),
    ),
    Mutation(
        "manifest checksum",
        "accel_runtime.storage.manifest:Manifest.parse",
        force_condition("checksum", False),
        (
            "tests/runtime/storage/test_store_contract.py::test_damage_to_any_file_is_named_and_changes_nothing",
        ),
    ),
    Mutation(
        "gradient of a padded batch",
        "accel_runtime.foundation.epoch_progress:StepInfo.weigh_for",
        return_value("self"),
        (
            "tests/runtime/test_training_equality.py::test_training_equals_that_of_one_process_also_after_a_resume_within_a_cycle",
        ),
    ),
    Mutation(
        "restart count",
        "accel_cli.runner.rendezvous:RestartBudget.use",
        force_condition("index", True),
        (
            "tests/cli/runner/test_rendezvous.py::test_nodes_use_one_restart_for_a_failure_that_several_of_them_report",
        ),
    ),
    Mutation(
        "signal forwarding",
        "accel_cli.runner.shutdown:SignalHandlers._forward",
        replace_call("_get_running", "it[:1]"),
        ("tests/integration/test_signals.py::test_user_signals_reach_each_process_once",),
    ),
    Mutation(
        "evidence of a hang",
        "accel_cli.runner.hang_report:judge",
        return_value("Judgement()"),
        ("tests/cli/runner/test_stalls.py::test_a_healthy_run_is_not_ended_whatever_it_does",),
    ),
    Mutation(
        "signs of ranks that wait",
        "accel_cli.runner.hang_report:judge",
        set_value("waiting", "set()"),
        ("tests/cli/runner/test_stalls.py::test_a_hang_is_reported_once_at_its_limit",),
    ),
    Mutation(
        "exit code",
        "accel_cli.runner.failures:Failure.code",
        return_value("1", instead_of="exitcode"),
        (
            "tests/integration/test_launch.py::test_the_exit_code_is_that_of_the_failed_rank_which_the_error_names",
        ),
    ),
    Mutation(
        "profile layer order",
        "accel_cli.profile.layers:resolve",
        reverse_update("values"),
        (
            "tests/cli/profile/test_layers.py::test_a_higher_layer_overrides_single_keys_and_each_value_has_a_source",
        ),
    ),
    Mutation(
        "storage of quantized weights",
        "accel_runtime.backends.quantized_tensors:keeps_dtype",
        return_value("False"),
        (
            "tests/runtime/parallel/test_quantized_tensors.py::test_quantized_weights_in_any_storage_train_as_on_one_process",
        ),
    ),
    Mutation(
        "fully_shard wrap",
        "accel_runtime.parallel.fsdp_units:shard_model",
        skip_loop("units"),
        ("tests/runtime/parallel/test_description.py::test_parameters_are_described_by_gathered_group",),
    ),
    Mutation(
        "XLA step",
        "accel_runtime.extensions.xla.host:build_step_hook.after_step",
        drop_element("last_count"),
        (
            "tests/extensions/xla/test_step_hook.py::test_operations_are_executed_once_a_step_by_the_loader_or_the_optimizer",
        ),
    ),
    Mutation(
        "GPUs that ranks share",
        "accel_runtime.backends.distributed:check_gpus_differ",
        replace_argument("setdefault", 0, "(gpu, rank)"),
        (
            "tests/runtime/test_cuda_branches.py::test_ranks_that_share_a_gpu_over_nccl_are_named_in_the_error",
        ),
    ),
    Mutation(
        "event of a copy",
        "accel_runtime.backends.batch_copies:StreamCopies.take",
        skip_call("wait_event"),
        (
            "tests/runtime/data/test_prefetch.py::test_prefetching_does_not_change_batches_offsets_or_random_numbers",
        ),
    ),
    Mutation(
        "position one batch ahead",
        "accel_runtime.backends.batch_copies:prefetch_batches",
        replace_name("source_state", "ahead.state()"),
        (
            "tests/runtime/data/test_prefetch.py::test_prefetching_does_not_change_batches_offsets_or_random_numbers",
        ),
    ),
    Mutation(
        "XLA sync",
        "accel_runtime.extensions.xla.runtime:execute_graph",
        skip_call("sync"),
        (
            "tests/extensions/xla/device/test_training.py",
            "tests/extensions/xla/device/test_watching.py",
        ),
        environment=".venv-xla",
    ),
    Mutation(
        "SageMaker argument",
        "accel_cli.extensions.sagemaker.request:build_job_spec",
        replace_name("args", "it[1:]"),
        (
            "tests/extensions/sagemaker/test_launcher.py::test_the_plan_has_the_instances_and_the_command_of_a_host",
        ),
    ),
    Mutation(
        "order of the unprepared loader",
        "accel_runtime.data.map_style:EpochOrder.iterate_steps",
        set_value("drawn", "reversed(list(it))"),
        (
            "tests/runtime/data/test_loader.py::test_the_order_equals_that_of_the_unprepared_loader_on_one_process",
        ),
    ),
    Mutation(
        "slices in the order of ranks",
        "accel_runtime.data.map_style:EpochOrder._slices",
        replace_call("batch_slices", "it[::-1]"),
        (
            "tests/runtime/data/test_loader.py::test_the_order_equals_that_of_the_unprepared_loader_on_one_process",
        ),
    ),
    Mutation(
        "position in the order of an epoch",
        "accel_runtime.data.map_style:EpochOrder._iterate_batches",
        replace_argument("iterate_steps", 0, "0"),
        ("tests/runtime/data/test_resume.py::test_an_epoch_resumes_on_another_world_size",),
    ),
    Mutation(
        "seed of a batch",
        "accel_runtime.data.map_style:EpochOrder._build_seed",
        return_value("(start.batch_seed, batch, 0)"),
        ("tests/runtime/data/test_augmentation.py::test_two_ranks_draw_the_same_numbers_for_a_batch_as_one",),
    ),
    Mutation(
        "batch size of one process",
        "accel_runtime.data.sharding:BatchSharding.local_batch_size",
        force_condition("split", True),
        ("tests/runtime/data/test_loader.py::test_len_and_total_batch_size_are_equal_on_any_world_size",),
    ),
    Mutation(
        "steps of a schedule in one step",
        "accel_runtime.training.scheduler:PreparedScheduler.__init__",
        set_value("_strides", "1"),
        ("tests/runtime/training/test_scheduler.py::test_a_scheduler_advances_once_for_each_process",),
    ),
    Mutation(
        "weight of a loss",
        "accel_runtime.training.gradients:LossWeights.backward",
        replace_argument("run", 0, "torch.ones(())"),
        (
            "tests/runtime/test_training_equality.py::test_training_equals_that_of_one_process_also_after_a_resume_within_a_cycle",
        ),
    ),
    Mutation(
        "tokens of a batch",
        "accel_runtime.data.active_loops:ActiveLoops.find_weight",
        return_value("None"),
        (
            "tests/runtime/data/test_token_batches.py::test_training_equals_one_process_with_the_mean_over_tokens",
        ),
    ),
    Mutation(
        "cost of a batch of tokens",
        "accel_runtime.data.token_batches:_cut",
        replace_argument("min", 0, "1 + bound // longest_first[begin]"),
        ("tests/runtime/data/test_token_batches.py::test_every_sample_is_in_one_batch_within_the_budget",),
    ),
    Mutation(
        "weight that stays on the device",
        "accel_runtime.training.gradients:LossWeight.build",
        force_condition("type", False),
        ("tests/runtime/test_weighted_losses.py::test_backward_does_not_synchronize_with_the_device",),
    ),
    Mutation(
        "precision of an argument",
        "accel_runtime.accelerator.options:RunOptions.__init__",
        set_value("precision", "None"),
        (
            "tests/runtime/test_accelerator.py::test_mixed_precision_comes_from_the_argument_or_else_from_the_environment",
        ),
    ),
    Mutation(
        "calls that do not match",
        "accel_runtime.collectives.handshake:Handshake._check",
        set_value("matches", "True"),
        (
            "tests/runtime/collectives/test_handshake.py::test_a_mismatch_raises_on_all_ranks_with_their_calls_and_later_calls_work",
        ),
    ),
    Mutation(
        "rank that ended early",
        "accel_runtime.collectives.handshake:Handshake._fail",
        force_condition("stall", False),
        (
            "tests/integration/test_stalls.py::test_a_process_that_leaves_the_loop_early_fails_at_its_next_collective",
        ),
    ),
    Mutation(
        "samples of a described step",
        "accel_runtime.accelerator.description:loader_facts",
        replace_name("accumulation_steps", "1"),
        ("tests/runtime/accelerator/test_description.py::test_a_run_is_described_as_plain_data",),
    ),
    Mutation(
        "variables of unsupported features",
        "accel_runtime.environment.accelerate.variables:translate",
        force_condition("is_on", False),
        (
            "tests/runtime/environment/test_accelerate.py::test_an_unsupported_variable_is_rejected_with_the_variable_to_set_instead",
        ),
    ),
    Mutation(
        "misspelled variables",
        "accel_runtime.environment.settings:_refuse_near_misses",
        skip_loop("environ"),
        (
            "tests/runtime/environment/test_settings.py::test_a_misspelled_variable_is_rejected_with_a_suggestion",
        ),
    ),
    Mutation(
        "unknown keys of a profile",
        "accel_cli.launchers.sections:Section",
        replace_argument("ConfigDict", "extra", "'ignore'"),
        ("tests/cli/launchers/test_contract.py::test_an_unknown_key_is_an_error_that_names_it",),
    ),
    Mutation(
        "newest checkpoint",
        "accel_runtime.storage.store:_list_numbers",
        drop_argument("sorted", "key"),
        ("tests/runtime/storage/test_directory.py::test_checkpoint_numbers_are_compared_numerically",),
    ),
    Mutation(
        "checkpoint that a crash left beside its name",
        "accel_runtime.storage.file_store:_open_complete",
        set_value("complete", "[]"),
        (
            "tests/runtime/storage/test_directory.py::test_a_complete_checkpoint_that_a_crash_left_unrenamed_is_found_and_renamed_later",
        ),
    ),
    Mutation(
        "save in place",
        "accel_runtime.storage.directory:create_scratch",
        set_value("scratch", "target"),
        (
            "tests/runtime/checkpoint/test_faults.py::test_a_publication_that_is_interrupted_is_complete_or_absent",
        ),
    ),
    Mutation(
        "classes in the metadata of a folder of torch",
        "accel_runtime.extensions.foreign_checkpoints.dcp_folder:_MetadataUnpickler.find_class",
        return_value("super().find_class(module, name)"),
        (
            "tests/extensions/foreign_checkpoints/test_dcp.py::test_a_malicious_metadata_is_refused_and_runs_nothing",
        ),
    ),
    Mutation(
        "groups of a flattened optimizer",
        "accel_runtime.checkpoint.load:_regroup",
        return_value("list(saved)"),
        (
            "tests/extensions/foreign_checkpoints/test_dcp.py::test_flattened_options_fit_any_groups_with_equal_options",
        ),
    ),
    Mutation(
        "accumulation cycle that an imported checkpoint does not have",
        "accel_runtime.checkpoint.training_state:AccumulationItem.reset",
        skip_call("apply"),
        (
            "tests/extensions/foreign_checkpoints/test_dcp.py::test_gradients_of_an_unfinished_cycle_are_dropped_when_an_imported_checkpoint_is_loaded",
        ),
    ),
    Mutation(
        "checksums of an export for torch",
        "accel_runtime.extensions.foreign_checkpoints.dcp_export:_read_pieces",
        skip_loop("blocks"),
        ("tests/extensions/foreign_checkpoints/test_dcp.py::test_a_damaged_checkpoint_is_not_exported",),
    ),
    Mutation(
        "commit in an object store whose answer was lost",
        "accel_runtime.extensions.object_stores.drafts:ObjectDraft.commit",
        replace_call("find_save", "None"),
        (
            "tests/extensions/object_stores/test_store_contract.py::test_a_save_with_a_fault_at_any_step_is_complete_or_absent",
        ),
    ),
    Mutation(
        "checksums of what comes over a network",
        "accel_runtime.checkpoint.load:_verify",
        force_condition("is_equal", False),
        (
            "tests/runtime/checkpoint/test_remote_read.py::test_a_changed_byte_that_is_read_is_an_error_that_names_file_and_tensor",
        ),
    ),
    Mutation(
        "part that a node does not have",
        "accel_runtime.extensions.node_disks.node_disks:NodeDisks.find_candidates",
        replace_call("all", "True"),
        (
            "tests/extensions/node_disks/test_node_disks.py::test_a_crash_between_the_commits_of_two_nodes_leaves_the_checkpoint_before",
        ),
    ),
    Mutation(
        "checkpoints of other runs",
        "accel_runtime.checkpoint.project_checkpoints:RunOrigin.wrote",
        return_value("True"),
        (
            "tests/runtime/checkpoint/test_resume_selection.py::test_a_restarted_run_selects_its_own_newest_checkpoint",
        ),
    ),
    Mutation(
        "signal to another rank",
        "accel_runtime.accelerator.training_steps:Preemption._exchange",
        return_value("self._received"),
        ("tests/runtime/test_preemption.py::test_all_ranks_notice_a_signal_to_one_rank_at_the_same_step",),
    ),
    Mutation(
        "first failure",
        "accel_cli.runner.failures:find_root_failure.get_order",
        replace_name("time", "-it"),
        (
            "tests/cli/runner/test_failures.py::test_the_first_failure_is_the_earliest_of_those_nearest_to_the_root_cause",
        ),
    ),
    Mutation(
        "launch that is only planned",
        "accel_cli.commands.plan_view:show_plan",
        force_condition("dry_run", False, also="explain"),
        ("tests/integration/test_launch.py::test_a_dry_run_prints_the_plan_and_runs_nothing",),
    ),
    Mutation(
        "target that cannot run",
        "accel_cli.commands.target:check_target",
        return_value("None"),
        ("tests/cli/commands/test_target.py::test_a_target_that_cannot_run_is_an_error",),
    ),
    Mutation(
        "log of a shown rank",
        "accel_cli.runner.output:OutputChannel.copy",
        force_condition("_log", False),
        (
            "tests/integration/test_output.py::test_the_log_of_a_rank_has_both_streams_in_the_order_of_the_writes",
        ),
    ),
    Mutation(
        "arguments of a script",
        "accel_cli.launchers.launcher:build_rank_command",
        replace_name("args", "it[1:]"),
        ("tests/integration/test_launch.py::test_unusual_arguments_of_several_processes_are_unchanged",),
    ),
    Mutation(
        "variables of the user",
        "accel_cli.launchers.launcher:build_environment",
        replace_name("environ", "()"),
        ("tests/cli/launchers/test_plans.py::test_inherited_variables_are_not_overridden",),
    ),
    Mutation(
        "check that fails",
        "accel_runtime.selfcheck:main",
        set_value("passed", "True"),
        ("tests/runtime/test_selfcheck.py::test_a_check_that_fails_on_one_rank_fails_on_all_ranks",),
    ),
    Mutation(
        "pairs of nodes",
        "accel_runtime.extensions.node_check.verdict:find_broken_pairs",
        return_value("{}"),
        (
            "tests/extensions/node_check/test_node_check.py::test_a_node_that_reaches_no_other_is_the_only_bad_one",
        ),
    ),
    Mutation(
        "nodes that remain",
        "accel_cli.extensions.node_check.preflight:decide",
        return_value("Verdict({}, False)"),
        ("tests/extensions/node_check/test_preflight.py::test_a_bad_node_is_left_out_if_enough_remain",),
    ),
    Mutation(
        "secrets in output",
        "accel_cli.console:mask_secrets",
        return_value("value"),
        ("tests/cli/test_masking.py::test_secrets_are_hidden_and_the_rest_is_shown",),
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
