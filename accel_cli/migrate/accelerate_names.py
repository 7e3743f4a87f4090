"""The names that accel has in the modules of Accelerate: `accel migrate` converts scripts that use no others.

`tests/cli/migrate/test_accelerate_names.py` compares them with `accel_runtime`, which the command does not import.
"""

from __future__ import annotations

from collections.abc import Mapping

from accel_runtime.environment.accelerate.package import PACKAGE_NAMES

__all__ = ["MEMBERS", "NAMES", "PARAMETERS"]

_TEXTS = {
    "accelerate": """
        Accelerator AutocastKwargs CheckpointError DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
        Description DistributedDataParallelKwargs DistributedType DynamoBackend FullyShardedDataParallelPlugin
        GeneralTracker GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs LocalSGD LoggerType MismatchError
        ParallelismConfig PartialState PrecisionType ProfileKwargs ProjectConfiguration RankLostError Settings
        StallError Topology TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelConfig __version__
        broadcast broadcast_object_list debug_launcher find_executable_batch_size gather gather_object get_logger
        init_empty_weights init_on_device is_rich_available notebook_launcher pad_across_processes reduce
        release_memory send_to_device set_seed skip_first_batches split_between_processes synchronize_rng_states
        tqdm
    """,
    "accelerate.accelerator": "Accelerator",
    "accelerate.big_modeling": "init_empty_weights init_on_device",
    "accelerate.data_loader": "DataLoaderDispatcher DataLoaderShard prepare_data_loader skip_first_batches",
    "accelerate.launchers": "debug_launcher notebook_launcher",
    "accelerate.local_sgd": "LocalSGD",
    "accelerate.logging": "MultiProcessAdapter get_logger",
    "accelerate.optimizer": "AcceleratedOptimizer",
    "accelerate.parallelism_config": "ParallelismConfig",
    "accelerate.scheduler": "AcceleratedScheduler",
    "accelerate.state": "AcceleratorState DistributedType GradientState PartialState is_initialized",
    "accelerate.tracking": """
        AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker LoggerType MLflowTracker
        SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker get_available_trackers on_main_process
        register_tracker_class
    """,
    "accelerate.utils": """
        Accelerator AutocastKwargs CheckpointError DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
        Description HfDeepSpeedConfig DistributedDataParallelKwargs DistributedType DummyOptim DummyScheduler DynamoBackend
        FullyShardedDataParallelPlugin GeneralTracker GradScalerKwargs GradientAccumulationPlugin
        InitProcessGroupKwargs KwargsHandler LocalSGD LoggerType MegatronLMDummyScheduler MismatchError
        ParallelismConfig PartialState PrecisionType PrepareForLaunch ProfileKwargs ProjectConfiguration
        RankLostError Settings StallError Topology TorchContextParallelConfig TorchDynamoPlugin
        TorchTensorParallelConfig broadcast broadcast_object_list clear_device_cache compile_regions concatenate
        convert_outputs_to_fp32 convert_to_fp32 debug_launcher extract_model_from_parallel find_batch_size
        find_executable_batch_size gather gather_object get_logger has_compiled_regions honor_type
        init_empty_weights init_on_device is_4bit_bnb_available is_8bit_bnb_available is_aim_available
        is_amdsmi_available is_bf16_available is_bitsandbytes_multi_backend_available is_bnb_available
        is_boto3_available is_clearml_available is_comet_ml_available is_compiled_module is_cuda_available
        is_datasets_available is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available
        is_habana_gaudi1 is_hpu_available is_import_timer_available is_lomo_available is_matplotlib_available
        is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available
        is_musa_available is_neuron_available is_npu_available is_numpy_available is_pandas_available
        is_peft_available is_peft_model is_pippy_available is_pynvml_available is_pytest_available is_rich_available
        is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available
        is_tensorboard_available is_timm_available is_torch_distributed_available is_torch_tensor
        is_torch_xla_available is_torchao_available is_torchdata_available
        is_torchdata_stateful_dataloader_available is_torchvision_available is_tqdm_available is_trackio_available
        is_transformer_engine_available is_transformer_engine_mxfp8_available is_transformers_available
        is_triton_available is_wandb_available is_weights_only_available is_xccl_available is_xpu_available listify
        load load_fsdp_model load_fsdp_optimizer merge_fsdp_weights notebook_launcher pad_across_processes
        patch_environment recursively_apply reduce release_memory save save_fsdp_model save_fsdp_optimizer
        send_to_device set_seed skip_first_batches split_between_processes synchronize_rng_state
        synchronize_rng_states tqdm wait_for_everyone write_basic_config
    """,
    "accelerate.utils.dataclasses": """
        AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin DistributedDataParallelKwargs
        DistributedType DynamoBackend FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
        InitProcessGroupKwargs KwargsHandler LoggerType PrecisionType ProfileKwargs ProjectConfiguration
        TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelConfig
    """,
    "accelerate.utils.deepspeed": "DummyOptim DummyScheduler HfDeepSpeedConfig",
    "accelerate.utils.environment": "patch_environment",
    "accelerate.utils.fsdp_utils": "load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer",
    "accelerate.utils.imports": """
        is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available is_bf16_available
        is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available is_clearml_available
        is_comet_ml_available is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available
        is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available is_import_timer_available
        is_lomo_available is_matplotlib_available is_megatron_lm_available is_mlflow_available is_mlu_available
        is_mps_available is_msamp_available is_musa_available is_neuron_available is_npu_available
        is_numpy_available is_pandas_available is_peft_available is_peft_model is_pippy_available
        is_pynvml_available is_pytest_available is_rich_available is_rocm_available is_sagemaker_available
        is_schedulefree_available is_sdaa_available is_swanlab_available is_tensorboard_available is_timm_available
        is_torch_distributed_available is_torch_xla_available is_torchao_available is_torchdata_available
        is_torchdata_stateful_dataloader_available is_torchvision_available is_tqdm_available is_trackio_available
        is_transformer_engine_available is_transformer_engine_mxfp8_available is_transformers_available
        is_triton_available is_wandb_available is_weights_only_available is_xccl_available is_xpu_available
    """,
    "accelerate.utils.launch": "PrepareForLaunch write_basic_config",
    "accelerate.utils.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    "accelerate.utils.operations": """
        broadcast broadcast_object_list concatenate convert_outputs_to_fp32 convert_to_fp32 find_batch_size gather
        gather_object honor_type is_torch_tensor listify pad_across_processes recursively_apply reduce
        send_to_device
    """,
    "accelerate.utils.other": """
        DummyOptim DummyScheduler MegatronLMDummyScheduler compile_regions extract_model_from_parallel
        has_compiled_regions is_compiled_module load save wait_for_everyone write_basic_config
    """,
    "accelerate.utils.random": "set_seed synchronize_rng_state synchronize_rng_states",
}
NAMES: Mapping[str, frozenset[str]] = {
    module: frozenset(_TEXTS.get(module, "").split()) | PACKAGE_NAMES.get(module, frozenset())
    for module in sorted({*_TEXTS, *PACKAGE_NAMES})
}
"""The names of each module of Accelerate that has one in accel of the same path, also those that accel takes from Accelerate."""
_MEMBERS = """
    _models _optimizers _schedulers accumulate autocast autocast_handler backward check_trigger checkpoints clear
    clip_grad_norm_ clip_grad_value_ context_parallel context_parallel_rank data_parallel_rank
    data_parallel_shard_rank data_parallel_size dataloader_config ddp_handler deepspeed_plugin describe device
    device_placement dispatch_batches distributed_type end_training even_batches free_memory gather
    gather_for_metrics gather_sequence gathered get_state_dict get_tracker gradient_accumulation_steps
    gradient_state init_handler init_trackers is_composable_parallelism_enabled is_fsdp2 is_last_process
    is_local_main_process is_main_process join_uneven_inputs load load_model load_state local_main_process_first
    local_process_index log log_with logging_dir main_process_first maybe_context_parallel mixed_precision
    multi_device native_amp no_sync non_blocking num_processes on_last_process on_local_main_process
    on_local_process on_main_process on_process optimizer_step_was_skipped pad_across_processes parallelism_config
    preempted prepare prepare_data_loader prepare_model prepare_optimizer prepare_scheduler print process_index
    profile profile_handler project_configuration project_dir reduce register_for_checkpointing
    register_load_state_pre_hook register_save_state_pre_hook resume rng_types save save_iteration save_model
    save_state scaler scaler_handler set_trigger settings should_save_model skip_first_batches split_batches
    split_between_processes state step step_scheduler_with_optimizer sync_gradients tensor_parallel_rank
    torch_device_mesh trackers trigger_sync_in_backward unscale_gradients unwrap_model use_distributed use_fp16
    use_seedable_sampler use_stateful_dataloader verify_device_map wait_for_checkpoint wait_for_everyone
"""
MEMBERS = frozenset(_MEMBERS.split())
"""The methods and attributes of the Accelerator, with the private ones that published scripts read."""
_PARAMETERS = """
    cpu dataloader_config deepspeed_plugin deepspeed_plugins device_placement dispatch_batches dynamo_backend
    dynamo_plugin fp16 fsdp_plugin gradient_accumulation_plugin gradient_accumulation_steps kwargs_handlers log_with mixed_precision
    parallelism_config project_config project_dir rng_types split_batches step_scheduler_with_optimizer throughput
"""
PARAMETERS = frozenset(_PARAMETERS.split())
"""The parameters of the Accelerator."""
