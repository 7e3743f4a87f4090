"""Names of parameters do not depend on `torch.compile`, activation checkpointing or data parallelism around modules."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.training.models import ResidualNet
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from accel_runtime import Accelerator, ParallelismConfig
from accel_runtime.foundation import module_names

LAYOUTS = {"one process": (1, {}), "DDP": (2, {}), "dp_shard": (2, {"dp_shard_size": 2})}
WAYS = (
    "plain",
    "compiled before",
    "compiled after",
    "regions before",
    "regions after",
    "checkpointed",
    "both",
)
X = torch.linspace(-1, 1, 32).view(4, 8)


def build_net(seed=0):
    torch.manual_seed(seed)
    net = ResidualNet(8, inputs=8, norm=nn.LayerNorm)
    net.blocks[0].register_buffer("seen", torch.full((2,), float(seed)))
    return net


def compile_module(module):
    return torch.compile(module, backend="eager")


def ignore_warnings(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch during compilation
        return function(*args)


def replace_blocks(model, wrap):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)


def build_run(way, sizes, seed):
    """Return an accelerator, a model that is wrapped in a way, and an optimizer, after one step."""
    torch._dynamo.reset()
    accelerator = Accelerator(**({"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}))
    model = build_net(seed)
    if way in {"checkpointed", "both"}:
        replace_blocks(model, checkpoint_wrapper)
    if way in {"regions before", "both"}:
        replace_blocks(model, compile_module)
    if way in {"compiled before", "both"}:
        model = compile_module(model)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1 + seed))
    if way == "regions after":
        replace_blocks(model, compile_module)
    if way == "compiled after":
        model = compile_module(model)
    with accelerator.accumulate(model):
        accelerator.backward(model(X).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer


def read_state(accelerator, model, optimizer):
    """Return the state of the model and the moments of the optimizer, in full, under the names of the script."""
    state = accelerator.get_state_dict(model, everywhere=True)
    moments = {}
    for name, parameter in module_names.named_parameters(accelerator.unwrap_model(model)):
        value = optimizer.state[parameter]["exp_avg"]
        moments[f"moment of {name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: value.clone() for name, value in (state | moments).items()}


def save_all(folder, layout, ways):
    """Save a checkpoint and an export in every way; return the states by way."""
    states = {}
    for number, way in enumerate(ways):
        run = build_run(way, LAYOUTS[layout][1], number)
        run[0].save_state(folder / layout / way)
        run[0].save_model(run[1], folder / layout / f"{way} export")
        states[way] = read_state(*run)
    return states


def load_all(folder, layout, ways, sources):
    """Load a checkpoint and an export of every way in every way; the layouts that saved them alternate."""
    states = {}
    for number, way in enumerate(ways):
        run = build_run(way, LAYOUTS[layout][1], 100)
        for index, saved_way in enumerate(ways):
            source = sources[(number + index) % len(sources)]
            run[0].load_state(folder / source / saved_way)
            state = read_state(*run)
            with torch.no_grad():
                for parameter in run[1].parameters():
                    parameter.zero_()
            run[0].load_model(run[1], folder / source / f"{saved_way} export")
            states[way, saved_way, source] = state, read_state(*run)
    return states


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "ways"),
    [
        (tuple(LAYOUTS), ("plain", "compiled after", "both")),
        pytest.param(tuple(LAYOUTS), WAYS, marks=pytest.mark.full),
    ],
    ids=["some", "all"],
)
def test_a_checkpoint_and_an_export_load_however_modules_are_wrapped_when_they_are_saved_and_loaded(
    clusters, tmp_path, layouts, ways
):
    saved = {}
    for layout in layouts:
        states = clusters[LAYOUTS[layout][0]].run(ignore_warnings, save_all, tmp_path, layout, ways)
        saved[layout] = states[0]
    names = list(build_net().state_dict())
    for layout, states in saved.items():
        for way, state in states.items():
            assert [name for name in state if " " not in name] == names, (layout, way)
            exported = load_file(tmp_path / layout / f"{way} export" / "model.safetensors")
            assert sorted(exported) == sorted(names), (layout, way)
            build_net().load_state_dict(exported)
    for layout in layouts:
        results = clusters[LAYOUTS[layout][0]].run(ignore_warnings, load_all, tmp_path, layout, ways, layouts)
        for states in results:
            for (way, saved_way, source), loaded in states.items():
                expected = saved[source][saved_way]
                for state in loaded:
                    assert state.keys() == expected.keys()
                    wrong = [name for name in state if not torch.equal(state[name], expected[name])]
                    assert not wrong, (layout, way, source, saved_way, wrong)


def test_only_attributes_of_wrappers_are_left_out_of_names():
    inner = nn.ModuleDict({"module": nn.Linear(1, 1), "_orig_mod": nn.Linear(1, 1)})
    model = nn.ModuleDict({"module": nn.DataParallel(inner), "_orig_mod": compile_module(inner)})
    names = module_names.script_names(model, model.state_dict())
    assert names["module.module.module.weight"] == "module.module.weight"
    assert names["module.module._orig_mod.bias"] == "module._orig_mod.bias"
    assert names["_orig_mod._orig_mod._orig_mod.weight"] == "_orig_mod._orig_mod.weight"
    assert len(set(names.values())) == len(names)
    assert module_names.script_names(model, ["module.module.module"]) == {
        "module.module.module": "module.module"
    }


def test_entries_that_a_module_computes_for_its_state_dict_keep_their_names():
    class Counted(nn.Linear):
        def get_extra_state(self):
            return {"count": 1}

        def set_extra_state(self, state):
            self.count = state["count"]

    model = nn.Sequential(compile_module(checkpoint_wrapper(Counted(1, 1))))
    assert list(module_names.state_dict(model)) == ["0.weight", "0.bias", "0._extra_state"]
    module_names.load_state_dict(model, module_names.state_dict(nn.Sequential(Counted(1, 1))))
    assert model[0].count == 1


def test_versions_of_modules_are_kept_when_names_change():
    def build(wrap):
        return wrap(nn.Sequential(wrap(nn.BatchNorm1d(1)), nn.Linear(1, 1)))

    plain, wrapped = build(lambda module: module), build(compile_module)
    state = module_names.state_dict(wrapped)
    assert state._metadata["0"] == {"version": 2}
    plain.load_state_dict(state)
    old = plain.state_dict()
    del old["0.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        module_names.load_state_dict(wrapped, old)
    old._metadata["0"] = {"version": 1}  # before torch counted batches
    module_names.load_state_dict(wrapped, old)


@pytest.mark.parametrize("way", ["plain", "compiled before"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_weights_that_other_programs_saved_with_the_names_of_wrappers_are_loaded(tmp_path, way, prefix):
    saved = {prefix + name: value for name, value in build_net(1).state_dict().items()}
    save_file(saved, tmp_path / "model.safetensors")
    accelerator, model, _ = build_run(way, {}, 0)
    accelerator.load_model(model, tmp_path)
    state = accelerator.get_state_dict(model)
    assert all(torch.equal(saved[prefix + name], value) for name, value in state.items())


def read_gradients():
    """Return the gradient of a parameter of a compiled model in `no_sync` and outside of it, with DDP and sharded."""
    gradients = []
    for sizes in ({}, {"dp_shard_size": 2}):
        accelerator, model, _ = build_run("compiled after", sizes, 0)
        local = X * (accelerator.process_index + 1)
        parameter = next(model.parameters())
        for context in (accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model)):
            model.zero_grad()
            with context:
                accelerator.backward(model(local).square().mean())
            gradients.append(None if parameter.grad is None else parameter.grad.clone())
    return [None if grad is None else getattr(grad, "_local_tensor", grad) for grad in gradients]


@pytest.mark.slow
def test_gradients_of_a_compiled_model_are_not_averaged_in_no_sync(pair):
    first, second = pair.run(ignore_warnings, read_gradients)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[2] is second[2] is None, "fully_shard keeps a gradient until it is averaged"
    assert first[3] is not None


def gather_compiled():
    """Return whether a compiled sharded model is full inside of `gathered`, and its saves are possible there."""
    accelerator, model, _ = build_run("compiled after", {"dp_shard_size": 2}, 0)
    with accelerator.gathered(model):
        shapes = [list(parameter.shape) for parameter in model.parameters()]
        try:
            accelerator.get_state_dict(model)
        except RuntimeError as error:
            return shapes, str(error)
    return shapes, ""


def test_a_compiled_sharded_model_is_gathered(pair):
    shapes = [list(parameter.shape) for parameter in build_net().parameters()]
    for found, error in pair.run(ignore_warnings, gather_compiled):
        assert found == shapes
        assert "Exit the context first" in error


def test_a_registered_module_is_saved_with_the_names_of_the_script(tmp_path):
    states = []
    for wrap in (compile_module, lambda module: module):
        accelerator = Accelerator()
        module = nn.Sequential(wrap(nn.Linear(2, 2)))
        accelerator.register_for_checkpointing(module)
        if states:
            accelerator.load_state(tmp_path / "state")
        else:
            accelerator.save_state(tmp_path / "state")
        states.append(module_names.state_dict(module))
    assert all(torch.equal(states[0][name], states[1][name]) for name in ("0.weight", "0.bias"))
