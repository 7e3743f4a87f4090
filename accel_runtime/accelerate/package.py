"""Names of Accelerate that accel takes from the installed package, by module.

They neither read nor change the state of an `Accelerator`: loading and dispatch of models that are too big for a device, hooks,
and helpers. Names that configure Accelerate's own training are not among them, as accel would ignore what they say.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accel_runtime.environment.installation import format_install

__all__ = ["PACKAGE_NAMES", "build_getattr", "import_from_accelerate"]


_BIG_MODELS = """
    cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map load_checkpoint_and_dispatch
    load_checkpoint_in_model
"""
_HOOKS = """
    AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook add_hook_to_module
    attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook remove_hook_from_module
    remove_hook_from_submodules
"""
_SAMPLERS = "BatchSamplerShard IterableDatasetShard SeedableRandomSampler SkipBatchSampler get_sampler"
_SUBMODULES = {
    "constants": """
        SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME TORCH_DISTRIBUTED_OPERATION_TYPES
        WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
    """,
    "dataclasses": "ComputeEnvironment CustomDtype RNGType SageMakerDistributedType TensorInformation",
    "environment": """
        are_libraries_initialized check_cuda_p2p_ib_support clear_environment convert_dict_to_env_variables
        get_cpu_distributed_information get_current_device_type get_gpu_info get_int_from_env parse_choice_from_env
        parse_flag_from_env purge_accelerate_environment set_numa_affinity str_to_bool
    """,
    "modeling": """
        align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_in_config
        check_tied_parameters_on_same_device compute_module_sizes convert_file_size_to_int dtype_byte_size
        find_tied_parameters get_balanced_memory get_grad_scaler get_max_layer_size get_max_memory
        get_mixed_precision_context_manager has_offloaded_params id_tensor_storage infer_auto_device_map
        load_checkpoint_in_model load_offloaded_weights load_state_dict named_module_tensors retie_parameters
        set_module_tensor_to_device
    """,
    "offload": """
        OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight offload_state_dict
        offload_weight save_offload_index
    """,
    "operations": """
        CannotPadNestedTensorWarning copy_tensor_to_devices find_device get_data_structure ignorant_find_batch_size
        initialize_tensors is_namedtuple is_tensor_information pad_input_tensors slice_tensors
    """,
    "other": """
        check_os_kernel clean_state_dict_for_safetensors convert_bytes get_module_children_bottom_up get_pretty_name
        is_port_in_use merge_dicts recursive_getattr
    """,
    "versions": "compare_versions is_torch_version",
}
"""Names of the modules of `accelerate.utils`, which exports all of them."""
_INTERNAL = {
    "dataclasses": "get_module_class_from_name",
    "modeling": """
        check_device_same clean_device_map compute_module_total_buffer_size get_module_leaves get_module_size_with_ties
        get_non_persistent_buffers get_state_dict_from_offload get_state_dict_offloaded_model
    """,
    "other": "get_free_port",
}
"""Names that `accelerate.utils` does not export."""
PACKAGE_NAMES: Mapping[str, frozenset[str]] = {
    "accelerate": frozenset(f"{_BIG_MODELS} prepare_pippy".split()),
    "accelerate.big_modeling": frozenset(f"{_BIG_MODELS} attach_layerwise_casting_hooks".split()),
    "accelerate.data_loader": frozenset(_SAMPLERS.split()),
    "accelerate.hooks": frozenset(_HOOKS.split()),
    "accelerate.utils": frozenset(" ".join(_SUBMODULES.values()).split()),
    **{
        f"accelerate.utils.{module}": frozenset(f"{names} {_INTERNAL.get(module, '')}".split())
        for module, names in _SUBMODULES.items()
    },
}


def import_from_accelerate(module: str, name: str) -> Any:
    """Return an object of Accelerate for a module of accel that has the same path.

    Raises:
        AttributeError: accel does not take the name from Accelerate.
        ImportError: Accelerate is not installed, or too old.
    """
    path = module.replace("accel_runtime", "accelerate", 1)
    if name not in PACKAGE_NAMES.get(path, ()):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # Not an AttributeError: `from ... import` would drop its text.
    try:
        return getattr(importlib.import_module(path), name)
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise
        raise ImportError(
            f"Cannot import {name!r} from {module!r}: it is a part of Accelerate, which is not installed. Run: "
            f"{format_install('accelerate')}",
            name=module,
        ) from None
    except AttributeError as error:
        version = importlib.import_module("accelerate").__version__
        raise ImportError(
            f"Cannot import {name!r} from {module!r}: Accelerate {version} does not have it. Run: "
            f"{format_install('accelerate', options='--upgrade')}",
            name=module,
        ) from error


def build_getattr(module: str) -> Callable[[str], Any]:
    """Return `__getattr__` of a module that has further names of Accelerate's module of the same path."""
    return partial(import_from_accelerate, module)
