"""Fixtures of the tests of checkpoints, whose files these tests read and write."""

from tests.runtime.checkpoint.conftest import _by_value, memory, module_memory, some

__all__ = ["_by_value", "memory", "module_memory", "some"]
