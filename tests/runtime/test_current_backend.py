"""The backend of functions that are called without an Accelerator."""

from __future__ import annotations

import os
import threading

import torch

from accel_runtime import Accelerator, PartialState
from accel_runtime.backends import connect_default_backend, current_backend, set_current_backend
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.single import Single


def test_the_current_backend_is_that_of_the_newest_accelerator_or_state(ranks):
    def create_accelerators():
        first = Accelerator()
        assert current_backend() is first._backend
        second = Accelerator(mixed_precision="bf16")
        assert current_backend() is second._backend
        assert PartialState()._backend is second._backend
        assert first._backend is not second._backend
        return True

    assert all(ranks.run(create_accelerators))


def test_the_current_backend_without_an_accelerator_comes_from_the_environment(ranks):
    def read_backend():
        set_current_backend(None)
        return current_backend().topology.world_size, current_backend() is current_backend()

    assert ranks.run(read_backend) == [(ranks.size, True)] * ranks.size


def test_each_thread_has_its_own_current_backend():
    backend = Accelerator()._backend
    backends_of_thread = []
    thread = threading.Thread(target=lambda: backends_of_thread.append(Accelerator()._backend))
    thread.start()
    thread.join()
    assert current_backend() is backend
    assert backends_of_thread[0] is not backend


def test_a_forked_process_does_not_use_the_backend_of_its_parent(monkeypatch):
    backend = Accelerator()._backend
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert current_backend() is not backend


def test_a_backend_of_another_device_is_not_used_for_the_cpu(monkeypatch):
    elsewhere = Single(current_backend().topology, DeviceRuntime(torch.device("cuda")))
    set_current_backend(elsewhere)
    assert connect_default_backend() is elsewhere
    assert connect_default_backend(cpu=True).device.type == "cpu"
