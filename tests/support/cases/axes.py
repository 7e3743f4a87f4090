"""Pairs of parallel axes, and what each of them is tested to do or to refuse: the table of `docs/which-axis.md`.

Another axis is a row of `AXES`, and what it refuses rows of `REFUSALS`: the cases, the page and the tests follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Keys of the section `parallel:` of a profile, each of which has two ranks in a layout."""

OPERATIONS = (
    "save",
    "save within a cycle",
    "load at another layout",
    "export",
    "clip",
    "accumulation",
    "compile",
    "bf16",
)
"""Columns of the table."""


@dataclass(frozen=True)
class Layout:
    """A row of the table: no axis, one, or two."""

    axes: tuple[str, ...]

    @property
    def name(self):
        """Return the name of the row."""
        return " x ".join(f"`{axis}`" for axis in self.axes) or "none (DDP)"

    @property
    def sizes(self):
        """Return the size of each axis."""
        return dict.fromkeys(self.axes, 2)

    @property
    def world_size(self):
        """Return the number of ranks; without axes two replicas."""
        return 2 ** max(len(self.axes), 1)

    def __str__(self):
        return "-".join(self.axes) or "none"


@dataclass(frozen=True)
class Refusal:
    """An operation that raises an error in every layout with some axes."""

    axes: frozenset[str]
    operation: str
    sentence: str
    """The message of the error."""


LAYOUTS = tuple(Layout(axes) for count in range(3) for axes in combinations(AXES, count))

_PARTIAL = (
    "Cannot save in the middle of an accumulation cycle: the gradient of norm.weight is a partial sum of tensor parallelism, and "
    "completing it now would round differently. Save at the end of a cycle."
)
_BOTH = "Invalid parallel.sp 2: parallel.cp is 2, and both split sequences. Set one of them."
REFUSALS = (
    *(Refusal(frozenset({axis, "tp"}), "save within a cycle", _PARTIAL) for axis in AXES if axis != "tp"),
    *(Refusal(frozenset({"cp", "sp"}), operation, _BOTH) for operation in OPERATIONS),
)
"""Errors of layouts; under `tp` the plan has a module of the style `sequence_parallel`."""


def find_refusal(layout, operation):
    """Return the refusal of a cell, or None if the operation works there."""
    refusals = (r for r in REFUSALS if r.operation == operation and r.axes <= set(layout.axes))
    return next(refusals, None)


def write_table():
    """Return a table in Markdown, with a row for all layouts that do the same, and the sentences of its refusals."""
    sentences = list(dict.fromkeys(refusal.sentence for refusal in REFUSALS))

    def write_cell(layout, operation):
        refusal = find_refusal(layout, operation)
        return "works" if refusal is None else f"refused ({sentences.index(refusal.sentence) + 1})"

    names: dict[tuple[str, ...], list[str]] = {}
    for layout in LAYOUTS:
        names.setdefault(tuple(write_cell(layout, operation) for operation in OPERATIONS), []).append(
            layout.name
        )
    rows = [
        ("", *OPERATIONS),
        ("---",) * (len(OPERATIONS) + 1),
        *((", ".join(layouts), *cells) for cells, layouts in names.items()),
    ]
    table = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
    numbered = "\n".join(f"{number}. `{sentence}`" for number, sentence in enumerate(sentences, 1))
    return f"{table}\n\n{numbered}\n" if numbered else f"{table}\n"
