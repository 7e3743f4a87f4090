"""Operations that make every step slow on a compiling device are reported once, with their line."""

from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")


def collect_messages(fetches, workers):
    """Train for two epochs with an operation in each step, and return the log messages."""
    import logging
    import threading

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from accel_runtime import Accelerator

    messages, replica = [], threading.get_ident()
    handler = logging.Handler()
    handler.emit = lambda record: record.thread == replica and messages.append(record.getMessage())
    logger = logging.getLogger("accel_runtime.xla")
    logger.addHandler(handler)
    accelerator = Accelerator()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.rand(60, 4)), batch_size=4, num_workers=workers)
    if fetches == "lengths":
        lengths = iter(range(1, 1000))
        loader = DataLoader(
            TensorDataset(torch.rand(60, 4)), 4, collate_fn=lambda _: (torch.rand(4, next(lengths), 4),)
        )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step = 0
    for _ in range(2):
        for (batch,) in loader:
            step, rows = step + 1, batch
            if fetches == "slice":
                rows = batch.repeat(step, 1)
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if fetches == "item":
                loss.item()
            if fetches == "text":
                f"{loss:.2f}"
            if fetches == "now and then" and step % 5 == 0:
                loss.item()
    logger.removeHandler(handler)
    return messages


def test_a_loop_that_rarely_fetches_values_is_not_reported(clusters):
    for fetches, workers in (("", 0), ("", 2), ("now and then", 0)):
        assert clusters["xla 1"].run(collect_messages, fetches, workers) == [[]]


@pytest.mark.parametrize(("fetches", "call"), [("item", "item()"), ("text", "__format__()")])
def test_fetching_a_value_at_every_step_is_reported_once_with_its_line(clusters, fetches, call):
    [[message]] = clusters["xla 1"].run(collect_messages, fetches, 0)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = [text.strip() for text in lines].index(f'if fetches == "{fetches}":') + 2
    assert (
        f"test_watching.py:{line} (collect_messages): {call} fetches a value from the device at every step"
        in message
    )


def test_changing_batch_shapes_are_reported_once_with_two_examples(clusters):
    [[message]] = clusters["xla 1"].run(collect_messages, "lengths", 0)
    assert "test_watching.py:" in message
    assert "the last 10 steps compiled" in message
    assert "the shapes of the batches change ([4, " in message


def test_changing_sizes_inside_the_loop_are_reported_once(clusters):
    [[message]] = clusters["xla 1"].run(collect_messages, "slice", 0)
    assert "a size, an index or a slice in the loop changes" in message


def test_only_the_first_replica_reports(clusters):
    first, *others = clusters["xla 2"].run(collect_messages, "item", 0)
    assert len(first) == 1
    assert not any(others)


def described():
    import torch
    from torch import nn

    from accel_runtime import Accelerator

    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(2, 2))
    return str(accelerator.describe()), torch.__version__


def test_the_description_contains_the_device_its_variables_and_graphs(clusters):
    for cluster in (clusters["xla 1"], clusters["xla 2"]):
        for text, version in cluster.run(described):
            assert f"torch_xla  2.9.0 with torch {version}, CPU device" in text
            assert f"CPU_NUM_DEVICES={cluster.size} PJRT_DEVICE=CPU" in text
            assert " compiled, " in text
            assert ("averaged in the graph" in text) == (cluster.size > 1)
