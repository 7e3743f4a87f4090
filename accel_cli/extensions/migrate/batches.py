"""Batches of a script that are not read from a loader: every process would train on the same ones."""

from __future__ import annotations

from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import (
    Role,
    Script,
    Variable,
    descendants,
    get_method,
    get_positional,
    to_code,
)

__all__ = ["draws_same_numbers", "find_own_batches", "find_unseeded_draws", "list_loops"]

_RANDOM = ("torch.rand", "torch.bernoulli", "torch.normal", "torch.multinomial", "numpy.random.", "random.")
_GENERATORS = ("default_rng", "RandomState", "Generator", "Random")
_SEEDS = ("torch.manual_seed", "numpy.random.seed", "random.seed", "torch.random.manual_seed")
_SAMPLES = {"dataset", "data", "input_nodes", "edge_label_index"}
"""Arguments of loaders with the samples, also of torch_geometric."""


def find_own_batches(conversion: Conversion) -> None:
    """Report backward passes whose batches are not those of a loader, once for each loop."""
    script = conversion.script
    seen = set()
    is_split = _leave_webdatasets(conversion)
    _find_divided_samples(conversion)
    for call in conversion.backwards:
        region = script.find_ancestor(call, (cst.For, cst.While, cst.FunctionDef)) or script.module
        if region in seen or _reads_loader(conversion, call):
            continue
        seen.add(region)
        draws = _find_draws(conversion, call)
        conversion.draws.update(draws)
        if draws:
            if draws_same_numbers(conversion):
                conversion.finding(
                    draws[0],
                    "These samples are drawn by the script, and its seed makes them equal on every process. Before the training, write: "
                    f"if accelerator.num_processes > 1: set_seed({_read_seed(conversion)}, device_specific=True), with set_seed of accel_runtime.",
                )
        elif not (is_split or _gets_batches(conversion, region)):
            conversion.finding(
                call,
                "The samples of this step are not read from a prepared DataLoader, so they are not divided over the processes. "
                "Pass a DataLoader of another file to accelerator.prepare. Give each process its part of other samples where they are loaded, of the same length on all, such as x.chunk(accelerator.num_processes)[accelerator.process_index].",
            )


def _find_divided_samples(conversion: Conversion) -> None:
    """Report loaders of samples that the script divides over the ranks itself."""
    script = conversion.script
    for call in script.calls:
        if script.kind_of(call) != "loader" or call in script.callees:
            continue
        samples = [
            arg
            for index, arg in enumerate(call.args)
            if (arg.keyword.value in _SAMPLES if arg.keyword is not None else index == 0)
        ]
        if any(conversion.reads_rank(arg.value) for arg in samples):
            conversion.finding(
                call,
                "The script divides these samples over the ranks itself, and a prepared loader divides them again. Remove the division.",
            )


def _gets_batches(conversion: Conversion, region: cst.CSTNode) -> bool:
    """Return whether a step is a function that another library calls, as `Engine(step)` of ignite, with batches of a loader that it gets."""
    script = conversion.script
    is_passed = any(isinstance(script.parents.get(one), cst.Arg) for one in script.references.get(region, []))
    return is_passed and any(
        conversion.is_prepared(role.origins)
        for call in script.calls
        if script.is_foreign_call(call) or get_method(call)
        for arg in call.args
        if isinstance(role := script.role_of(arg.value), Role) and role.kind == "loader"
    )


def _leave_webdatasets(conversion: Conversion) -> bool:
    """Report loaders that read a webdataset, which splits its shards itself; return whether there are any."""
    script = conversion.script
    loaders = [
        call
        for call in script.calls
        if script.is_call_of(call, "webdataset.WebLoader")
        or (
            call not in script.callees
            and script.kind_of(call) == "loader"
            and _reads_webdataset(script, call, set())
        )
    ]
    for call in loaders:
        statement = script.find_ancestor(call, (cst.Assign, cst.AnnAssign))
        names = [
            one for one, entries in script.assigned.items() if any(node is statement for node, _ in entries)
        ]
        conversion.unprepared.update(names)
        name = names[0].code if names else "loader"
        loader = name if script.kind_of(call) == "loader" else f"DataLoader({name}, batch_size=None)"
        conversion.finding(
            call,
            "This loader is not prepared. Each process reads its own shards only if WebDataset gets nodesplitter=webdataset.split_by_node. Pass that, and write before the training: "
            f'{name} = accelerator.prepare_data_loader({loader}, data="sharded"). In an evaluation, gather what is counted with accelerator.gather_for_metrics.',
        )
    return bool(loaders)


def _reads_webdataset(script: Script, node: cst.CSTNode, seen: set[Any]) -> bool:
    """Return whether an expression has a dataset of webdataset, also through variables and functions."""
    for one in descendants(node):
        if script.qualified_name(one).startswith("webdataset."):
            return True
        source = script.callees.get(one) or script.variable(one)
        if source is not None and source not in seen:
            seen.add(source)
            values = (
                script.list_values(source) if isinstance(source, Variable) else script.returned_values(source)
            )
            if any(_reads_webdataset(script, value, seen) for value in values):
                return True
    return False


def find_unseeded_draws(conversion: Conversion) -> None:
    """Report the first values that a script without a seed draws before its training: those of each process are others."""
    script = conversion.script
    if _find_seeds(conversion):
        return
    trained = {loop for call in conversion.backwards for loop in list_loops(conversion, call)}
    draws = [
        call
        for call in script.calls
        if _splits(script, call)
        or (
            script.qualified_name(call.func).startswith(_RANDOM)
            and _is_draw(script.qualified_name(call.func), "")
            and script.function_of(call) in {None, conversion.home}
            and not trained & set(script.ancestors(call))
        )
    ]
    if draws:
        conversion.finding(
            draws[0],
            "The script sets no seed, so that each process draws other values here. Call set_seed(seed) of accel_runtime at the start of the script.",
        )


def _splits(script: Script, call: cst.Call) -> bool:
    """Return whether a call draws a split of a dataset from the global generator."""
    is_split = script.is_call_of(call, "torch.utils.data.random_split")
    return is_split and get_positional(call, 2, "generator") is None


def _reads_loader(conversion: Conversion, call: cst.Call) -> bool:
    """Return whether a backward pass computes with batches of a prepared loader."""
    script = conversion.script
    if any(
        isinstance(one, cst.For)
        and (role := script.loader_of(one.iter))
        and conversion.is_prepared(role.origins)
        for one in script.ancestors(call)
    ):
        return True
    return conversion.is_prepared(frozenset(conversion.find_batches(call)))


def _find_draws(conversion: Conversion, backward: cst.Call) -> list[cst.Call]:
    """Return the calls in a training loop, and in functions that it calls, that draw random samples."""
    script = conversion.script
    function = script.function_of(backward)
    regions = list_loops(conversion, backward) or ([function] if function is not None else [])
    found: list[cst.Call] = []
    seen: set[Any] = set()
    while regions:
        region = regions.pop(0)
        for node in descendants(region.body):
            if not isinstance(node, cst.Call):
                continue
            name = script.qualified_name(node.func)
            callee = script.callees.get(node)
            if _is_draw(name, to_code(node.func)):
                found.append(node)
            elif callee is not None and callee not in seen and not _is_of_module(conversion, callee):
                seen.add(callee)
                regions.append(callee)
    return sorted(found, key=script.start)


def _is_draw(name: str, code: str) -> bool:
    """Return whether a function draws random numbers, and creates no generator."""
    if name.startswith(_RANDOM):
        return name not in _SEEDS and not name.endswith(_GENERATORS)
    return code.endswith(".sample") and not name.startswith("torch.")


def _is_of_module(conversion: Conversion, function: cst.FunctionDef) -> bool:
    """Return whether a function is a method of a module, whose random numbers are not samples."""
    cls = conversion.script.class_of(function)
    return cls is not None and conversion.script.is_torch_class(cls)


def _find_seeds(conversion: Conversion) -> list[cst.Call]:
    return [
        call
        for call in conversion.script.calls
        if call.args and "seed" in to_code(call.func).rpartition(".")[2].lower()
    ]


def draws_same_numbers(conversion: Conversion) -> bool:
    """Return whether the script sets a seed that does not depend on the rank."""
    seeds = _find_seeds(conversion)
    return bool(seeds) and not any(conversion.reads_rank(call.args[0].value) for call in seeds)


def _read_seed(conversion: Conversion) -> str:
    """Return the code of the script's seed; a number if it is not known."""
    script = conversion.script
    codes = [
        to_code(call.args[0].value)
        for call in _find_seeds(conversion)
        if script.qualified_name(call.func) in _SEEDS or to_code(call.func).endswith("set_seed")
    ]
    return codes[0] if codes else "0"


def list_loops(conversion: Conversion, backward: cst.Call) -> list[Any]:
    """Return the loops that take the steps of a backward pass, also those that call its function."""
    script = conversion.script
    found: list[Any] = []
    pending: list[cst.CSTNode] = [backward]
    seen = set()
    while pending:
        node = pending.pop()
        found += [one for one in script.ancestors(node) if isinstance(one, (cst.For, cst.While))]
        function = script.function_of(node)
        if function is not None and function not in seen:
            seen.add(function)
            pending += script.calls_of(function)
    return list(dict.fromkeys(found))
