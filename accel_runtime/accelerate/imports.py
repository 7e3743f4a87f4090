"""Availability of devices, number formats and packages, under the name of Accelerate's `utils.imports`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import nn
from torch.torch_version import TorchVersion


def _is_installed(package: str, minimum: str | None = None) -> bool:
    """Return whether a package is installed, in a version of at least `minimum`."""
    if importlib.util.find_spec(package) is None:
        return False
    return minimum is None or TorchVersion(importlib.metadata.version(package)) >= minimum


def _build_check(name: str, *packages: str, minimum: str | None = None, no: str = "") -> Callable[[], bool]:
    """Return the function `is_NAME_available`: whether one of the packages is installed.

    Args:
        name: The name of the package, or another one.
        *packages: The packages; none means the one of this name.
        minimum: The oldest version.
        no: The reason to return False.
    """
    packages = packages or (name,)

    def check() -> bool:
        return not no and any(_is_installed(package, minimum) for package in packages)

    check.__name__ = check.__qualname__ = f"is_{name}_available"
    version = f", in {minimum} or newer" if minimum else ""
    installed = f"Return whether `{'` or `'.join(packages)}` is installed{version}."
    check.__doc__ = f"Return False: {no}." if no else installed
    return check


class _DeviceCheck(Protocol):
    def __call__(self, check_device: bool = False) -> bool: ...


def _build_device_check(device: str, package: str) -> _DeviceCheck:
    """Return the function `is_DEVICE_available`, for a package that adds a device to torch."""

    def check(check_device: bool = False) -> bool:  # noqa: ARG001 - the devices are counted either way
        return _has_device(package, device)

    check.__name__ = check.__qualname__ = f"is_{device}_available"
    check.__doc__ = f"Return whether `{package}` is installed and finds a device."
    return check


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


is_4bit_bnb_available = _build_check("4bit_bnb", "bitsandbytes", minimum="0.39.0")
is_8bit_bnb_available = _build_check("8bit_bnb", "bitsandbytes", minimum="0.37.2")
is_aim_available = _build_check("aim")
is_amdsmi_available = _build_check("amdsmi")
is_boto3_available = _build_check("boto3")
is_clearml_available = _build_check("clearml")
is_comet_ml_available = _build_check("comet_ml")
is_datasets_available = _build_check("datasets")
is_deepspeed_available = _build_check("deepspeed")
is_dvclive_available = _build_check("dvclive")
is_fp8_available = _build_check("fp8", no="fp8 is not supported, whatever packages are installed")
is_import_timer_available = _build_check("import_timer")
is_lomo_available = _build_check("lomo", "lomo_optim")
is_matplotlib_available = _build_check("matplotlib")
is_megatron_lm_available = _build_check("megatron_lm", no="Megatron-LM is not supported")
is_mlflow_available = _build_check("mlflow")
is_msamp_available = _build_check("msamp")
is_pandas_available = _build_check("pandas")
is_peft_available = _build_check("peft")
is_pippy_available = _build_check("pippy", no="`prepare_pippy` is not supported")
is_pynvml_available = _build_check("pynvml")
is_pytest_available = _build_check("pytest")
is_rich_available = _build_check("rich")
is_sagemaker_available = _build_check("sagemaker")
is_schedulefree_available = _build_check("schedulefree")
is_swanlab_available = _build_check("swanlab")
is_tensorboard_available = _build_check("tensorboard", "tensorboard", "tensorboardX")
is_timm_available = _build_check("timm")
is_torchao_available = _build_check("torchao")
is_torchdata_available = _build_check("torchdata")
is_torchdata_stateful_dataloader_available = _build_check(
    "torchdata_stateful_dataloader", "torchdata", minimum="0.8.0"
)
is_torchvision_available = _build_check("torchvision")
is_tqdm_available = _build_check("tqdm")
is_trackio_available = _build_check("trackio")
is_transformer_engine_available = _build_check("transformer_engine")
is_transformer_engine_mxfp8_available = _build_check("transformer_engine_mxfp8", no="fp8 is not supported")
is_transformers_available = _build_check("transformers")
is_triton_available = _build_check("triton")
is_wandb_available = _build_check("wandb")

is_mlu_available = _build_device_check("mlu", "torch_mlu")
is_musa_available = _build_device_check("musa", "torch_musa")
is_neuron_available = _build_device_check("neuron", "torch_neuronx")
is_npu_available = _build_device_check("npu", "torch_npu")
is_sdaa_available = _build_device_check("sdaa", "torch_sdaa")


def is_cuda_available() -> bool:
    """Return whether a CUDA device is available, without initializing CUDA, which would prevent forks."""
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
    return _is_installed("bitsandbytes", min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether a `bitsandbytes` for more than NVIDIA's devices is installed."""
    if not is_bnb_available():
        return False
    features: Collection[str] = getattr(importlib.import_module("bitsandbytes"), "features", ())
    return "multi_backend" in features


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether `numpy` is installed, in `min_version` or newer."""
    return _is_installed("numpy", min_version)


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


def is_weights_only_available() -> bool:
    """Return True: every supported version of torch loads weights without running code."""
    return True


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model, prepared or not, is one of `peft`."""
    if not is_peft_available():
        return False
    from accel_runtime.accelerate.operations import extract_model_from_parallel  # noqa: PLC0415 - it loads the backends

    return isinstance(extract_model_from_parallel(model), importlib.import_module("peft").PeftModel)


__all__ = sorted(name for name in globals() if name.startswith("is_"))  # noqa: PLE0605 - a list of names
