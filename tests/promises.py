"""What accel promises, and for each promise the tests that prove it and a mutation that breaks it.

`tests/test_promises.py` checks that the tests run in `make test`, that the tests of the mutation are among them, and that every
guarantee of `docs/guarantees.md` has an entry. `make test-full` runs the mutations.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROMISES", "Promise"]


@dataclass(frozen=True)
class Promise:
    """A promise of the documentation."""

    name: str
    """For a guarantee of `docs/guarantees.md`, its bold title."""
    sentence: str
    tests: tuple[str, ...]
    """Node ids of test functions of `make test`."""
    mutation: str
    """The name of a mutation that breaks the promise; its tests are among those of the promise."""


GUARANTEES = (
    Promise(
        "Same samples, same order",
        "The order of an epoch is the order that the unprepared loader draws on one process.",
        (
            "tests/runtime/data/test_loader.py::test_the_order_equals_that_of_the_unprepared_loader_on_one_process",
            "tests/runtime/data/test_source_contract.py::test_the_order_is_that_of_the_unprepared_loader_on_one_process",
        ),
        "order of the unprepared loader",
    ),
    Promise(
        "End of an epoch",
        "A short last batch is padded from the start of the epoch; with even_batches=False, every sample counts once, also in "
        "gradients, and all processes take the same number of steps.",
        (
            "tests/runtime/test_exactness.py::test_padding_of_the_last_batch_is_counted",
            "tests/runtime/test_exactness.py::test_without_even_batches_only_ranks_without_samples_get_padding",
            "tests/runtime/data/test_batch_ownership.py::test_padding_of_even_batches_comes_from_the_start_of_the_epoch",
            "tests/runtime/data/test_batch_ownership.py::test_the_local_batches_of_a_step_form_the_global_batch",
        ),
        "padding count",
    ),
    Promise(
        "Exact evaluation",
        "gather_for_metrics returns every sample of the dataset once and in the dataset's order.",
        (
            "tests/runtime/test_exactness.py::test_every_sample_is_gathered_once_in_equally_many_steps_on_every_rank",
            "tests/runtime/data/test_loader.py::test_every_sample_is_gathered_once_and_in_order",
        ),
        "gather order",
    ),
    Promise(
        "Random augmentation",
        "In the workers of a loader, a dataset draws the same numbers for any number of processes and workers, and after a "
        "resume.",
        (
            "tests/runtime/data/test_augmentation.py::test_two_ranks_draw_the_same_numbers_for_a_batch_as_one",
            "tests/runtime/data/test_augmentation.py::test_a_resumed_run_draws_what_the_uninterrupted_run_draws",
            "tests/runtime/data/test_augmentation.py::test_a_resume_with_another_number_of_workers_draws_the_same_numbers",
        ),
        "seed of a batch",
    ),
    Promise(
        "Resume from any offset",
        "load_state_dict continues with the remaining samples, on any number of processes.",
        (
            "tests/runtime/data/test_resume.py::test_an_epoch_resumes_on_another_world_size",
            "tests/runtime/test_exactness.py::test_a_resumed_run_reads_the_rest_of_its_epoch_on_any_world_size",
        ),
        "position in the order of an epoch",
    ),
    Promise(
        "Batch size",
        "The batch size is that of one process; with split_batches=True it is the global batch size.",
        (
            "tests/runtime/data/test_loader.py::test_len_and_total_batch_size_are_equal_on_any_world_size",
            "tests/runtime/test_accelerator.py::test_training_with_split_batches_equals_a_plain_loop_on_one_process",
        ),
        "batch size of one process",
    ),
    Promise(
        "Global batch size",
        "With global_batch_size, each optimizer step has the samples, the loss and the gradients of one process, at any world size.",
        (
            "tests/runtime/data/test_global_batches.py::test_cycles_are_the_batches_of_one_process_in_as_few_equal_steps_as_possible",
            "tests/runtime/data/test_global_batches.py::test_weights_of_a_cycle_give_the_mean_over_its_samples",
            "tests/runtime/data/test_global_batches.py::test_a_run_that_continues_on_another_number_of_ranks_has_the_rest_of_the_same_cycles",
            "tests/runtime/data/test_global_batches.py::test_training_equals_one_process_after_changes_of_the_world_size",
        ),
        "divisor of a part of a global batch",
    ),
    Promise(
        "Learning rates",
        "Each call of a prepared scheduler advances it by the number of processes.",
        (
            "tests/runtime/training/test_scheduler.py::test_a_scheduler_advances_once_for_each_process",
            "tests/runtime/test_exactness.py::test_a_scheduler_follows_optimizer_steps_on_any_number_of_processes",
        ),
        "steps of a schedule in one step",
    ),
    Promise(
        "Weighted losses",
        "backward(loss, weight=n) computes the gradient of the mean over all items of all micro-batches on all processes.",
        (
            "tests/runtime/test_training_equality.py::test_training_equals_that_of_one_process_also_after_a_resume_within_a_cycle",
            "tests/runtime/test_weighted_losses.py::test_two_models_in_one_cycle_have_separate_weights",
        ),
        "weight of a loss",
    ),
    Promise(
        "Token-balanced batches",
        "With max_tokens, every sample is in one batch an epoch within the budget, all processes take the same number of steps, and "
        "gradients are the mean over all tokens of a step.",
        (
            "tests/runtime/data/test_token_batches.py::test_every_sample_is_in_one_batch_within_the_budget",
            "tests/runtime/data/test_token_batches.py::test_steps_have_each_sample_once_on_any_world_size_from_any_offset",
            "tests/runtime/data/test_token_batches.py::test_training_equals_one_process_with_the_mean_over_tokens",
            "tests/runtime/data/test_token_batches.py::test_a_training_resumes_on_another_world_size",
        ),
        "tokens of a batch",
    ),
    Promise(
        "Split sequences",
        "With parallel.cp or parallel.sp, losses and gradients equal those of one process, with masks, packed documents and heads that "
        "share keys.",
        (
            "tests/runtime/parallel/test_context_parallel.py::test_attention_equals_that_of_one_process_forward_and_backward",
            "tests/runtime/parallel/test_context_parallel.py::test_heads_can_share_keys",
            "tests/runtime/parallel/test_context_parallel.py::test_torch_layers_attend_to_full_sequences",
            "tests/runtime/parallel/test_context_parallel_of_transformers.py::test_packed_and_padded_documents_are_masked_as_in_one_process",
        ),
        "keys of exchanged heads",
    ),
    Promise(
        "Mixed precision",
        "Set no, bf16 or fp16 in the profile or in Accelerator(mixed_precision=...).",
        (
            "tests/runtime/test_accelerator.py::test_mixed_precision_comes_from_the_argument_or_else_from_the_environment",
            "tests/runtime/test_precision.py::test_a_model_computes_in_mixed_precision_and_returns_float32",
            "tests/integration/test_launch.py::test_the_effective_profile_reaches_the_runtime_in_every_process",
        ),
        "precision of an argument",
    ),
    Promise(
        "Quantized weights",
        "Frozen weights in 4 bits, integers or float8 train on several processes as on one, or prepare refuses them by name.",
        (
            "tests/runtime/parallel/test_quantized_tensors.py::test_frozen_tensors_of_every_dtype_keep_the_bits_of_the_first_rank",
            "tests/runtime/parallel/test_quantized_tensors.py::test_quantized_weights_in_any_storage_train_as_on_one_process",
            "tests/runtime/parallel/test_quantized_tensors.py::test_tensors_that_cannot_be_trained_are_refused_by_name_with_the_cure",
            "tests/runtime/parallel/test_quantized_tensors.py::test_scales_of_packed_weights_are_restored_from_checkpoints_and_exports_of_any_layout",
        ),
        "storage of quantized weights",
    ),
    Promise(
        "Safe checkpoints",
        "load_state verifies a checkpoint before it changes anything; a resumed run equals the uninterrupted run, bit for bit.",
        (
            "tests/runtime/storage/test_manifest.py::test_a_changed_inserted_or_missing_character_is_detected",
            "tests/runtime/storage/test_store_contract.py::test_damage_to_any_file_is_named_and_changes_nothing",
            "tests/runtime/test_training_equality.py::test_training_equals_that_of_one_process_also_after_a_resume_within_a_cycle",
        ),
        "manifest checksum",
    ),
    Promise(
        "Checked collectives",
        "If processes gather or reduce different things, all of them raise an error that lists the call and the line of each.",
        (
            "tests/runtime/collectives/test_handshake.py::test_a_mismatch_raises_on_all_ranks_with_their_calls_and_later_calls_work",
        ),
        "calls that do not match",
    ),
    Promise(
        "A summary in advance",
        "print(accelerator.describe()) shows what a run will do.",
        (
            "tests/runtime/accelerator/test_description.py::test_a_run_is_described_as_plain_data",
            "tests/runtime/accelerator/test_description.py::test_a_field_changes_when_the_run_changes",
        ),
        "samples of a described step",
    ),
    Promise(
        "Models read once a node",
        "In accelerator.loading(), the first process of each node reads a model, and all have its values after prepare; the memory of the "
        "node is at most that of the model and one tensor a process.",
        (
            "tests/runtime/parallel/test_node_loading.py::test_each_rank_gets_the_values_that_the_first_rank_of_the_node_has_read",
            "tests/runtime/parallel/test_node_loading.py::test_the_memory_of_a_node_is_that_of_the_model_and_a_tensor_a_rank",
            "tests/runtime/parallel/test_node_loading.py::test_weights_that_no_file_has_are_those_of_the_first_rank",
            "tests/runtime/parallel/test_node_loading.py::test_a_failure_inside_of_the_block_is_raised_on_all_ranks",
        ),
        "models on the ranks that do not read",
    ),
)
"""The guarantees of `docs/guarantees.md`, in its order."""

RUNTIME = (
    Promise(
        "One order",
        "Any number of processes reads the same global batches, and each takes its slice of them.",
        (
            "tests/runtime/data/test_loader.py::test_the_order_equals_that_of_the_unprepared_loader_on_one_process",
            "tests/runtime/test_exactness.py::test_batches_depend_only_on_the_global_batch_size",
        ),
        "slices in the order of ranks",
    ),
    Promise(
        "Same mathematics",
        "N processes give the gradients of one process on the same global batch, also with ragged tails.",
        (
            "tests/runtime/test_training_equality.py::test_training_equals_that_of_one_process_also_after_a_resume_within_a_cycle",
            "tests/runtime/test_training_equality.py::test_a_generated_training_equals_that_of_one_process",
        ),
        "gradient of a padded batch",
    ),
    Promise(
        "No silent variable of accel",
        "A misspelled variable of accel is refused, with the name that is probably meant.",
        (
            "tests/runtime/environment/test_settings.py::test_a_misspelled_variable_is_rejected_with_a_suggestion",
            "tests/runtime/environment/test_settings.py::test_an_invalid_value_is_an_error_with_the_variable_and_the_value",
        ),
        "misspelled variables",
    ),
    Promise(
        "No silent variable of Accelerate",
        "A variable of Accelerate for a feature that is not supported is refused with a message.",
        (
            "tests/runtime/environment/test_accelerate.py::test_an_unsupported_variable_is_rejected_with_the_variable_to_set_instead",
            "tests/runtime/environment/test_accelerate.py::test_a_variable_without_effect_is_reported",
        ),
        "variables of unsupported features",
    ),
    Promise(
        "No silent option",
        "An argument, a key or an option has its effect, or is refused with a message.",
        (
            "tests/cli/launchers/test_contract.py::test_an_unknown_key_is_an_error_that_names_it",
            "tests/runtime/accelerate/test_unchanged_scripts.py::test_an_argument_without_effect_is_rejected_by_name",
            "tests/integration/test_launch.py::test_invalid_input_is_one_message_with_exit_code_2",
        ),
        "unknown keys of a profile",
    ),
    Promise(
        "No silent hang",
        "If a process does not come to a collective, the error names it, its call and its line.",
        (
            "tests/integration/test_stalls.py::test_a_process_that_leaves_the_loop_early_fails_at_its_next_collective",
            "tests/integration/test_stalls.py::test_a_process_that_ends_early_is_named_by_the_waiting_ranks",
        ),
        "rank that ended early",
    ),
    Promise(
        "No healthy run ended",
        "A run that is paused, saves, computes, exports or finishes is not restarted, and a hang is.",
        (
            "tests/cli/runner/test_stalls.py::test_a_healthy_run_is_not_ended_whatever_it_does",
            "tests/cli/runner/test_stalls.py::test_a_healthy_run_is_not_ended_by_pauses",
            "tests/cli/runner/test_stalls.py::test_a_hang_is_reported_once_at_its_limit",
            "tests/integration/test_healthy_runs.py::test_a_run_that_was_frozen_and_continued_is_not_restarted",
        ),
        "evidence of a hang",
    ),
    Promise(
        "No lost work",
        "A checkpoint is complete or absent: a process that is killed while it saves loses nothing.",
        (
            "tests/runtime/checkpoint/test_faults.py::test_a_publication_that_is_interrupted_is_complete_or_absent",
            "tests/runtime/storage/test_directory.py::test_a_complete_checkpoint_that_a_crash_left_unrenamed_is_found_and_renamed_later",
            "tests/runtime/checkpoint/test_faults.py::test_a_save_with_a_fault_is_complete_or_absent",
        ),
        "save in place",
    ),
    Promise(
        "Checkpoints in object stores",
        "A checkpoint in an object store is complete or absent, whichever call fails, and every byte that is loaded is verified.",
        (
            "tests/extensions/object_stores/test_store_contract.py::test_a_save_with_a_fault_at_any_step_is_complete_or_absent",
            "tests/extensions/object_stores/test_object_store_kills.py::test_after_each_kill_every_checkpoint_verifies_and_the_newest_saved_one_is_there",
            "tests/runtime/checkpoint/test_remote_read.py::test_a_changed_byte_that_is_read_is_an_error_that_names_file_and_tensor",
        ),
        "commit in an object store whose answer was lost",
    ),
    Promise(
        "Interrupted saves",
        "A complete checkpoint that a crash left beside its name is found.",
        (
            "tests/runtime/storage/test_directory.py::test_a_complete_checkpoint_that_a_crash_left_unrenamed_is_found_and_renamed_later",
            "tests/runtime/storage/test_directory.py::test_after_a_crash_during_a_replacement_the_new_checkpoint_is_used",
        ),
        "checkpoint that a crash left beside its name",
    ),
    Promise(
        "Resume from the newest checkpoint",
        "With --resume, resume() continues from the newest complete checkpoint of the project.",
        (
            "tests/runtime/storage/test_directory.py::test_checkpoint_numbers_are_compared_numerically",
            "tests/runtime/checkpoint/test_resume_selection.py::test_a_requested_resume_selects_the_newest_checkpoint_of_any_run",
            "tests/runtime/checkpoint/test_corruption.py::test_load_state_without_a_path_loads_the_newest_complete_checkpoint_and_logs_the_damaged_one",
        ),
        "newest checkpoint",
    ),
    Promise(
        "Checkpoints on the disks of nodes",
        "resume() continues from the newest checkpoint that all nodes have; if a node is lost, from the newest in the project directory.",
        (
            "tests/extensions/node_disks/test_node_disks.py::test_a_run_resumes_from_the_nodes_bit_for_bit_and_from_the_store_if_a_node_is_lost",
            "tests/extensions/node_disks/test_node_disks.py::test_a_crash_between_the_commits_of_two_nodes_leaves_the_checkpoint_before",
        ),
        "part that a node does not have",
    ),
    Promise(
        "Restarts use their own checkpoints",
        "A restart never loads the checkpoints of another run in the project.",
        (
            "tests/runtime/checkpoint/test_resume_selection.py::test_a_restarted_run_selects_its_own_newest_checkpoint",
            "tests/runtime/checkpoint/test_resume_selection.py::test_only_a_requeued_slurm_job_selects_a_checkpoint_of_its_job",
        ),
        "checkpoints of other runs",
    ),
    Promise(
        "Unchanged scripts",
        "A script written for Accelerate whose import is changed trains the same way: after load_state, a script that skips "
        "batches continues with the same ones.",
        (
            "tests/runtime/checkpoint/test_exact_resume.py::test_scripts_that_skip_batches_after_load_state_continue_from_every_step",
            "tests/runtime/accelerate/test_unchanged_scripts.py::test_the_members_of_the_accelerator_can_be_read_and_assigned",
            "tests/runtime/test_differences.py::test_the_lists_have_every_difference_and_no_other",
        ),
        "order of an epoch that is begun again",
    ),
    Promise(
        "Thin",
        "A backward pass of accel does not wait for the device.",
        ("tests/runtime/test_weighted_losses.py::test_backward_does_not_synchronize_with_the_device",),
        "weight that stays on the device",
    ),
    Promise(
        "Replay",
        "A result of a forward or backward pass that differs when the pass is repeated is reported with its rank and module.",
        (
            "tests/runtime/checks/test_replay.py::test_a_result_that_differs_names_rank_device_host_and_module",
            "tests/runtime/checks/test_replay.py::test_nothing_is_reported_of_a_deterministic_model_and_its_training_stays_the_same",
        ),
        "replay that differs",
    ),
    Promise(
        "Save before preemption",
        "accelerator.preempted() returns True on all processes at the same step.",
        (
            "tests/runtime/test_preemption.py::test_all_ranks_notice_a_signal_to_one_rank_at_the_same_step",
            "tests/runtime/test_preemption.py::test_preempted_stays_true_after_the_inner_loop_ends",
        ),
        "signal to another rank",
    ),
)
"""Promises of `accel_runtime` beyond the guarantees."""

LAUNCHER = (
    Promise(
        "First difference of two runs",
        "accel diff names the first difference in the order in which a step computes.",
        (
            "tests/extensions/numerics/test_comparison.py::test_the_first_difference_is_named_whatever_differs_after_it",
        ),
        "first difference of two runs",
    ),
    Promise(
        "Certainty of a difference",
        "A setting is named as one that may explain a difference, and only if the number can depend on it.",
        (
            "tests/extensions/numerics/test_comparison.py::test_a_setting_explains_no_number_that_does_not_depend_on_it",
        ),
        "what a setting may explain",
    ),
    Promise(
        "Equal up to the order of sums",
        "Two runs are equal up to the order of sums if no number differs by more than the bound, which is printed.",
        (
            "tests/extensions/numerics/test_comparison.py::test_rounding_is_up_to_the_bound_and_what_is_larger_is_different",
        ),
        "bound of the order of sums",
    ),
    Promise(
        "Exit code",
        "The exit code of accel launch is the script's own, or 128 + n for signal n.",
        (
            "tests/integration/test_launch.py::test_the_exit_code_is_that_of_the_failed_rank_which_the_error_names",
            "tests/integration/test_launch.py::test_one_process_replaces_the_launcher_and_keeps_its_exit_code",
        ),
        "exit code",
    ),
    Promise(
        "First failure",
        "The output of a failed launch ends with the first real failure; of several failures the earliest is reported.",
        (
            "tests/cli/runner/test_failures.py::test_the_first_failure_is_the_earliest_of_those_nearest_to_the_root_cause",
            "tests/integration/test_failures.py::test_the_report_of_an_exception_while_other_ranks_are_in_a_collective",
        ),
        "first failure",
    ),
    Promise(
        "Signals",
        "A signal to accel launch reaches each process once, with time to save.",
        (
            "tests/integration/test_signals.py::test_a_terminating_signal_reaches_each_process_once_with_time_to_save",
            "tests/integration/test_signals.py::test_user_signals_reach_each_process_once",
        ),
        "signal forwarding",
    ),
    Promise(
        "Layers of a profile",
        "For every key, the strongest layer that sets it wins, and each value has a source.",
        (
            "tests/cli/profile/test_layers.py::test_a_higher_layer_overrides_single_keys_and_each_value_has_a_source",
            "tests/integration/test_launch.py::test_explain_prints_the_source_of_every_value",
        ),
        "profile layer order",
    ),
    Promise(
        "Dry run",
        "--dry-run prints what would happen, and runs nothing.",
        ("tests/integration/test_launch.py::test_a_dry_run_prints_the_plan_and_runs_nothing",),
        "launch that is only planned",
    ),
    Promise(
        "Invalid launches",
        "Invalid launches are rejected before anything starts, with exit code 2.",
        (
            "tests/cli/commands/test_target.py::test_a_target_that_cannot_run_is_an_error",
            "tests/integration/test_launch.py::test_invalid_input_is_one_message_with_exit_code_2",
        ),
        "target that cannot run",
    ),
    Promise(
        "Complete logs",
        "The complete output of every rank is kept, shown or not, in the order in which it was written.",
        (
            "tests/integration/test_output.py::test_the_log_of_a_rank_has_both_streams_in_the_order_of_the_writes",
            "tests/integration/test_output.py::test_the_selected_ranks_are_shown",
        ),
        "log of a shown rank",
    ),
    Promise(
        "Arguments of a script",
        "All arguments after the script are passed to it unchanged.",
        (
            "tests/integration/test_launch.py::test_unusual_arguments_of_several_processes_are_unchanged",
            "tests/integration/test_launch.py::test_arguments_that_are_not_utf_8_are_unchanged",
        ),
        "arguments of a script",
    ),
    Promise(
        "Variables of the user",
        "The launcher never overrides a variable that you have set.",
        ("tests/cli/launchers/test_plans.py::test_inherited_variables_are_not_overridden",),
        "variables of the user",
    ),
    Promise(
        "Restarts",
        "--max-restarts restarts all processes after one has failed, with a count that all machines share.",
        (
            "tests/cli/runner/test_rendezvous.py::test_nodes_use_one_restart_for_a_failure_that_several_of_them_report",
            "tests/integration/test_launch.py::test_a_restart_starts_all_processes_again",
        ),
        "restart count",
    ),
    Promise(
        "Self-check",
        "accel test fails on all ranks if one of its checks fails on any rank.",
        (
            "tests/runtime/test_selfcheck.py::test_a_check_that_fails_on_one_rank_fails_on_all_ranks",
            "tests/runtime/test_selfcheck.py::test_a_broken_backend_fails_the_self_check",
        ),
        "check that fails",
    ),
    Promise(
        "Check of the nodes",
        "accel test names a node that is not connected with the others, is slow or computes wrong, and blames no healthy one.",
        (
            "tests/extensions/node_check/test_node_check.py::test_a_node_that_reaches_no_other_is_the_only_bad_one",
            "tests/extensions/node_check/test_node_check.py::test_a_slow_node_is_found_though_its_partners_measured_slow_links_too",
            "tests/extensions/node_check/test_node_check.py::test_a_wrong_product_is_found",
        ),
        "pairs of nodes",
    ),
    Promise(
        "Preflight",
        "launcher.preflight leaves out a bad node if enough others remain, and otherwise fails the launch with its name.",
        (
            "tests/extensions/node_check/test_preflight.py::test_a_bad_node_is_left_out_if_enough_remain",
            "tests/extensions/node_check/test_launches.py::test_the_check_of_one_node_prints_one_line_and_keeps_its_facts",
        ),
        "nodes that remain",
    ),
    Promise(
        "Folders of torch",
        "accel checkpoint import reads what any number of processes wrote with torch.distributed.checkpoint, and runs no code in it.",
        (
            "tests/extensions/foreign_checkpoints/test_dcp.py::test_a_malicious_metadata_is_refused_and_runs_nothing",
            "tests/extensions/foreign_checkpoints/test_dcp.py::test_a_malicious_value_is_refused_and_runs_nothing",
            "tests/extensions/foreign_checkpoints/test_dcp.py::test_an_imported_checkpoint_is_loaded_bitwise_equal_on_any_ranks_and_training_continues",
        ),
        "classes in the metadata of a folder of torch",
    ),
    Promise(
        "Secrets",
        "Values that look like secrets are masked in the output and in the folder of a run.",
        ("tests/cli/test_masking.py::test_secrets_are_hidden_and_the_rest_is_shown",),
        "secrets in output",
    ),
    Promise(
        "Secrets in files",
        "A job sends no file with the name of credentials, a copy or an archive of one, nor a text file with a token.",
        (
            "tests/cli/launchers/test_secret_files.py::test_names_of_credentials_are_kept_back",
            "tests/cli/launchers/test_secret_files.py::test_a_file_with_a_token_is_not_sent_and_is_listed_with_the_reason",
            "tests/cli/launchers/test_source_files.py::test_an_ignore_file_cannot_send_secrets",
        ),
        "names of files with secrets",
    ),
    Promise(
        "Files of a job",
        "A job sends files that git tracks, and source and configuration; data are left out and listed with their size.",
        (
            "tests/cli/launchers/test_source_files.py::test_what_is_left_out_is_listed_with_its_size",
            "tests/cli/launchers/test_source_files.py::test_each_rule_overrides_the_one_before",
            "tests/cli/launchers/test_git.py::test_no_command_of_a_repositorys_configuration_is_run",
        ),
        "data that a job does not send",
    ),
)
"""Promises of `accel launch` and other commands."""

PROMISES = (*GUARANTEES, *RUNTIME, *LAUNCHER)
