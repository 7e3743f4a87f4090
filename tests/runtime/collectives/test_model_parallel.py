"""Results of model-parallel ranks: each counts once, and unjoined sequence shards are rejected."""

from __future__ import annotations

import pytest
import torch

from accel_runtime.data.metrics import drop_model_parallel_duplicates
from accel_runtime.environment.topology import RankGrid

NAN = float("nan")
LAYERS = RankGrid((("data", 2), ("tensor", 2)))
SEQUENCES = RankGrid((("data", 2), ("sequence", 2), ("tensor", 2)))


def test_the_result_of_the_first_model_parallel_rank_is_used():
    assert drop_model_parallel_duplicates(list("aabb"), LAYERS) == ["a", "b"]
    assert drop_model_parallel_duplicates(list("abcd"), LAYERS) == ["a", "c"], (
        "who divides layers is not compared"
    )
    assert drop_model_parallel_duplicates(list("abcd"), RankGrid((("data", 4),))) == list("abcd")


@pytest.mark.parametrize("same", ["a", 1.5, torch.tensor([1.0, NAN]), {"x": [torch.tensor(3), "y"]}, []])
def test_equal_results_of_context_parallel_ranks_are_accepted(same):
    # Parts of four ranks: two places of the sequence, two parts of every layer.
    assert len(drop_model_parallel_duplicates([same] * 8, SEQUENCES)) == 2


@pytest.mark.parametrize(
    ("first_result", "second_result"),
    [
        ("a", "b"),
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0])),
        (torch.tensor([1]), torch.tensor([1.0])),
        ({"x": [torch.tensor(3)]}, {"x": [torch.tensor(4)]}),
        (["a"], ["a", "b"]),
    ],
)
def test_different_results_of_context_parallel_ranks_are_rejected(first_result, second_result):
    assert drop_model_parallel_duplicates([first_result, second_result] * 4, SEQUENCES) == [
        first_result,
        first_result,
    ], "ranks 0 and 2 divide the sequence"
    with pytest.raises(ValueError, match=r"\(cp: 2\).*gather_sequence"):
        drop_model_parallel_duplicates(
            [
                first_result,
                first_result,
                first_result,
                first_result,
                first_result,
                first_result,
                second_result,
                second_result,
            ],
            SEQUENCES,
        )
