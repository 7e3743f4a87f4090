"""Accelerate's settings of Megatron-LM, which accel does not have."""

from __future__ import annotations

from accel_runtime.environment.accelerate import sharding
from accel_runtime.environment.accelerate.setting import ConfigSection, Setting

__all__ = ["MEGATRON_LM", "USE_MEGATRON_LM"]

_NO_MEGATRON_LM = "Megatron-LM is not in this version of accel"
_MEGATRON_LM_PREFIX = "MEGATRON_LM_"
_MEGATRON_LM_DEFAULTS = {
    "tp_degree": "1",
    "pp_degree": "1",
    **dict.fromkeys(
        (
            "use_custom_fsdp",
            "no_load_optim",
            "no_save_optim",
            "eod_mask_loss",
            "optimizer_cpu_offload",
            "use_precision_aware_optimizer",
            "overlap_cpu_optimizer_d2h_h2d",
        ),
        "False",
    ),
}
MEGATRON_LM = ConfigSection(
    "megatron_lm_config",
    (
        Setting(
            "megatron_lm_gradient_clipping",
            variable=f"{_MEGATRON_LM_PREFIX}GRADIENT_CLIPPING",
            launch_default="1.0",
            reason=sharding.GRADIENT_CLIPPING.reason,
        ),
        *(
            Setting(
                f"megatron_lm_{name}",
                variable=f"{_MEGATRON_LM_PREFIX}{name.upper()}",
                launch_default=default,
                reason=_NO_MEGATRON_LM,
            )
            for name, default in _MEGATRON_LM_DEFAULTS.items()
        ),
    ),
    reason=_NO_MEGATRON_LM,
    variable_prefix=_MEGATRON_LM_PREFIX,
    distributed_type="MEGATRON_LM",
)
USE_MEGATRON_LM = Setting(
    options=("use_megatron_lm",),
    is_switch=True,
    variable="ACCELERATE_USE_MEGATRON_LM",
    advice="Leave it out: Megatron-LM is not supported",
    refusal="accel shards models by torch instead of Megatron-LM; unset it, and set "
    "ACCEL_PARALLEL_TP or ACCEL_PARALLEL_DP_SHARD",
)
