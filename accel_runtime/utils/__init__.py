"""Names that scripts import from `accelerate.utils`, including every name of `accel_runtime`."""

from __future__ import annotations

import importlib
from typing import Any

import accel_runtime

_MODULES = {
    "accel_runtime.memory": ("clear_device_cache",),
    "accel_runtime.options": ("KwargsHandler",),
    "accel_runtime.utils.environment": ("patch_environment",),
    "accel_runtime.utils.fsdp_utils": (
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "merge_fsdp_weights",
        "save_fsdp_model",
        "save_fsdp_optimizer",
    ),
    "accel_runtime.utils.launch": ("PrepareForLaunch", "write_basic_config"),
    "accel_runtime.utils.other": ("DummyOptim", "DummyScheduler", "MegatronLMDummyScheduler", "load", "save"),
    "accel_runtime.utils.operations": (
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "find_batch_size",
        "honor_type",
        "is_torch_tensor",
        "listify",
        "recursively_apply",
        "extract_model_from_parallel",
        "synchronize_rng_state",
        "wait_for_everyone",
    ),
    "accel_runtime.utils.imports": (
        "is_4bit_bnb_available",
        "is_8bit_bnb_available",
        "is_aim_available",
        "is_amdsmi_available",
        "is_bf16_available",
        "is_bitsandbytes_multi_backend_available",
        "is_bnb_available",
        "is_boto3_available",
        "is_clearml_available",
        "is_comet_ml_available",
        "is_cuda_available",
        "is_datasets_available",
        "is_deepspeed_available",
        "is_dvclive_available",
        "is_fp16_available",
        "is_fp8_available",
        "is_habana_gaudi1",
        "is_hpu_available",
        "is_import_timer_available",
        "is_lomo_available",
        "is_matplotlib_available",
        "is_megatron_lm_available",
        "is_mlflow_available",
        "is_mlu_available",
        "is_mps_available",
        "is_msamp_available",
        "is_musa_available",
        "is_neuron_available",
        "is_npu_available",
        "is_pandas_available",
        "is_peft_available",
        "is_peft_model",
        "is_pippy_available",
        "is_pynvml_available",
        "is_pytest_available",
        "is_rocm_available",
        "is_sagemaker_available",
        "is_schedulefree_available",
        "is_sdaa_available",
        "is_swanlab_available",
        "is_tensorboard_available",
        "is_timm_available",
        "is_torch_xla_available",
        "is_torchao_available",
        "is_torchdata_available",
        "is_torchdata_stateful_dataloader_available",
        "is_torchvision_available",
        "is_trackio_available",
        "is_transformer_engine_available",
        "is_transformer_engine_mxfp8_available",
        "is_transformers_available",
        "is_triton_available",
        "is_wandb_available",
        "is_weights_only_available",
        "is_xccl_available",
        "is_xpu_available",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted([*accel_runtime.__all__, *_MODULE_OF])  # noqa: PLE0605 - a list of names


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in accel_runtime.__all__:
        return getattr(accel_runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
