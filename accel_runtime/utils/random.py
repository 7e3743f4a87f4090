"""The module that scripts import `set_seed` from, as in Accelerate."""

from accel_runtime.rng import set_seed
from accel_runtime.utils.between import synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
