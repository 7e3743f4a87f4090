"""The module that scripts import `extract_model_from_parallel` and its like from, as in Accelerate."""

from accel_runtime.utils.between import extract_model_from_parallel, wait_for_everyone
from accel_runtime.utils.launch import write_basic_config
from accel_runtime.utils.saving import load, save

__all__ = ["extract_model_from_parallel", "load", "save", "wait_for_everyone", "write_basic_config"]
