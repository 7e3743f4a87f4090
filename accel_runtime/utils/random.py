"""Functions of `accel_runtime.backends.rng` under the name of Accelerate's `utils.random`."""

from accel_runtime.accelerate.operations import synchronize_rng_state, synchronize_rng_states
from accel_runtime.backends.rng import set_seed

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
