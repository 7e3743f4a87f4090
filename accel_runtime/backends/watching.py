"""What makes every step slow on a device that compiles graphs, noticed from its own counters and said once, with the line."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from accel_runtime import tree
from accel_runtime.exchange.callsite import TORCH, CallSite, call_site

__all__ = ["Counts", "Watch"]

_LOG = logging.getLogger("accel_runtime.xla")
_STEPS = 10
"""How many steps are looked at together."""
_MANY = 8
"""In how many of them something has to happen to count as happening at every step: now and then is a script's right."""
_FETCHES = frozenset(
    (
        "item",
        "cpu",
        "numpy",
        "tolist",
        "to",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__format__",
        "__repr__",
    )
)


class Counts(NamedTuple):
    """What the device has done so far."""

    compiled: int
    """Graphs."""
    fetched: int
    """Transfers of values to the host."""


class _Step(NamedTuple):
    compiled: int
    fetched: int
    shapes: tuple[tuple[int, ...], ...]
    """Of the batch."""


class Watch:
    """Looks at the steps of a loop, until it has said what there is to say.

    Args:
        counts: Reads the counters.
        device: Whose tensors are fetched.
    """

    def __init__(self, counts: Callable[[], Counts], device: torch.device) -> None:
        self._counts, self._device = counts, device
        self._steps: deque[_Step] = deque(maxlen=_STEPS)
        self._before: Counts | None = None
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._spy: _Spy | None = None
        self._said: set[str] = set()

    def begin(self) -> None:
        """A loop begins: what was done before belongs to no step."""
        self._before = None

    def handed(self, batch: Any) -> None:
        """The next batch is about to be handed out: what was computed on the one before has been sent off."""
        self._unmask()
        if len(self._said) == len(Counts._fields):
            return
        now = self._counts()
        if self._before is not None:
            done = now.compiled - self._before.compiled, now.fetched - self._before.fetched
            self._steps.append(_Step(*done, self._shapes))
            self._look()
        self._before = now
        self._shapes = tuple(
            tuple(leaf.shape) for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor)
        )

    def end(self) -> None:
        """The loop is over, or left."""
        self._unmask()

    def _look(self) -> None:
        if len(self._steps) < _STEPS:
            return
        if self._often("compiled"):
            self._said.add("compiled")
            self._say_compiled()
        if self._often("fetched"):
            # The counters say that it happens, and not where: the next step is watched call by call.
            self._spy = _Spy(self._device)
            self._spy.__enter__()  # type: ignore[no-untyped-call]

    def _often(self, what: str) -> bool:
        return what not in self._said and sum(getattr(step, what) > 0 for step in self._steps) >= _MANY

    def _say_compiled(self) -> None:
        graphs = sum(step.compiled for step in self._steps)
        shapes = list(dict.fromkeys(step.shapes for step in self._steps))
        if len(shapes) > 1:
            told = ", then ".join(", ".join(str(list(shape)) for shape in batch) for batch in shapes[:2])
            why = f"the shapes of the batches change ({told}). Pad them to a few lengths that come again"
        else:
            why = (
                "the batches have one shape, so a size, an index or a slice in the loop changes. Keep sizes the same, and "
                "put numbers that change into a tensor on the device"
            )
        _LOG.warning(
            "%s: the last %d steps compiled %d graphs, which takes longer than to run them: %s.",
            call_site(),
            _STEPS,
            graphs,
            why,
        )

    def _unmask(self) -> None:
        spy, self._spy = self._spy, None
        if spy is None:
            return
        spy.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for place, call in list(spy.seen.items())[:1]:
            self._said.add("fetched")
            _LOG.warning(
                "%s: %s fetches a value from the device at every step, and waits for all that was computed until there. Add "
                "values up on the device (total += loss.detach()), and fetch them every so many steps.",
                place,
                call,
            )


class _Spy(TorchFunctionMode):
    """Notes which lines fetch values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type
        self.seen: dict[CallSite, str] = {}

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in _FETCHES and self._is_there(args[0]) and not self._is_there(found):
            self.seen.setdefault(call_site(TORCH), f"{name}()")
        return found

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self._type
