"""Which backend functions without an Accelerator use."""

from __future__ import annotations

import os
import threading

from accel_runtime import Accelerator, PartialState
from accel_runtime.backends import connect_default_backend, current_backend, set_current_backend
from accel_runtime.backends.single import Single


def test_it_is_that_of_the_newest_accelerator_or_state(ranks):
    def newest():
        first = Accelerator()
        assert current_backend() is first._backend
        second = Accelerator(mixed_precision="bf16")
        assert current_backend() is second._backend
        assert PartialState()._backend is second._backend
        assert first._backend is not second._backend
        return True

    assert all(ranks.run(newest))


def test_without_one_it_is_what_the_environment_says(ranks):
    def found():
        set_current_backend(None)
        return current_backend().topology.world_size, current_backend() is current_backend()

    assert ranks.run(found) == [(ranks.size, True)] * ranks.size


def test_every_thread_has_its_own():
    mine = Accelerator()._backend
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(Accelerator()._backend))
    thread.start()
    thread.join()
    assert current_backend() is mine
    assert theirs[0] is not mine


def test_a_forked_process_does_not_take_its_parent_for_itself(monkeypatch):
    mine = Accelerator()._backend
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert current_backend() is not mine


def test_one_on_another_device_is_not_taken_for_the_cpu(monkeypatch):
    elsewhere = Single(current_backend().topology, type("Device", (), {"type": "cuda"})())
    set_current_backend(elsewhere)
    assert connect_default_backend() is elsewhere
    assert connect_default_backend(cpu=True).device.type == "cpu"
