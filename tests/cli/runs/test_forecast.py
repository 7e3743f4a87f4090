"""The end of a run, from the number of epochs or steps that its arguments or configuration name."""

from types import SimpleNamespace

import pytest

from accel_cli.runs.heartbeats import simplify_operation
from accel_cli.runs.snapshot import Goal, compute_run_eta, find_goal, is_resume


@pytest.mark.parametrize(
    ("arguments", "configuration", "goal"),
    [
        (["--epochs", "20"], {}, Goal(20, False, "--epochs 20")),
        (["--num-train-epochs=3.0", "--lr", "1"], {}, Goal(3, False, "--num-train-epochs=3.0")),
        (["trainer.max_steps=500"], {"epochs": 3}, Goal(500, True, "trainer.max_steps=500")),
        (["--max_steps", "-1", "--epochs", "2"], {}, Goal(2, False, "--epochs 2")),
        ([], {"train": {"num_epochs": 4}}, Goal(4, False, "train.num_epochs: 4")),
        (["--warmup_epochs", "3", "--gradient_accumulation_steps", "4", "--epochs", "all"], {}, None),
        (["20"], {"epochs": True, "steps": [1]}, None),
    ],
)
def test_the_goal_is_that_of_a_known_name(arguments, configuration, goal):
    assert find_goal(arguments, configuration) == goal


BEAT = SimpleNamespace(
    started=100.0, steps=50, epoch=1, epoch_length=10, epoch_batches=5, epoch_first=0, epoch_started=140.0
)


@pytest.mark.parametrize(
    ("goal", "changes", "is_resumed", "eta"),
    [
        (Goal(200, True, ""), {}, False, 180.0),  # 60 s for 50 steps
        (Goal(200, True, ""), {}, True, None),
        (Goal(3, False, ""), {}, False, 60.0),  # 60 s for 1.5 epochs
        (Goal(3, False, ""), {}, True, 60.0),  # 20 s for half an epoch
        (Goal(3, False, ""), {"epoch": 0}, False, 100.0),
        (Goal(3, False, ""), {"epoch_length": None}, False, None),
        (Goal(1, False, ""), {"epoch": 4}, False, 0.0),
    ],
)
def test_the_end_is_foreseen_at_the_mean_speed(goal, changes, is_resumed, eta):
    beat = SimpleNamespace(**{**vars(BEAT), **changes})
    assert compute_run_eta(goal, beat, 160.0, is_resumed=is_resumed) == eta


def test_a_run_that_continues_is_recognized_by_its_arguments():
    assert is_resume(["--resume_from", "x"])
    assert not is_resume(["--epochs", "3"])


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("reduce mean scale 1.0", "reduce()"),
        ("gather", "gather()"),
        ("backward()", "backward()"),
        ("broadcast_object of random states from rank 0", "exchange of random states"),
        ("broadcast_object_list of 1", "broadcast_object_list()"),
        ("gather_for_metrics of objects", "gather_for_metrics()"),
        ("all_gather of the loss of LBFGS", "exchange of the loss of LBFGS"),
    ],
)
def test_a_collective_is_named_in_plain_words(text, plain):
    assert simplify_operation(text) == plain
