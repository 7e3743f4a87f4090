"""Names of Accelerate 1.15 that scripts use have the same signature; see also `test_differences.py`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import accel_runtime
from accel_runtime import Accelerator, utils
from accel_runtime.accelerate.package import PACKAGE_NAMES
from accel_runtime.data_loader import DataLoaderShard
from accel_runtime.optimizer import AcceleratedOptimizer
from accel_runtime.scheduler import AcceleratedScheduler

# Accelerator -----------------------------------------------------------------------------

PROPERTIES = [
    "autocast_handler",
    "context_parallel_rank",
    "data_parallel_rank",
    "data_parallel_shard_rank",
    "ddp_handler",
    "dataloader_config",
    "deepspeed_plugin",
    "device",
    "device_placement",
    "dispatch_batches",
    "distributed_type",
    "even_batches",
    "gradient_accumulation_steps",
    "gradient_state",
    "init_handler",
    "is_composable_parallelism_enabled",
    "is_fsdp2",
    "is_last_process",
    "is_local_main_process",
    "is_main_process",
    "local_process_index",
    "log_with",
    "logging_dir",
    "mixed_precision",
    "multi_device",
    "native_amp",
    "non_blocking",
    "num_processes",
    "optimizer_step_was_skipped",
    "parallelism_config",
    "process_index",
    "profile_handler",
    "project_configuration",
    "project_dir",
    "rng_types",
    "save_iteration",
    "scaler",
    "scaler_handler",
    "should_save_model",
    "split_batches",
    "state",
    "step",
    "step_scheduler_with_optimizer",
    "sync_gradients",
    "tensor_parallel_rank",
    "torch_device_mesh",
    "trackers",
    "use_distributed",
    "use_fp16",
    "use_seedable_sampler",
    "use_stateful_dataloader",
]
SETTABLE = [
    "autocast_handler",
    "dataloader_config",
    "ddp_handler",
    "even_batches",
    "gradient_accumulation_steps",
    "profile_handler",
    "step",
    "sync_gradients",
]
METHODS = {
    "accumulate": "*models",
    "autocast": "autocast_handler=None",
    "backward": "loss, **kwargs",
    "check_trigger": "",
    "clear": "*objects",
    "clip_grad_norm_": "parameters, max_norm, norm_type=2",
    "clip_grad_value_": "parameters, clip_value",
    "end_training": "",
    "free_memory": "*objects",
    "gather": "tensor",
    "gather_for_metrics": "input_data, use_gather_object=False",
    "get_state_dict": "model, unwrap=True",
    "get_tracker": "name, unwrap=False",
    "init_trackers": "project_name, config=None, init_kwargs={}",
    "join_uneven_inputs": "joinables, even_batches=None",
    "load_state": "input_dir=None, load_kwargs=None",
    "local_main_process_first": "",
    "log": "values, step=None, log_kwargs={}",
    "main_process_first": "",
    "maybe_context_parallel": "buffers=None, buffer_seq_dims=None, no_restore_buffers=None",
    "no_sync": "model",
    "on_last_process": "function",
    "on_local_main_process": "function=None",
    "on_local_process": "function=None, local_process_index=None",
    "on_main_process": "function=None",
    "on_process": "function=None, process_index=None",
    "pad_across_processes": "tensor, dim=0, pad_index=0, pad_first=False",
    "prepare": "*args, device_placement=None",
    "prepare_data_loader": "data_loader, device_placement=None, slice_fn_for_dispatch=None",
    "prepare_model": "model, device_placement=None, evaluation_mode=False",
    "prepare_optimizer": "optimizer, device_placement=None",
    "prepare_scheduler": "scheduler",
    "print": "*args, **kwargs",
    "profile": "profile_handler=None",
    "reduce": "tensor, reduction='sum', scale=1.0",
    "register_for_checkpointing": "*objects",
    "register_load_state_pre_hook": "hook",
    "register_save_state_pre_hook": "hook",
    "save": "obj, f, safe_serialization=False",
    "save_model": "model, save_directory, max_shard_size='10GB', safe_serialization=True",
    "save_state": "output_dir=None, safe_serialization=True",
    "set_trigger": "",
    "skip_first_batches": "dataloader, num_batches=0",
    "split_between_processes": "inputs, apply_padding=False",
    "trigger_sync_in_backward": "model",
    "unscale_gradients": "optimizer=None",
    "verify_device_map": "model",
    "unwrap_model": "model, keep_fp32_wrapper=True, keep_torch_compile=True",
    "wait_for_everyone": "",
}
CONSTRUCTOR = (
    "device_placement=True, split_batches=False, mixed_precision=None, gradient_accumulation_steps=1, cpu=False, "
    "dataloader_config=None, rng_types=None, log_with=None, project_dir=None, project_config=None, "
    "gradient_accumulation_plugin=None, step_scheduler_with_optimizer=True, kwargs_handlers=None, "
    "dynamo_backend=None, dynamo_plugin=None, fsdp_plugin=None, parallelism_config=None, deepspeed_plugin=None, "
    "deepspeed_plugins=None"
)
OUR_OWN = (
    "checkpoints context_parallel data_parallel_size describe forward_backward gather_sequence gathered load load_model"
    " preempted resume settings wait_for_checkpoint"
)
"""Members that Accelerate does not have."""
BY_POSITION = 6
"""Number of positional arguments of the constructor; in Accelerate, unsupported ones follow."""
EARLY = {"fp16": True, "dispatch_batches": True}
"""Supported arguments of early versions."""
OWN = {"throughput"}
"""Arguments that only accel has."""
REFUSED = "megatron_lm_plugin torch_tp_plugin"

# Functions, of `accelerate` or `accelerate.utils`, which both are in both places here -----

FUNCTIONS = {
    "broadcast": "tensor, from_process=0",
    "broadcast_object_list": "object_list, from_process=0",
    "clear_device_cache": "garbage_collection=False",
    "compile_regions": "module, **compile_kwargs",
    "concatenate": "data, dim=0",
    "convert_outputs_to_fp32": "model_forward",
    "convert_to_fp32": "tensor",
    "debug_launcher": "function, args=(), num_processes=2",
    "extract_model_from_parallel": "model, keep_fp32_wrapper=True, keep_torch_compile=True, recursive=False",
    "find_batch_size": "data",
    "find_executable_batch_size": "function=None, starting_batch_size=128, reduce_batch_size_fn=None",
    "gather": "tensor",
    "gather_object": "object",
    "has_compiled_regions": "module",
    "honor_type": "obj, generator",
    "init_empty_weights": "include_buffers=None",
    "init_on_device": "device, include_buffers=None",
    "is_4bit_bnb_available": "",
    "is_compiled_module": "module",
    "is_8bit_bnb_available": "",
    "is_aim_available": "",
    "is_amdsmi_available": "",
    "is_bf16_available": "ignore_tpu=False",
    "is_bitsandbytes_multi_backend_available": "",
    "is_bnb_available": "min_version=None",
    "is_boto3_available": "",
    "is_clearml_available": "",
    "is_comet_ml_available": "",
    "is_cuda_available": "",
    "is_datasets_available": "",
    "is_deepspeed_available": "",
    "is_dvclive_available": "",
    "is_fp16_available": "",
    "is_fp8_available": "",
    "is_habana_gaudi1": "",
    "is_hpu_available": "init_hccl=False",
    "is_import_timer_available": "",
    "is_lomo_available": "",
    "is_matplotlib_available": "",
    "is_megatron_lm_available": "",
    "is_mlflow_available": "",
    "is_mlu_available": "check_device=False",
    "is_mps_available": "min_version='1.12'",
    "is_msamp_available": "",
    "is_musa_available": "check_device=False",
    "is_neuron_available": "check_device=False",
    "is_npu_available": "check_device=False",
    "is_pandas_available": "",
    "is_peft_available": "",
    "is_peft_model": "model",
    "is_pippy_available": "",
    "is_pynvml_available": "",
    "is_pytest_available": "",
    "is_rich_available": "",
    "is_rocm_available": "",
    "is_sagemaker_available": "",
    "is_schedulefree_available": "",
    "is_sdaa_available": "check_device=False",
    "is_swanlab_available": "",
    "is_tensorboard_available": "",
    "is_timm_available": "",
    "is_torch_tensor": "tensor",
    "is_torch_xla_available": "check_is_tpu=False, check_is_gpu=False",
    "is_torchao_available": "",
    "is_torchdata_available": "",
    "is_torchdata_stateful_dataloader_available": "",
    "is_torchvision_available": "",
    "is_trackio_available": "",
    "is_transformer_engine_available": "",
    "is_transformer_engine_mxfp8_available": "",
    "is_transformers_available": "",
    "is_triton_available": "",
    "is_wandb_available": "",
    "is_weights_only_available": "",
    "is_xccl_available": "",
    "is_xpu_available": "check_device=False",
    "listify": "data",
    "load": "f, map_location=None, **kwargs",
    "load_fsdp_model": "fsdp_plugin, accelerator, model, input_dir, model_index=0, adapter_only=False, use_dcp=True",
    "load_fsdp_optimizer": "fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index=0, adapter_only=False, use_dcp=True",
    "LocalSGD": "accelerator, model, local_sgd_steps, enabled=True",
    "merge_fsdp_weights": "checkpoint_dir, output_path, safe_serialization=True, remove_checkpoint_dir=False",
    "notebook_launcher": "function, args=(), num_processes=None, mixed_precision='no', use_port='29500', "
    "master_addr='127.0.0.1', node_rank=0, num_nodes=1, rdzv_backend='static', rdzv_endpoint='', rdzv_conf=None, "
    "rdzv_id='none', max_restarts=0, monitor_interval=0.1, log_line_prefix_template=None",
    "pad_across_processes": "tensor, dim=0, pad_index=0, pad_first=False",
    "PartialState": "cpu=False, **kwargs",
    "patch_environment": "**kwargs",
    "PrepareForLaunch": "launcher, distributed_type='NO', debug=False",
    "recursively_apply": "func, data, *args, test_type=utils.is_torch_tensor, error_on_other_type=False, **kwargs",
    "reduce": "tensor, reduction='mean', scale=1.0",
    "release_memory": "*objects",
    "save": "obj, f, save_on_each_node=False, safe_serialization=False",
    "save_fsdp_model": "fsdp_plugin, accelerator, model, output_dir, model_index=0, adapter_only=False, use_dcp=True",
    "save_fsdp_optimizer": "fsdp_plugin, accelerator, optimizer, model, output_dir, optimizer_index=0, use_dcp=True",
    "send_to_device": "tensor, device, non_blocking=False, skip_keys=None",
    "set_seed": "seed, device_specific=False, deterministic=False",
    "skip_first_batches": "dataloader, num_batches=0",
    "synchronize_rng_state": "rng_type=None, generator=None",
    "synchronize_rng_states": "rng_types, generator=None",
    "tqdm": "*args, main_process_only=True, **kwargs",
    "wait_for_everyone": "",
    "write_basic_config": "mixed_precision='no', save_location=None",
}
PLACES = {
    "accelerator": "Accelerator",
    "big_modeling": "init_empty_weights init_on_device",
    "data_loader": "DataLoaderDispatcher DataLoaderShard prepare_data_loader skip_first_batches",
    "launchers": "debug_launcher notebook_launcher",
    "local_sgd": "LocalSGD",
    "logging": "MultiProcessAdapter get_logger",
    "optimizer": "AcceleratedOptimizer",
    "parallelism_config": "ParallelismConfig",
    "scheduler": "AcceleratedScheduler",
    "state": "AcceleratorState DistributedType GradientState PartialState is_initialized",
    "utils.dataclasses": "DeepSpeedPlugin DistributedType DistributedDataParallelKwargs ProjectConfiguration",
    "utils.deepspeed": "DummyOptim DummyScheduler HfDeepSpeedConfig",
    "utils.environment": "patch_environment",
    "utils.fsdp_utils": "load_fsdp_model merge_fsdp_weights save_fsdp_model",
    "utils.imports": "is_torch_xla_available is_wandb_available is_xpu_available",
    "utils.launch": "PrepareForLaunch",
    "utils.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    "utils.operations": "gather recursively_apply send_to_device",
    "utils.other": "extract_model_from_parallel wait_for_everyone write_basic_config",
    "utils.random": "set_seed synchronize_rng_states",
    "tracking": "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker MLflowTracker SwanLabTracker"
    " TensorBoardTracker TrackioTracker WandBTracker get_available_trackers on_main_process register_tracker_class",
}
"""Modules and the names that scripts import from them; trackers need their package."""
OURS = (
    "CheckpointError Description MismatchError RankLostError Settings StallError Topology "
    "is_numpy_available is_torch_distributed_available is_tqdm_available"
)
"""Names that Accelerate does not have, or only in `utils.imports`."""

# Objects ---------------------------------------------------------------------------------

OBJECTS = {
    "AutocastKwargs": "enabled=True, cache_enabled=None",
    "DataLoaderConfiguration": "split_batches=False, dispatch_batches=None, even_batches=True, "
    "use_seedable_sampler=False, data_seed=None, non_blocking=False, use_stateful_dataloader=False",
    "DistributedDataParallelKwargs": "dim=0, broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False, "
    "check_reduction=False, gradient_as_bucket_view=False, static_graph=False, comm_hook='no', comm_wrapper='no', "
    "comm_state_option={}",
    "DeepSpeedPlugin": "hf_ds_config=None, gradient_accumulation_steps=None, gradient_clipping=None, zero_stage=None, "
    "is_train_batch_min=True, offload_optimizer_device=None, offload_param_device=None, offload_optimizer_nvme_path=None, "
    "offload_param_nvme_path=None, zero3_init_flag=None, zero3_save_16bit_model=None, transformer_moe_cls_names=None, "
    "enable_msamp=None, msamp_opt_level=None",
    "FullyShardedDataParallelPlugin": "fsdp_version=None, sharding_strategy=None, reshard_after_forward=None, "
    "backward_prefetch=None, mixed_precision_policy=None, auto_wrap_policy=None, cpu_offload=None, ignored_modules=None, "
    "state_dict_type=None, state_dict_config=None, optim_state_dict_config=None, limit_all_gathers=True, "
    "use_orig_params=None, param_init_fn=None, sync_module_states=None, forward_prefetch=None, "
    "activation_checkpointing=None, activation_checkpointing_offload=None, cpu_ram_efficient_loading=None, "
    "transformer_cls_names_to_wrap=None, min_num_params=None",
    "GradScalerKwargs": "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True",
    "GradientAccumulationPlugin": "num_steps=None, adjust_scheduler=True, sync_with_dataloader=True, "
    "sync_each_batch=False",
    "InitProcessGroupKwargs": "backend='nccl', init_method=None, timeout=None",
    "ParallelismConfig": "dp_replicate_size=None, dp_shard_size=None, tp_size=None, cp_size=None, cp_backend=None, "
    "sp_size=None, sp_backend=None, tp_handler=None, cp_handler=None, sp_handler=None",
    "ProfileKwargs": "activities=None, schedule_option=None, on_trace_ready=None, record_shapes=False, "
    "profile_memory=False, with_stack=False, with_flops=False, with_modules=False, output_trace_dir=None",
    "ProjectConfiguration": "project_dir=None, logging_dir=None, automatic_checkpoint_naming=False, total_limit=None, "
    "iteration=0, save_on_each_node=False",
    "TorchContextParallelConfig": "cp_comm_strategy=None",
    "TorchTensorParallelConfig": "enable_async_tp=False",
    "TorchDynamoPlugin": "backend=None, mode=None, fullgraph=None, dynamic=None, options=None, disable=False, "
    "use_regional_compilation=None",
}
ENUMS = {
    "DDPCommunicationHookType": "NO FP16 BF16 POWER_SGD BATCHED_POWER_SGD",
    "DistributedType": "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP XLA"
    " MEGATRON_LM MULTI_HPU MULTI_NEURON TPU",
    "DynamoBackend": "NO EAGER AOT_EAGER INDUCTOR CUDAGRAPHS ONNXRT TENSORRT TVM",
    "LoggerType": "ALL AIM TENSORBOARD WANDB TRACKIO COMETML MLFLOW CLEARML DVCLIVE SWANLAB",
    "PrecisionType": "NO FP8 FP16 BF16",
}
DUMMIES = {
    "DummyOptim": "params, lr=0.001, weight_decay=0, **kwargs",
    "DummyScheduler": "optimizer, total_num_steps=None, warmup_num_steps=0, lr_scheduler_callable=None, **kwargs",
    "HfDeepSpeedConfig": "config_file_or_dict",
}
"""Classes that scripts use only with DeepSpeed."""
PLACEHOLDER = "MegatronLMDummyScheduler"
"""A class that scripts import for Megatron-LM."""
STATES = {
    "AcceleratorState": "backend deepspeed_plugin deepspeed_plugins get_deepspeed_plugin select_deepspeed_plugin destroy_process_group device distributed_type dynamo_plugin fsdp_plugin"
    " initialized is_fsdp2 is_last_process parallelism_config"
    " is_local_main_process is_main_process local_main_process_first local_process_index main_process_first"
    " mixed_precision num_processes print process_index split_between_processes use_distributed wait_for_everyone",
    "GradientState": "end_of_dataloader in_dataloader num_steps remainder sync_gradients",
    "PartialState": "backend default_device destroy_process_group device distributed_type initialized is_last_process"
    " is_local_main_process is_main_process local_main_process_first local_process_index main_process_first"
    " num_processes on_last_process on_local_main_process on_local_process on_main_process on_process print"
    " process_index set_device split_between_processes use_distributed wait_for_everyone",
}

# What is another on purpose ----------------------------------------------------------------

DIFFERENT = {
    "DistributedDataParallelKwargs.bucket_cap_mb": "None is torch's own 25 MiB",
    "DistributedDataParallelKwargs.comm_hook": "a member of the enumeration, equal in meaning to its text",
    "DistributedDataParallelKwargs.comm_wrapper": "a member of the enumeration, equal in meaning to its text",
    "GradientAccumulationPlugin.num_steps": "there, None is an error later on",
    "InitProcessGroupKwargs.backend": "None is what fits the device; nccl is wrong on a CPU",
    "TorchDynamoPlugin.backend": "there, None asks the environment; here, the profile has no such option",
    "TorchDynamoPlugin.fullgraph": "there, None asks the environment",
    "TorchDynamoPlugin.use_regional_compilation": "there, None asks the environment",
    "init_trackers.init_kwargs": "None says the same as an empty dict",
    "log.log_kwargs": "None says the same as an empty dict",
    "notebook_launcher.mixed_precision": "None is what the environment says; 'no' can be said",
    "notebook_launcher.use_port": "None is a free port",
    "on_local_main_process.function": "there, None is an error when it is called",
    "on_main_process.function": "there, None is an error when it is called",
    "prepare_data_loader.slice_fn_for_dispatch": "dispatched batches are made for each rank, and never cut",
}


def parse_parameters(text):
    """Return the parameters that a text describes."""
    function = eval(f"lambda {text}: None", {"utils": utils})  # noqa: S307 - it stands above
    return list(inspect.signature(function).parameters.values())


def list_parameters(function):
    """Return the parameters of a function, without `self`."""
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


def list_differences(name, their_parameters, our_parameters):
    """Yield the parameters that a call valid for one signature would pass wrongly to the other."""
    positional = [p for p in our_parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name: p for p in our_parameters}
    for index, expected in enumerate(p for p in their_parameters if p.kind is p.POSITIONAL_OR_KEYWORD):
        positional_parameter = positional[index] if index < len(positional) else None
        if positional_parameter is None or (positional_parameter.name, positional_parameter.default) != (
            expected.name,
            expected.default,
        ):
            yield f"{name}.{expected.name}"
    for expected in their_parameters:
        if expected.kind is expected.KEYWORD_ONLY and named[expected.name].default != expected.default:
            yield f"{name}.{expected.name}"
        if expected.kind is expected.VAR_POSITIONAL:
            assert any(p.kind is p.VAR_POSITIONAL for p in our_parameters), name
    known_names = {p.name for p in their_parameters}
    for extra in positional:
        assert extra.name in known_names or extra.default is not extra.empty, f"{name} asks for {extra.name}"


def list_members(facade):
    return {name for name in dir(facade) if not name.startswith("_")}


def split_names(table):
    return [name for names in table.values() for name in names.split()]


def test_the_accelerator_has_the_members_of_accelerate_and_those_of_accel():
    accelerator = Accelerator()
    assert list_members(accelerator) == {*PROPERTIES, *METHODS, *OUR_OWN.split()}
    for name in PROPERTIES:
        getattr(accelerator, name)
    for name in SETTABLE:
        setattr(accelerator, name, getattr(accelerator, name))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_parameters_of_accelerate(name):
    differences = list(
        list_differences(name, parse_parameters(METHODS[name]), list_parameters(getattr(Accelerator, name)))
    )
    assert set(differences) <= set(DIFFERENT)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_parameters_of_accelerate(name):
    differences = list(
        list_differences(name, parse_parameters(FUNCTIONS[name]), list_parameters(getattr(utils, name)))
    )
    assert set(differences) <= set(DIFFERENT)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_configuration_class_has_the_fields_of_accelerate(name):
    differences = list(
        list_differences(name, parse_parameters(OBJECTS[name]), list_parameters(getattr(utils, name)))
    )
    defaults = {field.name: field for field in dataclasses.fields(getattr(utils, name))}
    missing = [difference for difference in differences if difference not in DIFFERENT]
    with_factory = [
        difference
        for difference in missing
        if defaults[difference.split(".")[1]].default_factory is not dataclasses.MISSING
    ]
    assert missing == with_factory  # a dict that is made for every object


def test_every_listed_difference_exists():
    calls = [(METHODS, Accelerator), (FUNCTIONS, utils), (OBJECTS, utils)]
    differences = {
        difference
        for table, home in calls
        for name, text in table.items()
        for difference in list_differences(name, parse_parameters(text), list_parameters(getattr(home, name)))
    }
    assert differences >= set(DIFFERENT)


@pytest.mark.parametrize("name", ENUMS)
def test_an_enum_has_the_members_of_accelerate(name):
    assert not set(ENUMS[name].split()) - set(getattr(utils, name).__members__)


@pytest.mark.parametrize("name", DUMMIES)
def test_a_class_of_deepspeed_has_the_parameters_of_accelerate(name):
    ours = list_parameters(getattr(utils, name))
    assert not list(list_differences(name, parse_parameters(DUMMIES[name]), ours))


def test_a_dummy_of_megatron_can_be_imported_and_names_its_replacement():
    with pytest.raises(
        NotImplementedError, match=rf"{PLACEHOLDER}\(...\) .*Create the scheduler in the script"
    ):
        getattr(utils, PLACEHOLDER)([torch.ones(1)], lr=0.1)


def test_distributed_type_tpu_is_an_alias_of_xla():
    assert accel_runtime.DistributedType.TPU is accel_runtime.DistributedType.XLA


@pytest.mark.parametrize("name", STATES)
def test_a_state_has_the_attributes_of_accelerate(name):
    accelerator = Accelerator()
    attributes = {
        "AcceleratorState": accelerator.state,
        "GradientState": accelerator.gradient_state,
        "PartialState": accel_runtime.PartialState(),
    }
    for member in STATES[name].split():
        getattr(attributes[name], member)


def test_the_first_arguments_of_the_accelerator_have_the_order_of_accelerate():
    their_parameters = parse_parameters(CONSTRUCTOR)
    our_parameters = list_parameters(Accelerator)
    assert not list(list_differences("Accelerator", their_parameters[:BY_POSITION], our_parameters))
    by_name = {p.name: p.default for p in our_parameters}
    assert by_name == {p.name: p.default for p in their_parameters} | dict.fromkeys(EARLY) | dict.fromkeys(
        OWN
    )


@pytest.mark.parametrize("name", [*REFUSED.split(), "mixed_percision", "fp32"])
def test_an_argument_without_effect_is_rejected_by_name(name):
    with pytest.raises(TypeError, match=name):
        Accelerator(**{name: None})


def test_utils_exports_the_names_of_accelerate_and_accel():
    exported = {*FUNCTIONS, *OBJECTS, *ENUMS, *OURS.split(), "Accelerator", "GeneralTracker", "get_logger"}
    assert set(utils.__all__) == exported | {
        "KwargsHandler",
        "split_between_processes",
        *DUMMIES,
        PLACEHOLDER,
    }


@pytest.mark.parametrize("module_name", PLACES)
def test_names_are_importable_from_the_modules_of_accelerate(module_name):
    module = importlib.import_module(f"accel_runtime.{module_name}")
    for name in PLACES[module_name].split():
        if name.endswith("Tracker") and name != "GeneralTracker":
            assert name in {tracker.class_name for tracker in module.TRACKERS.values()}
        else:
            assert getattr(module, name)


@pytest.mark.parametrize("path", PACKAGE_NAMES)
def test_a_name_that_accel_lacks_is_that_of_the_installed_accelerate(path):
    theirs = importlib.import_module(path)
    ours = importlib.import_module(path.replace("accelerate", "accel_runtime", 1))
    for name in PACKAGE_NAMES[path]:
        assert getattr(ours, name) is getattr(theirs, name)
        assert name not in dir(ours)
    assert not hasattr(ours, "nosuch")


def test_a_name_of_accelerate_without_the_package_is_an_import_error_with_the_installation(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ImportError, match=r"part of Accelerate, which is not installed\. Run: .*accelerate"):
        from accel_runtime.hooks import remove_hook_from_module  # noqa: F401


def test_a_name_that_the_installed_accelerate_lacks_is_an_import_error_with_its_version(monkeypatch):
    monkeypatch.delattr("accelerate.hooks.add_hook_to_module")
    with pytest.raises(
        ImportError, match=r"Accelerate 1\.\S+ does not have it\. Run: .*--upgrade.*accelerate"
    ):
        from accel_runtime.hooks import add_hook_to_module  # noqa: F401


def test_prepared_objects_are_instances_of_the_classes_of_accelerate():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    *_, optimizer, loader, schedule = Accelerator().prepare(model, optimizer, DataLoader(range(3)), schedule)
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(schedule, AcceleratedScheduler)
    assert isinstance(loader, DataLoaderShard)


# Whole scripts ---------------------------------------------------------------------------

EARLY_SCRIPT = """
import argparse
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()

handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
accelerator = Accelerator(True, fp16=args.fp16, cpu=args.cpu, rng_types=["generator"], kwargs_handlers=handlers)
set_seed(42)
x = torch.linspace(-1, 1, 37)[:, None]
data = TensorDataset(x, (x > 0).long().squeeze(1))
train = DataLoader(data, shuffle=True, batch_size=8, drop_last=True)
evaluation = DataLoader(data, shuffle=False, batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
model = model.to(accelerator.device)
optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.05)
model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
if accelerator.distributed_type == DistributedType.TPU:
    raise SystemExit("no such machine")
steps = 1
for epoch in range(8):
    model.train()
    for step, (inputs, labels) in enumerate(train):
        inputs, labels = inputs.to(accelerator.device), labels.to(accelerator.device)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels) / steps
        accelerator.backward(loss)
        if step % steps == 0:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    right, seen = 0, 0
    for inputs, labels in evaluation:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions = accelerator.pad_across_processes(predictions, dim=0, pad_index=-1)
        predictions, labels = accelerator.gather(predictions), accelerator.gather(labels)
        right += int((predictions == labels).sum())
        seen += len(labels)
accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
accelerator.save(unwrapped.state_dict(), "model.bin")
accelerator.wait_for_everyone()
if accelerator.is_local_main_process:
    assert set(torch.load("model.bin", weights_only=True)) == set(unwrapped.state_dict())
assert not accelerator.use_fp16
accelerator.print(f"on {accelerator.num_processes}: {'good' if right / seen > 0.9 else right / seen}")
"""
RECENT_SCRIPT = """
import logging
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.logging import get_logger
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DistributedType, ProjectConfiguration, find_executable_batch_size, set_seed, tqdm

logging.basicConfig(level=logging.INFO, format="%(message)s")
logger = get_logger(__name__, log_level="INFO")


class Lines(GeneralTracker):
    name = "lines"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.values = []

    @property
    def tracker(self):
        return self.values

    @on_main_process
    def store_init_configuration(self, values):
        self.values.append(sorted(values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.values.append((step, sorted(values)))


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision="no",
        log_with=Lines(),
        project_config=ProjectConfiguration(project_dir=".", logging_dir="logs"),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    logger.info(accelerator.state, main_process_only=False)
    set_seed(7)
    accelerator.init_trackers("project", config={"lr": 0.05})
    with accelerator.main_process_first():
        x = torch.linspace(-1, 1, 37)[:, None]
        data = TensorDataset(x, (x > 0).long().squeeze(1))

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        accelerator.free_memory()
        model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 100)
        model, optimizer, loader, evaluation, schedule = accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size, shuffle=True), DataLoader(data, batch_size), schedule
        )
        total = 0
        for epoch in range(12):
            model.train()
            active = skip_first_batches(loader, 1) if epoch == 0 else loader
            bar = tqdm(active, disable=not accelerator.is_local_main_process)
            for inputs, labels in bar:
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        total += 1
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            assert not accelerator.optimizer_step_was_skipped
            mean = accelerator.reduce(loss.detach(), reduction="mean").item()
            accelerator.log({"loss": mean, "rate": schedule.get_last_lr()[0]}, step=total)
        model.eval()
        right, seen = 0, []
        for inputs, labels in evaluation:
            with torch.inference_mode():
                predictions = model(inputs).argmax(dim=-1)
            predictions, labels, inputs = accelerator.gather_for_metrics((predictions, labels, inputs))
            right += int((predictions == labels).sum())
            seen += inputs.flatten().tolist()
        assert torch.tensor(seen).equal(x.flatten()), seen
        return right / len(seen), accelerator.get_state_dict(model)

    accuracy, weights = train()
    accelerator.save(weights, "model.safetensors", safe_serialization=True)
    lines = accelerator.get_tracker("lines", unwrap=True)
    if accelerator.is_main_process:
        assert lines[0] == ["lr"] and len(lines) == 13, lines
    assert accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
    accelerator.print(f"on {accelerator.num_processes}: {'good' if accuracy > 0.9 else accuracy}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "processes"),
    [
        pytest.param(EARLY_SCRIPT, 1, id="an early script-1", marks=pytest.mark.full),
        pytest.param(EARLY_SCRIPT, 2, id="an early script-2", marks=pytest.mark.full),
        pytest.param(RECENT_SCRIPT, 1, id="a recent script-1", marks=pytest.mark.full),
        pytest.param(RECENT_SCRIPT, 2, id="a recent script-2"),
    ],
)
def test_a_script_runs_after_a_change_of_its_import(accel, script, text, processes):
    path = script(re.sub(r"\bfrom accelerate\b", "from accel_runtime", text))
    process = accel("launch", "--cpu", "--nproc-per-node", processes, path)
    assert process.returncode == 0, process.stderr
    assert f"on {processes}: good" in process.stdout
