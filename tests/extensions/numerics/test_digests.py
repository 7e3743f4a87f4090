"""Digests, summaries and sketches of tensors, and the choice of steps."""

import math

import pytest
import torch

from accel_cli.extensions.numerics.bounds import measure_difference
from accel_runtime.observe.step_records.digests import digest_tensor, list_batches, read_tensors, summarize
from accel_runtime.observe.step_records.record import (
    VERSION,
    RunHead,
    Selection,
    Summary,
    encode,
    read_record,
)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, (1 << 16) - 1, (1 << 16) + 5, 64 * (1 << 16) + 3])
def test_a_sketch_estimates_the_norm_of_a_difference(size):
    generator = torch.Generator().manual_seed(size)
    first = torch.randn(size, generator=generator)
    second = first + 1e-5 * torch.randn(size, generator=generator)
    summaries = summarize(first), summarize(second)
    exact = float((first.double() - second.double()).norm() / first.double().norm())
    assert exact / 3 < measure_difference(*summaries) < 3 * exact
    assert math.isclose(summaries[0].norm, float(first.double().norm()), rel_tol=1e-12)


def test_sketches_are_linear():
    first, second = torch.arange(100.0), torch.ones(100)
    sketches = [summarize(one).sketch for one in (first, second, 2 * first + second)]
    for one, other, both in zip(*sketches, strict=True):
        assert math.isclose(2 * one + other, both, abs_tol=1e-9)


def test_a_summary_counts_zeros_and_what_is_not_finite():
    found = summarize(torch.tensor([0.0, 3.0, -4.0, math.nan, math.inf]))
    assert (found.norm, found.largest, found.zeros, found.non_finite) == (5.0, 4.0, 0.2, 0.4)
    assert Summary.unpack(found.pack()) == found
    assert summarize(torch.tensor([1, 2])) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.tensor([]),
        torch.tensor([True, False]),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.arange(6).reshape(2, 3).t(),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tensor.dim()}",
)
def test_a_digest_is_that_of_dtype_shape_and_values(tensor):
    assert digest_tensor(tensor) == digest_tensor(tensor.clone())
    assert digest_tensor(tensor) != digest_tensor(torch.zeros(7))


def test_a_digest_differs_for_one_bit():
    first = torch.ones(100)
    second = first.clone()
    second.view(torch.int32)[50] ^= 1
    assert digest_tensor(first) != digest_tensor(second)
    assert digest_tensor(first) != digest_tensor(first.reshape(10, 10))
    assert digest_tensor(torch.zeros(2)) != digest_tensor(torch.zeros(2, dtype=torch.int32))


def test_batches_have_a_hash_for_each_sample():
    batch = {"x": torch.eye(3), "text": ["a", "b", "c"], "more": (torch.ones(3),)}
    found = {one.name: one.rows for one in list_batches("train.py:1", batch, ("4", "5", "6"))}
    assert list(found) == ["index", ".x", ".text", ".more.0", ".more[]"]
    assert {len(rows) for name, rows in found.items() if name != ".more[]"} == {3}
    assert len(set(found[".x"])) == 3
    assert len(set(found[".more.0"])) == 1


def test_samples_are_rows_of_tensors_texts_and_tensors_of_a_list():
    rows = torch.arange(6.0).view(3, 2)
    batch = {
        "x": rows,
        "images": [rows[0], rows[1]],
        "size": 3,
        "scale": torch.tensor(2.0),
        "empty": rows[:0],
    }
    columns = {one.name: one.rows for one in list_batches("train.py:1", batch)}
    assert set(columns) == {".x", ".images[]", ".images.0", ".images.1", ".scale()"}
    assert len(set(columns[".images[]"])) == 2
    assert [one.rows for one in list_batches("", (rows[1:],)) if one.name == ".0"] == [columns[".x"][1:]]
    assert [one.rows for one in list_batches("", [rows.numpy()]) if one.name == ".0"] == [columns[".x"]]
    assert not list_batches("", [rows.clone().requires_grad_() * 2, torch.nn.Parameter(rows)])


def test_tensors_that_are_read_together_have_the_summaries_of_each():
    tensors = [
        torch.randn(70000),
        torch.tensor([1.0, math.nan, 0.0]),
        torch.zeros(0),
        torch.tensor([2]),
        torch.randn(5, 7, dtype=torch.bfloat16),
        torch.tensor(1e300, dtype=torch.float64),
        torch.randn(3, 4).t(),
    ]
    found = read_tensors(tensors, lambda _: None)
    assert found == [(digest_tensor(one), summarize(one)) for one in tensors]
    assert read_tensors([torch.ones(2), torch.ones(2).to_mkldnn()], lambda _: None)[0] is not None


def test_a_selection_has_its_steps():
    assert [step for step in range(12) if Selection.parse("every:5").has_step(step)] == [1, 6, 11]
    found = Selection.parse("steps:3-4,modules")
    assert [step for step in range(12) if found.has_step(step)] == [3, 4]
    assert (found.modules, found.tensors, found.is_over(5)) == (True, False, True)
    assert Selection.parse("all") == Selection()


@pytest.mark.parametrize(
    "text", ["some", "every:0", "every:", "steps:a-b", "steps:1-", "steps:5-2", "steps:0-3", "modules:2", ""]
)
def test_an_invalid_selection_is_refused(text):
    with pytest.raises(ValueError, match="expected all, every:N or steps:A-B"):
        Selection.parse(text)


def test_a_record_that_is_cut_has_its_whole_lines_and_no_end(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{HEAD}{{"kind":"end","reason":""}}\n{{"kind":"st')
    assert read_record(path).end == ""
    path.write_text(f'{HEAD}{{"kind":"en')
    assert read_record(path).end is None
    path.write_text(HEAD[:20])
    assert read_record(path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{garbage\n", "line 2 is no record"),
        ('{"kind":"step","step":1}\n', "line 2 is no record"),
        ("[1]\n", "line 2 is no record"),
        ('{"kind":"run","version":999}\n', "its version is 999"),
    ],
)
def test_a_record_that_is_damaged_or_of_another_version_is_refused(tmp_path, text, message):
    path = tmp_path / "steps.jsonl"
    path.write_text(HEAD + text)
    with pytest.raises(ValueError, match=message):
        read_record(path)


HEAD = encode("run", RunHead(VERSION, 0, 1, "host", {"every": 1}, {}))
