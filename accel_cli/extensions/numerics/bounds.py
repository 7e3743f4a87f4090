"""The size that a difference may have if two runs only add the same numbers in another order.

A sum of n numbers in any order differs from the exact one by at most about `LAMBDA * u * sqrt(n)` relative to the numbers, where u is the
unit roundoff of the format, with a probability above 0.999 (Higham and Mary 2019, "A new approach to probabilistic rounding error
analysis", theorem 2.4, with lambda = 4). A model is a chain of L sums, whose errors add up like those of independent ones. So a number of
the first step may differ by

    b = LAMBDA * u * sqrt(n * L)

relative to the norm of its tensor: n is the larger of the elements of the inputs on all ranks and the largest dimension of a parameter,
L the number of parameters. The differences of later steps begin with those of the parameters before, of which the record has the size,
d: what is computed from them may differ by `CONDITION * d` more. This is an assumption about the model, as is that no cancellation makes a
tensor much smaller than what it is the sum of; gradients that are noise by their size are left out. An optimizer may divide a gradient by
its size, so that an element whose sign is undetermined moves by a whole step: parameters may differ by the square root of the bound of
gradients, times the size of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from accel_runtime.observe.step_records.record import StepRecord, Summary, compare_sketches

__all__ = ["Bound", "build_bound", "measure_difference"]

LAMBDA = 4.0
CONDITION = 256.0
_UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_TF32 = 2.0**-11
_OF_8_BITS = 2.0**-3
_NOISE = 1e-5
"""Share of the norm of all gradients below which the direction of a gradient in float32 may be rounding only."""


@dataclass(frozen=True)
class Bound:
    """The bound of a step."""

    unit: float
    format: str
    summands: int
    depth: int
    before: float
    """The largest relative difference of a parameter before the step."""
    step_size: float
    """The norm of the change of the parameters in the step, relative to theirs."""
    gradient_norm: float

    @property
    def rounding(self) -> float:
        """The bound of the first step."""
        return min(LAMBDA * self.unit * math.sqrt(self.summands * self.depth), 0.5)

    @property
    def computed(self) -> float:
        """The bound of what is computed from the parameters."""
        return min(self.rounding + CONDITION * self.before, 0.5)

    @property
    def parameters(self) -> float:
        """The bound of parameters after the step."""
        return self.rounding + 2 * self.before + 2 * self.step_size * math.sqrt(self.computed)

    def explain(self) -> str:
        """Return the formula with its numbers."""
        grown = f" + {CONDITION:g} x {self.before:.1e} (parameters before the step)" if self.before else ""
        return (
            f"{LAMBDA:g} x {self.unit:.1e} ({self.format}) x sqrt({self.summands} summands x {self.depth} parameters){grown} = "
            f"{self.computed:.1e}"
        )

    def is_noise(self, summary: Summary) -> bool:
        """Return whether a gradient is so small that it may be rounding only."""
        return summary.norm < _NOISE * self.gradient_norm


def build_bound(
    step: StepRecord, world_size: int, settings: Iterable[dict[str, str]], before: float, step_size: float
) -> Bound:
    """Return the bound of a step.

    Args:
        step: A record of the step.
        world_size: The larger world size of the two runs.
        settings: The settings of the runs.
        before: The largest relative difference of a parameter before the step.
        step_size: The relative change of the parameters in the step.
    """
    formats = {
        summary.dtype for name, digest in step.parameters if (summary := step.values.get(digest)) is not None
    }
    modes = " ".join(one.mode for one in step.passes)
    formats |= {name for name in ("bfloat16", "float16") if f"torch.{name}" in modes}
    unit, name = max(
        ((_UNITS.get(one, _OF_8_BITS), one) for one in formats), default=(_UNITS["float32"], "float32")
    )
    if name == "float32" and any(
        one.get("float32_matmul_precision", "highest") != "highest" for one in settings
    ):
        unit, name = _TF32, "tf32"
    dimensions = [
        size for _, digest in step.parameters if digest in step.values for size in step.values[digest].shape
    ]
    elements = world_size * sum(one.elements for one in step.passes)
    return Bound(
        unit,
        name,
        max([elements, *dimensions, 1]),
        max(len(step.parameters), 1),
        before,
        step_size,
        step.norm,
    )


def measure_difference(first: Summary, second: Summary) -> float | None:
    """Return an estimate of the relative difference of two tensors; None if they have other shapes or formats, or other NaNs."""
    if (first.shape, first.dtype, first.non_finite) != (second.shape, second.dtype, second.non_finite):
        return None
    size = max(first.norm, second.norm)
    difference = compare_sketches(first.sketch, second.sketch)
    return difference / size if size else 0.0
