"""Names of Accelerate 1.15.0 that accel does not have, by subject, and parameters that differ; the reference and `accel migrate` list them.

`tests/runtime/test_differences.py` compares them with the public interface of both: the names of `accelerate`, of `accelerate.utils` and of
the modules that training scripts import from, with members of classes and parameters.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MISSING_MODULES", "MISSING_NAMES", "PARAMETERS", "MissingNames", "ParameterDifference"]


class MissingNames(NamedTuple):
    """Names of one subject."""

    subject: str
    """The subject, and what to use instead."""
    names: tuple[str, ...]
    """A name or module, `Class.member`, or a function with parameters: `f(a, b)`."""
    is_importable: bool = False
    """True if the names can be imported, and an object of them cannot be created."""


class ParameterDifference(NamedTuple):
    """A difference of parameters."""

    functions: tuple[str, ...]
    """Functions with these parameters: `f(a, b)`."""
    text: str
    """What they are in accel."""


MISSING_NAMES = (
    MissingNames(
        "Megatron-LM and pipeline parallelism",
        (
            "AbstractTrainStep",
            "Accelerator(megatron_lm_plugin)",
            "Accelerator.pipeline_parallel_rank",
            "AcceleratorState(deepspeed_plugin, megatron_lm_plugin)",
            "AcceleratorState.megatron_lm_plugin",
            "add_model_config_to_megatron_parser",
            "avg_losses_across_data_parallel_group",
            "BertTrainStep",
            "GPTTrainStep",
            "MegatronLMDummyDataLoader",
            "MegatronLMPlugin",
            "T5TrainStep",
        ),
    ),
    MissingNames(
        "The scheduler that Megatron-LM creates: the class can be imported, and constructing one is a "
        "`NotImplementedError` that names the replacement",
        ("MegatronLMDummyScheduler",),
        is_importable=True,
    ),
    MissingNames(
        "Internals of the integration of DeepSpeed, and its sequence parallelism; "
        "`accelerator.deepspeed_plugin.deepspeed_config` is the configuration, and the `Accelerator` itself lets "
        "`from_pretrained` shard models in stage 3",
        (
            "Accelerator.deepspeed_config",
            "Accelerator.deepspeed_engine_wrapped",
            "Accelerator.deepspeed_ulysses_dl_adapter",
            "compile_regions_deepspeed",
            "deepspeed_required",
            "DeepSpeedPlugin.dschf",
            "DeepSpeedPlugin.set_deepspeed_weakref",
            "DeepSpeedSequenceParallelConfig",
            "GatheredParameters",
        ),
    ),
    MissingNames(
        'Formats of 8 bits and less; use fp32, bf16 or fp16; `mixed_precision="fp8"` is a `ValueError`',
        (
            "Accelerator.ao_recipe_handler",
            "Accelerator.delayed_fp8_autocast",
            "Accelerator.fp8_backend",
            "Accelerator.fp8_enabled",
            "Accelerator.fp8_recipe_handler",
            "Accelerator.has_fp8_handler",
            "Accelerator.msamp_recipe_handler",
            "Accelerator.te_recipe_handler",
            "AORecipeKwargs",
            "apply_fp8_autowrap",
            "BnbQuantizationConfig",
            "check_cuda_fp8_capability",
            "contextual_fp8_autocast",
            "convert_model",
            "convert_model_to_fp8_ao",
            "filter_first_and_last_linear_layers",
            "FP8RecipeKwargs",
            "has_4bit_bnb_layers",
            "has_ao_layers",
            "has_transformer_engine_layers",
            "load_and_quantize_model",
            "MSAMPRecipeKwargs",
            "TERecipeKwargs",
            "torchao_required",
        ),
    ),
    MissingNames(
        "LOMO, which keeps no gradients; all other features need them",
        (
            "Accelerator.has_lomo_optimizer",
            "Accelerator.lomo_backward",
        ),
    ),
    MissingNames(
        "Steps of Accelerate's sharding, which `prepare` does; options are fields of the plugin",
        (
            "Accelerator(torch_tp_plugin)",
            "AcceleratorState(torch_tp_plugin)",
            "AcceleratorState.torch_tp_plugin",
            "compile_regions_fsdp2",
            "disable_fsdp_ram_efficient_loading",
            "enable_fsdp_ram_efficient_loading",
            "ensure_weights_retied",
            "fsdp2_apply_ac",
            "fsdp2_canonicalize_names",
            "fsdp2_load_full_state_dict",
            "fsdp2_prepare_model",
            "fsdp2_switch_optimizer_parameters",
            "FullyShardedDataParallelPlugin.set_auto_wrap_policy",
            "FullyShardedDataParallelPlugin.set_cpu_offload",
            "FullyShardedDataParallelPlugin.set_mixed_precision",
            "FullyShardedDataParallelPlugin.validate_cpu_offload",
            "FullyShardedDataParallelPlugin.validate_mixed_precision_policy",
            "get_fsdp2_grad_scaler",
            "get_model_tp_size",
            "model_has_dtensor",
            "TorchTensorParallelPlugin",
        ),
    ),
    MissingNames(
        "Sizes and meshes of a `ParallelismConfig`, which may be `auto` until the processes are connected; use "
        "`accelerator.torch_device_mesh`, `accelerator.data_parallel_size` and `accelerator.is_fsdp2`",
        (
            "AcceleratorState.device_mesh",
            "ParallelismConfig.active_mesh_dims",
            "ParallelismConfig.device_mesh",
            "ParallelismConfig.dp_cp_dim_names",
            "ParallelismConfig.dp_dim_names",
            "ParallelismConfig.dp_shard_cp_dim_names",
            "ParallelismConfig.fsdp_dim_names",
            "ParallelismConfig.get_device_mesh",
            "ParallelismConfig.non_dp_dim_names",
            "ParallelismConfig.to_json",
        ),
    ),
    MissingNames(
        "Names and helpers of Accelerate's checkpoints; accel's checkpoints have other files",
        (
            "accelerate.checkpointing",
            "MODEL_NAME",
            "OPTIMIZER_NAME",
            "PROFILE_PATTERN_NAME",
            "RNG_STATE_NAME",
            "SAFE_MODEL_NAME",
            "SAMPLER_NAME",
            "SCALER_NAME",
            "SCHEDULER_NAME",
        ),
    ),
    MissingNames(
        "Internals of Accelerate's launcher",
        (
            "install_xla",
            "prepare_deepspeed_cmd_env",
            "prepare_multi_gpu_env",
            "prepare_sagemager_args_inputs",
            "prepare_simple_launcher_cmd_env",
            "prepare_tpu",
            "TORCH_LAUNCH_PARAMS",
        ),
    ),
    MissingNames(
        "Internals of Accelerate's loaders; `prepare` shards every sampler and iterable dataset",
        (
            "DataLoaderAdapter",
            "DataLoaderStateMixin",
            "SkipDataLoader",
        ),
    ),
    MissingNames(
        "Other internals of Accelerate",
        (
            "do_nothing",
            "filter_trackers",
            "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
            "move_to_device",
            "patch_optimizer_step",
            "test_launch",
            "ThreadLocalSharedDict",
            "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
        ),
    ),
    MissingNames(
        "An old module path; use `utils.memory`",
        ("accelerate.memory_utils",),
    ),
    MissingNames(
        "Arguments that an `Accelerator` stores; `describe()` shows their effect",
        (
            "Accelerator.flag_tensor",
            "AcceleratorState.downcast_bfloat",
            "AcceleratorState.fork_launched",
            "DistributedDataParallelKwargs.register_comm_hook",
            "PartialState.debug",
            "PartialState.fork_launched",
            "ProjectConfiguration.set_directories",
        ),
    ),
    MissingNames(
        "Attributes of prepared loaders; `accelerator.gradient_state` has `end_of_dataloader` and `remainder`",
        (
            "DataLoaderDispatcher(dataset, split_batches, skip_batches, use_stateful_dataloader, slice_fn, torch_device_mesh, iteration, **kwargs)",
            "DataLoaderDispatcher.adjust_state_dict_for_prefetch",
            "DataLoaderDispatcher.base_dataloader",
            "DataLoaderDispatcher.begin",
            "DataLoaderDispatcher.dl_state_dict",
            "DataLoaderDispatcher.end_of_dataloader",
            "DataLoaderDispatcher.get_sampler",
            "DataLoaderDispatcher.gradient_state",
            "DataLoaderDispatcher.iteration",
            "DataLoaderDispatcher.remainder",
            "DataLoaderDispatcher.reset",
            "DataLoaderDispatcher.set_sampler",
            "DataLoaderDispatcher.skip_batches",
            "DataLoaderDispatcher.slice_fn",
            "DataLoaderDispatcher.split_batches",
            "DataLoaderDispatcher.state",
            "DataLoaderDispatcher.submesh_dp",
            "DataLoaderDispatcher.submesh_fsdp",
            "DataLoaderDispatcher.submesh_tp",
            "DataLoaderDispatcher.torch_device_mesh",
            "DataLoaderDispatcher.use_stateful_dataloader",
            "DataLoaderShard(dataset, device, rng_types, synchronized_generator, skip_batches, use_stateful_dataloader, torch_device_mesh, iteration, **kwargs)",
            "DataLoaderShard.adjust_state_dict_for_prefetch",
            "DataLoaderShard.base_dataloader",
            "DataLoaderShard.begin",
            "DataLoaderShard.device",
            "DataLoaderShard.dl_state_dict",
            "DataLoaderShard.end_of_dataloader",
            "DataLoaderShard.get_sampler",
            "DataLoaderShard.gradient_state",
            "DataLoaderShard.iteration",
            "DataLoaderShard.remainder",
            "DataLoaderShard.reset",
            "DataLoaderShard.rng_types",
            "DataLoaderShard.set_sampler",
            "DataLoaderShard.skip_batches",
            "DataLoaderShard.synchronized_generator",
            "DataLoaderShard.use_stateful_dataloader",
        ),
    ),
    MissingNames(
        "Attributes of prepared optimizers, schedulers and other objects; use `accelerator.scaler` and "
        "`get_last_lr()`",
        (
            "AcceleratedOptimizer(device_placement, scaler)",
            "AcceleratedOptimizer.accelerator_state",
            "AcceleratedOptimizer.device_placement",
            "AcceleratedOptimizer.gradient_state",
            "AcceleratedOptimizer.scaler",
            "AcceleratedScheduler(step_with_optimizer, split_batches)",
            "AcceleratedScheduler.gradient_state",
            "AcceleratedScheduler.optimizers",
            "AcceleratedScheduler.print_lr",
            "AcceleratedScheduler.split_batches",
            "AcceleratedScheduler.step_with_optimizer",
            "LocalSGD.accelerator",
            "LocalSGD.local_sgd_steps",
            "LocalSGD.model",
            "LocalSGD.model_sync_obj",
            "MultiProcessAdapter(extra)",
        ),
    ),
    MissingNames(
        "Attributes of states; use `accelerator.state` and `accelerator.gradient_state`, which are read-only "
        "views of an `Accelerator`",
        (
            "AcceleratorState(dynamo_plugin, fsdp_plugin, parallelism_config, **kwargs)",
            "GradientState(gradient_accumulation_plugin)",
            "GradientState.active_dataloader",
            "GradientState.adjust_scheduler",
            "GradientState.dataloader_references",
            "GradientState.initialized",
            "GradientState.is_xla_gradients_synced",
            "GradientState.plugin_kwargs",
            "GradientState.sync_with_dataloader",
        ),
    ),
    MissingNames(
        "Constructor arguments of trackers",
        (
            "ClearMLTracker.user_provided_run_name",
            "TensorBoardTracker.logging_dir_param",
        ),
    ),
)
MISSING_MODULES = (
    "accelerate.commands",
    "accelerate.inference",
    "accelerate.test_utils",
    "accelerate.utils.ao",
    "accelerate.utils.bnb",
    "accelerate.utils.megatron_lm",
    "accelerate.utils.rich",
    "accelerate.utils.torch_xla",
    "accelerate.utils.transformer_engine",
    "accelerate.utils.tqdm",
)
"""Modules that do not exist, besides those that are names above."""
PARAMETERS = (
    ParameterDifference(
        (
            "Accelerator(deepspeed_plugin, deepspeed_plugins, rng_types, log_with, project_dir, project_config, gradient_accumulation_plugin, step_scheduler_with_optimizer, kwargs_handlers, dynamo_backend, dynamo_plugin, fsdp_plugin, parallelism_config)",
        ),
        "keyword arguments only",
    ),
    ParameterDifference(
        ("AcceleratorState.select_deepspeed_plugin(name)",),
        "required; in Accelerate, None is a `KeyError` in the call",
    ),
    ParameterDifference(
        (
            "Accelerator.save_state(**save_model_func_kwargs)",
            "Accelerator.load_state(**load_model_func_kwargs)",
        ),
        "`TypeError`; non-empty `load_kwargs` are a `ValueError`: a checkpoint is read in one way",
    ),
    ParameterDifference(
        ("Accelerator.prepare_data_loader(slice_fn_for_dispatch)",),
        "`TypeError`: dispatched batches are created for each process, and not sliced",
    ),
    ParameterDifference(
        (
            "Accelerator.on_main_process(function)",
            "Accelerator.on_local_main_process(function)",
            "PartialState.on_main_process(function)",
            "PartialState.on_local_main_process(function)",
        ),
        "required; in Accelerate, None fails in the call",
    ),
    ParameterDifference(
        ("AcceleratedOptimizer.zero_grad(set_to_none)",),
        "True, as in torch; in Accelerate, None, which means the same",
    ),
    ParameterDifference(
        ("DistributedDataParallelKwargs(bucket_cap_mb)",),
        "None, which means torch's default",
    ),
    ParameterDifference(
        ("GradientAccumulationPlugin(num_steps)",),
        "1; None means the same, and in Accelerate is an error later",
    ),
    ParameterDifference(
        ("InitProcessGroupKwargs(backend)",),
        "None, which selects the backend for the device; in Accelerate `nccl`, also on a CPU",
    ),
    ParameterDifference(
        ("TorchDynamoPlugin(backend, fullgraph, use_regional_compilation)",),
        "`no`, False and False; in Accelerate, None reads variables, which accel reads without a plugin",
    ),
    ParameterDifference(
        ("notebook_launcher(mixed_precision, use_port)",),
        "None: the value of the environment, and any free port. `rdzv_backend`, `rdzv_conf`, `rdzv_id`, "
        "`max_restarts`, `monitor_interval` and `log_line_prefix_template` are rejected unless they have their "
        'default: use `accel launch` instead. On one node, `rdzv_backend="c10d"` is accepted with any `rdzv_conf`'
        " and `rdzv_id`",
    ),
    ParameterDifference(
        ("load(**kwargs)",),
        "`weights_only` only; in Accelerate, all arguments of `torch.load`",
    ),
)
"""Parameters that cannot be passed as in Accelerate, or have another default."""
