"""The sections of an Accelerate config file: keys under a key, of which a profile has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_cli.import_accelerate.fates import NOT_SET, OFF, Fate, left
from accel_cli.import_accelerate.values import plain
from accel_cli.profile.validation_errors import did_you_mean
from accel_runtime.env import find_nearest

__all__ = ["SECTIONS", "Section"]


@dataclass(frozen=True)
class Section:
    """Keys under a key, none of which a profile has."""

    reason: str
    known: Mapping[str, tuple[Any, ...]]
    """Every key without its prefix, with the values that ask for nothing."""
    prefix: str = ""
    bare: bool = False
    """Whether Accelerate adds the prefix where it is missing."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Of keys that have a reason of their own."""

    def fate(self, key: str, value: Any) -> Fate:
        """What becomes of a key of this section."""
        if value is None:
            return NOT_SET
        short = key.removeprefix(self.prefix)
        if short not in self.known or not (self.bare or key.startswith(self.prefix)):
            return left(f"Accelerate does not use this key either {self._meant(key)}".strip())
        off = ("", *self.known[short])
        return OFF if plain(value) in off else left(self.reasons.get(short, self.reason))

    def _meant(self, key: str) -> str:
        names = [*(self.prefix + name for name in self.known), *(self.known if self.bare else ())]
        meant = did_you_mean(find_nearest(key, names))
        return f"({meant})" if meant else ""


def _keys(names: str, *off: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), off)


_CLIPS = {"gradient_clipping": "the script does it: accelerator.clip_grad_norm_()"}
SECTIONS: Mapping[str, Section] = {
    "dynamo_config": Section(
        "accel does not compile for the script: call torch.compile in it",
        _keys("backend use_fullgraph use_dynamic use_regional_compilation", False) | _keys("mode", "default"),
        prefix="dynamo_",
        bare=True,
    ),
    "megatron_lm_config": Section(
        "Megatron-LM is not in this version of accel",
        _keys("tp_degree pp_degree num_micro_batches expert_model_parallel_size", 1)
        | _keys("context_parallel_size expert_tensor_parallel_size", 1)
        | _keys("sequence_parallelism recompute_activations use_distributed_optimizer", False)
        | _keys("use_custom_fsdp overlap_cpu_optimizer_d2h_h2d optimizer_cpu_offload", False)
        | _keys("use_precision_aware_optimizer calculate_per_token_loss eod_mask_loss", False)
        | _keys("no_load_optim no_save_optim", False)
        | _keys("gradient_clipping decoder_last_pipeline_num_layers attention_backend")
        | _keys("recompute_granularity recompute_method recompute_num_layers attention_dropout")
        | _keys("hidden_dropout attention_softmax_in_fp32 use_rotary_position_embeddings"),
        prefix="megatron_lm_",
        reasons=_CLIPS,
    ),
    "mpirun_config": Section(
        "accel starts the processes itself, without mpirun",
        _keys("hostfile") | _keys("ccl", False, 0, "0"),
        prefix="mpirun_",
    ),
    "fp8_config": Section(
        "fp8 is not in this version of accel",
        _keys("backend use_autocast_during_eval margin interval format amax_history_len amax_compute_algo")
        | _keys("override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim")
        # These the wizard of Accelerate writes, and its launcher does not read.
        | _keys("amax_history_length amax_compute_algorithm optimization_level"),
        prefix="fp8_",
        bare=True,
    ),
    # Earlier releases wrote this one.
    "ipex_config": Section("accel does not use IPEX", _keys("ipex use_xpu", False)),
}
