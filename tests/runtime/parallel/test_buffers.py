"""Which buffers travel."""

from __future__ import annotations

import torch

from accel_runtime.parallel.buffers import Changed


def shared(changed, sent, *buffers):
    sent.clear()
    changed.share(buffers)
    return len(sent)


def test_buffers_travel_once_and_again_when_they_were_written():
    sent = []
    changed = Changed(lambda tensor: sent.append(tensor) or tensor + 1)
    table, mean = torch.zeros(2), torch.zeros(2)
    assert shared(changed, sent, table, mean) == 2
    assert table.tolist() == mean.tolist() == [1, 1]
    assert shared(changed, sent, table, mean) == 0
    mean.add_(1)
    assert shared(changed, sent, table, mean) == 1
    assert mean.tolist() == [3, 3]


def test_a_buffer_that_is_another_tensor_now_travels():
    sent = []
    changed = Changed(lambda tensor: sent.append(tensor) or tensor)
    shared(changed, sent, torch.zeros(2))
    assert shared(changed, sent, torch.zeros(2)) == 1


def test_what_has_no_values_stays():
    assert shared(Changed(lambda tensor: tensor), [], torch.zeros(2, device="meta")) == 0
