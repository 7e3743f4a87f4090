"""The checkpointing example with slow steps, so that tests can interrupt it."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


def checkpointing(hold):
    """Return the source of the example with steps that take half a second longer after step 20 while the file `hold` exists.

    It can import the modules of the other examples from any folder. The script still trains when a test receives its output
    late and then sends a signal.
    """
    text = (EXAMPLES / "checkpointing.py").read_text(encoding="utf-8")
    head, step = "import hashlib\n", "optimizer.zero_grad()\n"
    assert text.count(head) == text.count(step) == 1
    indent = text.partition(step)[0].rpartition("\n")[2]
    slow = f"optimizer.steps >= 20 and Path({str(hold)!r}).exists() and time.sleep(0.5)\n"
    imports = f"import sys\nimport time\nfrom pathlib import Path\nsys.path.append({str(EXAMPLES)!r})\n"
    return text.replace(head, head + imports).replace(step, step + indent + slow)
