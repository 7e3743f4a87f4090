"""The checkpointing example, which goes slowly where a test takes it away."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def checkpointing(hold):
    """The example's source; from step 20 on every step takes half a second longer, as long as the file `hold` is there.

    It finds the modules of the other examples wherever it stands. However late a machine hands on what the script prints, and the signal that answers it, the script still trains.
    """
    text = (EXAMPLES / "checkpointing.py").read_text(encoding="utf-8")
    head, step = "import hashlib\n", "optimizer.zero_grad()\n"
    assert text.count(head) == text.count(step) == 1
    indent = text.partition(step)[0].rpartition("\n")[2]
    slow = f"optimizer.steps >= 20 and Path({str(hold)!r}).exists() and time.sleep(0.5)\n"
    more = f"import sys\nimport time\nfrom pathlib import Path\nsys.path.append({str(EXAMPLES)!r})\n"
    return text.replace(head, head + more).replace(step, step + indent + slow)
