"""Floating-point operations of one step, by torch's FlopCounterMode, and the rates that devices can reach.

Standard library only at the top: torch is imported by the script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["PEAK_FLOPS", "StepFlops", "find_peak_flops"]

MEASURED_STEP = 2
"""Number of steps before the one that is measured: the first ones allocate and compile."""

_TERA = 10**12
PEAK_FLOPS: Mapping[str, Mapping[str, int]] = {
    # NVIDIA data sheets, dense rates of tensor cores (those of "with sparsity" halved), float32 without them.
    "B200": {"half": 2250 * _TERA, "tf32": 1120 * _TERA, "float32": 75 * _TERA},
    "H200": {"half": 989 * _TERA, "tf32": 494 * _TERA, "float32": 67 * _TERA},
    "H100 PCIe": {"half": 756 * _TERA, "tf32": 378 * _TERA, "float32": 51 * _TERA},
    "H100 NVL": {"half": 835 * _TERA, "tf32": 417 * _TERA, "float32": 60 * _TERA},
    "H100": {"half": 989 * _TERA, "tf32": 494 * _TERA, "float32": 67 * _TERA},
    "A100": {"half": 312 * _TERA, "tf32": 156 * _TERA, "float32": 19_500_000_000_000},
    "L40S": {"half": 362 * _TERA, "tf32": 183 * _TERA, "float32": 91_600_000_000_000},
    "L4": {"half": 121 * _TERA, "tf32": 60 * _TERA, "float32": 30_300_000_000_000},
    "V100": {"half": 125 * _TERA, "float32": 15_700_000_000_000},
    "T4": {"half": 65 * _TERA, "float32": 8_100_000_000_000},
    # AMD data sheets; torch sees each half of an MI250X as a device.
    "MI300X": {"half": 1307 * _TERA, "float32": 163_400_000_000_000},
    "MI250X": {"half": 191_500_000_000_000, "float32": 47_900_000_000_000},
}
"""Operations per second by a word of the device's name and the number format of matrix products; `half` is float16 and bfloat16.

docs/design/throughput.md names the data sheets.
"""


def find_peak_flops(device: str, dtype: str, *, allows_tf32: bool) -> int:
    """Return the operations per second that a device can execute in a number format; 0 if they are not known.

    Args:
        device: The name of the device, as torch returns it.
        dtype: The number format of matrix products, such as `bfloat16`.
        allows_tf32: If true, products of float32 may be rounded to TF32.
    """
    words = f" {device.replace('-', ' ')} "
    for name, rates in PEAK_FLOPS.items():
        if all(f" {word} " in words for word in name.split()):
            if dtype in {"float16", "bfloat16"}:
                return rates["half"]
            if dtype == "float32":
                return rates.get("tf32", rates["float32"]) if allows_tf32 else rates["float32"]
            return 0
    return 0


class StepFlops:
    """Counts the operations of one step of this rank, between the ends of two steps."""

    def __init__(self) -> None:
        self._counter: Any = None
        self._results: Counter[tuple[Any, Any]] = Counter()
        """Elements of the results of the counted kernels, by number format and device."""

    def check_step(self, progress: Any) -> bool:
        """Begin to count, or end and record the result, after a step of the progress of this process; return True after the end."""
        if self._counter is None:
            if progress.steps >= MEASURED_STEP:
                self._begin()
            return False
        self._end(progress)
        return True

    def _begin(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: PLC0415 - only if it is asked for

        formulas = {kernel: _FormulaOfResults(each, self._results) for kernel, each in flop_registry.items()}
        self._counter = FlopCounterMode(display=False, custom_mapping=formulas)
        # Its hooks on all modules are for a table by module, and make torch.compile warn.
        self._counter.mod_tracker = _NoModules()
        self._counter.__enter__()

    def _end(self, progress: Any) -> None:
        import torch  # noqa: PLC0415 - as above

        self._counter.__exit__(None, None, None)
        (dtype, device), _ = max(self._results.items(), key=lambda item: item[1], default=((None, None), 0))
        peak = 0
        if device is not None and device.type != "cpu":
            name = getattr(torch.get_device_module(device.type), "get_device_name", lambda _: "")(device)
            allows_tf32 = torch.get_float32_matmul_precision() != "highest"
            peak = find_peak_flops(name, str(dtype).removeprefix("torch."), allows_tf32=allows_tf32)
        progress.record_flops(self._counter.get_total_flops(), peak)


class _NoModules:
    """Tracks no modules for a FlopCounterMode."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _FormulaOfResults:
    """A formula of the operations of a kernel, which also records the number format and device of its result."""

    _get_raw = True
    """Tells FlopCounterMode to pass tensors instead of their shapes."""

    def __init__(self, formula: Any, results: Counter[tuple[Any, Any]]) -> None:
        self._formula, self._results = formula, results

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        result = out_val[0] if isinstance(out_val, (list, tuple)) else out_val
        if hasattr(result, "dtype"):
            self._results[result.dtype, result.device] += result.numel()
        return int(self._formula(*args, out_val=out_val, **kwargs))
