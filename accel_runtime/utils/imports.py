"""Whether a device, a number format or a package is there, under the names of Accelerate's `utils.imports`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Collection

import torch
from torch import nn
from torch.torch_version import TorchVersion

__all__ = [
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
    "is_fp8_available",
    "is_fp16_available",
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
    "is_numpy_available",
    "is_pandas_available",
    "is_peft_available",
    "is_peft_model",
    "is_pippy_available",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_distributed_available",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_tqdm_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
]


def is_cuda_available() -> bool:
    """Return whether a CUDA device is there, without initializing CUDA, so that processes can still be forked."""
    # torch.cuda.is_available() initializes it.
    return torch.cuda.device_count() > 0


def is_rocm_available() -> bool:
    """Return whether torch is built for ROCm and finds a device."""
    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch finds Apple's GPU, and is at least as new as `min_version`."""
    return torch.__version__ >= min_version and torch.backends.mps.is_available()


def is_xpu_available(check_device: bool = False) -> bool:  # noqa: ARG001 - the devices are counted either way
    """Return whether torch finds an Intel GPU."""
    return torch.xpu.is_available()


def is_mlu_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return whether `torch_mlu` is installed and finds a device."""
    return _has_device("torch_mlu", "mlu")


def is_musa_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return whether `torch_musa` is installed and finds a device."""
    return _has_device("torch_musa", "musa")


def is_npu_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return whether `torch_npu` is installed and finds a device."""
    return _has_device("torch_npu", "npu")


def is_sdaa_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return whether `torch_sdaa` is installed and finds a device."""
    return _has_device("torch_sdaa", "sdaa")


def is_neuron_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return whether `torch_neuronx` is installed and finds a device."""
    return _has_device("torch_neuronx", "neuron")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether Habana's package is installed and finds a device.

    Args:
        init_hccl: Load its collectives too.
    """
    if not (_is_installed("habana_frameworks") and _has_device("habana_frameworks.torch", "hpu")):
        return False
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether `torch_xla` is installed; and on request, whether its device is a TPU or a GPU.

    Raises:
        ValueError: Both are requested.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError(
            "is_torch_xla_available: a device is a TPU or a GPU. Set check_is_tpu or check_is_gpu."
        )
    if not _is_installed("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in {"GPU", "CUDA"}


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device computes in bf16; the CPU does.

    Args:
        ignore_tpu: Return False for a TPU.
    """
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    if is_xpu_available():
        return torch.xpu.is_bf16_supported()
    if is_mps_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def is_xccl_available() -> bool:
    """Return whether torch is built with collectives for Intel GPUs."""
    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether `bitsandbytes` is installed, in `min_version` or newer."""
    if not _is_installed("bitsandbytes"):
        return False
    return min_version is None or TorchVersion(importlib.metadata.version("bitsandbytes")) >= min_version


def is_4bit_bnb_available() -> bool:
    """Return whether a `bitsandbytes` with weights of 4 bits is installed."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether a `bitsandbytes` with weights of 8 bits is installed."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether a `bitsandbytes` for more than NVIDIA's devices is installed."""
    if not is_bnb_available():
        return False
    features: Collection[str] = getattr(importlib.import_module("bitsandbytes"), "features", ())
    return "multi_backend" in features


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether `numpy` is installed, in `min_version` or newer."""
    return _is_installed("numpy") and TorchVersion(importlib.metadata.version("numpy")) >= min_version


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether a `torchdata` with a stateful loader is installed; prepared loaders have a state without it."""
    return is_torchdata_available() and TorchVersion(importlib.metadata.version("torchdata")) >= "0.8.0"


def is_torch_distributed_available() -> bool:
    """Return whether torch is built with `torch.distributed`."""
    return torch.distributed.is_available()


def is_habana_gaudi1() -> bool:
    """Return whether the device is the first Gaudi, which has no fp16."""
    if not is_hpu_available():
        return False
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)  # noqa: SLF001 - theirs alone


def is_fp16_available() -> bool:
    """Return whether the device computes in fp16."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Return False: nothing here computes in fp8, whatever packages are installed."""
    return False


def is_transformer_engine_mxfp8_available() -> bool:
    """Return False, as `is_fp8_available`."""
    return False


def is_megatron_lm_available() -> bool:
    """Return False: nothing here hands a model to Megatron-LM."""
    return False


def is_pippy_available() -> bool:
    """Return False: there is no `prepare_pippy`."""
    return False


def is_weights_only_available() -> bool:
    """Return True: every torch that this package runs on loads weights without running code."""
    return True


def is_tensorboard_available() -> bool:
    """Return whether a package that writes for TensorBoard is installed."""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model, prepared or not, is one of `peft`."""
    if not is_peft_available():
        return False
    from accel_runtime.utils.between import extract_model_from_parallel  # noqa: PLC0415 - it loads the backends

    return isinstance(extract_model_from_parallel(model), importlib.import_module("peft").PeftModel)


def is_amdsmi_available() -> bool:
    """Return whether `amdsmi` is installed."""
    return _is_installed("amdsmi")


def is_import_timer_available() -> bool:
    """Return whether `import_timer` is installed."""
    return _is_installed("import_timer")


def is_lomo_available() -> bool:
    """Return whether `lomo_optim` is installed."""
    return _is_installed("lomo_optim")


def is_msamp_available() -> bool:
    """Return whether `msamp` is installed."""
    return _is_installed("msamp")


def is_sagemaker_available() -> bool:
    """Return whether `sagemaker` is installed."""
    return _is_installed("sagemaker")


def is_transformer_engine_available() -> bool:
    """Return whether `transformer_engine` is installed."""
    return _is_installed("transformer_engine")


def is_aim_available() -> bool:
    """Return whether `aim` is installed."""
    return _is_installed("aim")


def is_boto3_available() -> bool:
    """Return whether `boto3` is installed."""
    return _is_installed("boto3")


def is_clearml_available() -> bool:
    """Return whether `clearml` is installed."""
    return _is_installed("clearml")


def is_comet_ml_available() -> bool:
    """Return whether `comet_ml` is installed."""
    return _is_installed("comet_ml")


def is_datasets_available() -> bool:
    """Return whether `datasets` is installed."""
    return _is_installed("datasets")


def is_deepspeed_available() -> bool:
    """Return whether `deepspeed` is installed."""
    return _is_installed("deepspeed")


def is_dvclive_available() -> bool:
    """Return whether `dvclive` is installed."""
    return _is_installed("dvclive")


def is_matplotlib_available() -> bool:
    """Return whether `matplotlib` is installed."""
    return _is_installed("matplotlib")


def is_mlflow_available() -> bool:
    """Return whether `mlflow` is installed."""
    return _is_installed("mlflow")


def is_pandas_available() -> bool:
    """Return whether `pandas` is installed."""
    return _is_installed("pandas")


def is_peft_available() -> bool:
    """Return whether `peft` is installed."""
    return _is_installed("peft")


def is_pynvml_available() -> bool:
    """Return whether `pynvml` is installed."""
    return _is_installed("pynvml")


def is_pytest_available() -> bool:
    """Return whether `pytest` is installed."""
    return _is_installed("pytest")


def is_rich_available() -> bool:
    """Return whether `rich` is installed."""
    return _is_installed("rich")


def is_schedulefree_available() -> bool:
    """Return whether `schedulefree` is installed."""
    return _is_installed("schedulefree")


def is_swanlab_available() -> bool:
    """Return whether `swanlab` is installed."""
    return _is_installed("swanlab")


def is_timm_available() -> bool:
    """Return whether `timm` is installed."""
    return _is_installed("timm")


def is_torchao_available() -> bool:
    """Return whether `torchao` is installed."""
    return _is_installed("torchao")


def is_torchdata_available() -> bool:
    """Return whether `torchdata` is installed."""
    return _is_installed("torchdata")


def is_torchvision_available() -> bool:
    """Return whether `torchvision` is installed."""
    return _is_installed("torchvision")


def is_tqdm_available() -> bool:
    """Return whether `tqdm` is installed."""
    return _is_installed("tqdm")


def is_trackio_available() -> bool:
    """Return whether `trackio` is installed."""
    return _is_installed("trackio")


def is_transformers_available() -> bool:
    """Return whether `transformers` is installed."""
    return _is_installed("transformers")


def is_triton_available() -> bool:
    """Return whether `triton` is installed."""
    return _is_installed("triton")


def is_wandb_available() -> bool:
    """Return whether `wandb` is installed."""
    return _is_installed("wandb")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _has_device(package: str, device: str) -> bool:
    """Return whether a package that adds a device to torch is installed, and finds one."""
    if not _is_installed(package):
        return False
    try:
        importlib.import_module(package)
        module = getattr(torch, device, None)
        return module is not None and bool(module.is_available())
    except (ImportError, RuntimeError, OSError):  # installed without its driver
        return False
