"""Parameters and buffers that are no plain numbers train as on one process, or are refused by name before the first step.

The classes here imitate how bitsandbytes and torchao store weights; tests/runtime/parallel/test_qlora.py has the real ones.
"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accel_runtime.backends.quantized_tensors import keep_weights_unpacked, keeps_dtype
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import CheckpointError

FROZEN = [
    *(
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64),
]
X = torch.linspace(-1, 1, 32).view(4, 8)


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def fill(dtype, seed=0):
    values = torch.arange(15) * 7 % 11 + seed
    return (values % 2 == 0) if dtype is torch.bool else values.to(dtype).view(5, 3)


class Tables(nn.Module):
    """A layer beside a frozen parameter and a buffer of each dtype, which differ between the ranks before `prepare`."""

    def __init__(self, seed, *, buffers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.tables = nn.ParameterList(
            [nn.Parameter(fill(dtype, seed), requires_grad=False) for dtype in FROZEN]
        )
        for index, dtype in enumerate(FROZEN if buffers else ()):
            self.register_buffer(f"buffer{index}", fill(dtype, seed))
        self.seen = []

    def forward(self, x):
        self.seen = [raw(tensor) for tensor in (*self.tables, *self.buffers())]
        return self.layers[0](x)


def accelerate(strategy, mixed_precision="bf16", **options):
    config = None if strategy == "ddp" else ParallelismConfig(dp_shard_size=2)
    return Accelerator(parallelism_config=config, mixed_precision=mixed_precision, **options)


def read_tables(strategy):
    accelerator = accelerate(strategy)
    net = Tables(accelerator.process_index, buffers=strategy == "shard")
    model = accelerator.prepare(net)
    accelerator.backward(model(X).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    state = accelerator.get_state_dict(model, everywhere=True)
    names = [name for name in state if not name.startswith("layers")]
    return net.seen, [raw(state[name]) for name in names]


@pytest.mark.parametrize("strategy", ["ddp", "shard"])
def test_frozen_tensors_of_every_dtype_keep_the_bits_of_the_first_rank(pair, strategy):
    expected = [raw(fill(dtype)) for dtype in FROZEN] * (2 if strategy == "shard" else 1)
    for seen, saved in pair.run(read_tables, strategy):
        assert seen == expected
        assert saved == expected


class Packed(nn.Parameter):
    """A parameter like Params4bit of bitsandbytes: the values are bytes in storage of any dtype, and the scale is an attribute."""

    def __new__(cls, data, quant_state=None, *, bnb_quantized=True):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state, self.bnb_quantized = quant_state, bnb_quantized
        return self


class PackedLinear(nn.Module):
    """A frozen quantized layer with an adapter."""

    def __init__(self, storage, scale, *, is_quantized=True):
        super().__init__()
        values = torch.arange(64).to(torch.int8).sub(32).view(storage)
        # The pattern of bytes has numbers in it that bfloat16 rounds.
        self.state = SimpleNamespace(absmax=torch.full((8,), scale), offset=torch.tensor(scale), state2=None)
        self.weight = Packed(values.view(-1, 1), self.state, bnb_quantized=is_quantized)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        text = json.dumps({"blocksize": 8, "nested_offset": self.state.offset.item()})
        destination[f"{prefix}weight.absmax"] = self.state.absmax
        destination[f"{prefix}weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*text.encode()]).byte()

    def forward(self, x):
        weight = self.weight.detach().reshape(-1).view(torch.int8).view(8, 8).float() / 32
        return x @ (weight * self.state.absmax) + self.b(self.a(x))


class PackedNet(nn.Module):
    def __init__(self, storage, scale=0.5, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([PackedLinear(storage, scale, **options) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train_packed(strategy, storage):
    """Return the losses and the adapters after some steps; another rank begins with other scales."""
    accelerator = accelerate(strategy) if strategy else None
    rank = accelerator.process_index if accelerator else 0
    model = PackedNet(storage, 0.5 + rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    x, backward = X, torch.Tensor.backward
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        x, backward = X.chunk(2)[rank], accelerator.backward
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=accelerator is None):
            output = model(x)
        loss = output.float().square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(
            loss.item() if accelerator is None else accelerator.reduce(loss.detach(), "mean").item()
        )
    state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model, everywhere=True)
    text = "" if accelerator is None else str(accelerator.describe())
    return losses, {name: value.tolist() for name, value in state.items() if ".a." in name}, text


def compare_packed():
    storages = (torch.uint8, torch.float16, torch.float32)
    return {
        (strategy, storage): train_packed(strategy, storage)
        for strategy in ("ddp", "shard")
        for storage in storages
    }


def test_quantized_weights_in_any_storage_train_as_on_one_process(pair):
    for results in pair.run(compare_packed):
        for (strategy, storage), (losses, adapters, text) in results.items():
            expected_losses, expected_adapters, _ = train_packed(None, storage)
            assert losses == pytest.approx(expected_losses, rel=5e-3), (strategy, storage)
            for name, values in expected_adapters.items():
                torch.testing.assert_close(
                    torch.tensor(adapters[name]), torch.tensor(values), atol=2e-2, rtol=0
                )
            if strategy == "shard":
                stored = str(storage).removeprefix("torch.")
                assert f"{stored}" in text


def save_packed(folder):
    """Save checkpoints and exports with one strategy; return the scales after each was loaded with another."""
    for strategy in ("ddp", "shard"):
        accelerator = accelerate(strategy)
        model = accelerator.prepare(PackedNet(torch.uint8, 0.1))
        accelerator.save_state(f"{folder}/{strategy}/state")
        accelerator.save_model(model, f"{folder}/{strategy}/export")
    results = []
    for strategy, saved in (("ddp", "shard"), ("shard", "ddp"), ("shard", "shard")):
        for load in ("load_state", "load_model"):
            accelerator = accelerate(strategy)
            net = PackedNet(torch.uint8, 2.0)
            model = accelerator.prepare(net)
            if load == "load_state":
                accelerator.load_state(f"{folder}/{saved}/state")
            else:
                accelerator.load_model(model, f"{folder}/{saved}/export")
            results.append([(layer.state.absmax.tolist(), layer.state.offset.item()) for layer in net.layers])
    return results


def test_scales_of_packed_weights_are_restored_from_checkpoints_and_exports_of_any_layout(pair, memory):
    scale = torch.tensor(0.1).item()
    for results in pair.run(save_packed, str(memory)):
        assert results == [[([scale] * 8, scale)] * 2] * 6


def test_packed_weights_of_another_format_are_refused_by_name(memory):
    accelerator = Accelerator()
    accelerator.prepare(PackedNet(torch.uint8))
    accelerator.save_state(memory / "state")
    other = PackedNet(torch.uint8, 2.0)
    write = other.layers[1]._save_to_state_dict

    def write_other(destination, prefix, keep_vars):
        write(destination, prefix, keep_vars)
        destination[f"{prefix}weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*b"{}"]).byte()

    other.layers[1]._save_to_state_dict = write_other
    accelerator = Accelerator()
    accelerator.prepare(other)
    with pytest.raises(
        CheckpointError, match=r"Cannot load layers\.1\.weight: .*blocksize is 8 as saved and None here"
    ):
        accelerator.load_state(memory / "state")


class Wrapped(torch.Tensor):
    """A tensor like those of torchao: integers and a scale, without operations that divide it."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if str(func) in {"aten.detach.default", "aten._to_copy.default"}:
            return cls(args[0].values, args[0].scale)
        if str(func) not in {"aten.mm.default", "aten.t.default"}:
            raise NotImplementedError(str(func))
        plain = tree_map(lambda t: t.values.float() * t.scale if isinstance(t, cls) else t, args)
        return func(*plain, **(kwargs or {}))


class WrappedNet(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(
            Wrapped(torch.arange(64).view(8, 8).to(torch.int8), torch.tensor(0.01 + seed)),
            requires_grad=False,
        )
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x @ self.weight)


def train_wrapped():
    accelerator = Accelerator()
    model = WrappedNet(accelerator.process_index)
    prepared = accelerator.prepare(model)
    accelerator.backward(prepared(X.chunk(2)[accelerator.process_index]).square().mean())
    return model.weight.scale.item(), model.layer.weight.grad.tolist()


def test_checkpoints_refuse_tensor_subclasses_by_name(tmp_path):
    accelerator = Accelerator()
    accelerator.prepare(WrappedNet())
    with pytest.raises(CheckpointError, match=r"model/weight cannot be saved: .*plain memory \(Wrapped\)"):
        accelerator.save_state(tmp_path / "state")


def test_tensor_subclasses_train_with_ddp_which_sends_their_inner_tensors(pair):
    model = WrappedNet()
    model(X).square().mean().backward()
    for scale, gradient in pair.run(train_wrapped):
        assert scale == pytest.approx(0.01)
        torch.testing.assert_close(torch.tensor(gradient), model.layer.weight.grad)


class Eight(nn.Module):
    """A layer like Linear8bitLt, whose scales are attributes of the parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
        self.weight.SCB, self.weight.has_fp16_weights = torch.ones(8), False
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x @ (self.weight.float() * self.weight.SCB))


def with_tensor(**tensors):
    def build():
        net = nn.Sequential(nn.Linear(8, 8))
        for name, tensor in tensors.items():
            net[0].register_parameter(name, tensor) if isinstance(tensor, nn.Parameter) else net[
                0
            ].register_buffer(name, tensor)
        return net

    return build


def float8():
    return with_tensor(scale=nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)))()


def nibbles():
    packed = torch.ones(4, 4, dtype=torch.uint8).view(torch.int4)
    return with_tensor(packed=nn.Parameter(packed, requires_grad=False))()


REFUSED = {
    "trained float8, ddp": (
        "ddp",
        float8,
        "Cannot train 0.scale of Sequential .*: it is float8_e4m3fn, .*Freeze it",
    ),
    "trained float8, shard": (
        "shard",
        float8,
        "Cannot train 0.scale of Sequential .*: it is float8_e4m3fn, .*Freeze it",
    ),
    "int4": (
        "shard",
        nibbles,
        "Cannot shard 0.packed of Sequential: it is int4, of which .*Pack it into uint8",
    ),
    "8-bit": (
        "shard",
        Eight,
        "Cannot shard weight of Eight: it is int8, 8-bit .*load_in_4bit.*ignore: .'weight'.",
    ),
    "not quantized": (
        "shard",
        lambda: PackedNet(torch.float32, is_quantized=False),
        r"Cannot shard layers.0.weight of PackedNet: .*not quantized yet.*Call model.to\(accelerator.device\)",
    ),
    "subclass": (
        "shard",
        WrappedNet,
        "Cannot shard weight of WrappedNet: it is float32, Wrapped, .*dp_shard",
    ),
    "int16 buffer": (
        "ddp",
        with_tensor(table=torch.ones(3, dtype=torch.int16)),
        "Buffer '0.table' of Sequential cannot be broadcast .*: it is int16, .*Convert it",
    ),
}


def refuse_all():
    messages = {}
    for name, (strategy, build, _) in REFUSED.items():
        try:
            accelerate(strategy).prepare(build())
            messages[name] = ""
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_tensors_that_cannot_be_trained_are_refused_by_name_with_the_cure(pair):
    for messages in pair.run(refuse_all):
        for name, (_, _, pattern) in REFUSED.items():
            assert pytest.RaisesExc(ValueError, match=pattern).matches(ValueError(messages[name])), messages[
                name
            ]


def train_ignored():
    results = []
    for build in (Eight, WrappedNet):
        accelerator = accelerate(
            "shard",
            "no",
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="weight"),
        )
        model = accelerator.prepare(build())
        accelerator.backward(model(X.chunk(2)[accelerator.process_index]).square().mean())
        results.append(model.layer.weight.grad.full_tensor().tolist())
    return results


def test_what_cannot_be_divided_trains_if_it_is_ignored(pair):
    for gradients in pair.run(train_ignored):
        for build, gradient in zip((Eight, WrappedNet), gradients, strict=True):
            model = build()
            model(X).square().mean().backward()
            torch.testing.assert_close(torch.tensor(gradient), model.layer.weight.grad)


def divide_packed():
    net = nn.Sequential(nn.Linear(8, 8))
    net[0].weight = PackedLinear(torch.uint8, 0.5).weight
    net._tp_plan = {"0": "colwise"}
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    try:
        accelerator.prepare(net)
    except ValueError as error:
        return str(error)
    return ""


def test_quantized_layers_are_refused_by_tensor_parallelism_and_by_other_strategies(pair):
    for message in pair.run(divide_packed):
        assert "Tensor parallelism cannot train 0.weight of Sequential: it is uint8, 4-bit weights" in message
    with pytest.raises(
        ValueError, match=r"cannot train layers.0.weight of PackedNet.*Load the model without"
    ):
        Strategy(SimpleNamespace()).check_tensors(PackedNet(torch.uint8))


def test_copies_of_a_quantized_weight_keep_their_dtype():
    weight = PackedLinear(torch.float16, 1.0).weight
    assert keeps_dtype(weight)
    assert not keeps_dtype(nn.Parameter(copy.deepcopy(weight.detach().clone().data)))


def test_evaluation_of_sharded_4_bit_weights_on_a_cpu_does_not_change_their_layout():
    model = PackedNet(torch.uint8)
    model.layers[0].support_avx512bf16_for_cpu = 1  # as bitsandbytes sets it
    keep_weights_unpacked(model)
    assert model.layers[0].support_avx512bf16_for_cpu == 0
    assert not hasattr(model.layers[1], "support_avx512bf16_for_cpu")
