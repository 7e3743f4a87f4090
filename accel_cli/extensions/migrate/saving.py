"""Files that a script writes: `torch.save`, images, and others that one process must write."""

from __future__ import annotations

from typing import Any

import libcst as cst

from accel_cli.extensions.migrate.edits import set_function
from accel_cli.extensions.migrate.raw import Conversion
from accel_cli.extensions.migrate.script import descendants, get_method, get_positional, to_code

__all__ = ["check_file", "convert_saving"]

_SAVED = 2
"""torch.save takes the object and the path."""
_IMAGES = {"save_image", "write_png", "write_jpeg", "imsave", "imwrite"}
"""Functions of libraries for images that write a file."""
_FOLDERS = {"os.mkdir", "os.makedirs"}
_WRITES = {
    "savefig",
    "save_pretrained",
    "write_text",
    "write_bytes",
    "to_csv",
    "copyfile",
    "savez",
    "savetxt",
}


def convert_saving(conversion: Conversion) -> None:
    """Replace `torch.save` by `accelerator.save` in the code that has an Accelerator."""
    script = conversion.script
    for call in script.calls:
        if not script.is_call_of(call, "torch.save") or not call.args:
            continue
        kinds = {script.kind_of(one) for one in descendants(call.args[0].value)}
        is_plain = len(call.args) == _SAVED and not any(arg.keyword or arg.star for arg in call.args)
        if conversion.is_guarded(call):
            continue
        if not is_plain or not (conversion.can_get(call) or kinds & {"model", "optimizer"}):
            conversion.finding(call, "Every process writes this file. Use accelerator.save(object, path).")
            continue
        accelerator = conversion.accelerator(call)
        conversion.edits.change(call, set_function(f"{accelerator}.save"))
        _replace_file(conversion, call)
        for one in descendants(call.args[0].value):
            if get_method(one) == "state_dict" and not one.args:
                _convert_state_dict(conversion, one, accelerator)
        if script.kind_of(call.args[0].value) == "model":
            conversion.edits.replace(
                call.args[0].value, f"{accelerator}.unwrap_model({to_code(call.args[0].value)})"
            )


def _replace_file(conversion: Conversion, call: cst.Call) -> None:
    """Replace `with open(path, "wb") as file: torch.save(x, file)` by a call with the path, which one process writes."""
    script = conversion.script
    block = script.find_ancestor(call, cst.IndentedBlock)
    outer: Any = script.parents.get(block) if block is not None else None
    if not isinstance(outer, cst.With) or len(outer.items) != 1 or len(outer.body.body) != 1:
        return
    opened, name = outer.items[0].item, outer.items[0].asname
    is_same = name is not None and to_code(name.name) == to_code(call.args[1].value)
    if not is_same or not script.is_call_of(opened, "builtins.open"):
        return
    path = opened.args[0].value  # type: ignore[attr-defined]
    conversion.saved.add(opened)
    conversion.edits.change(call.args[1].value, lambda _: path)
    conversion.edits.change(outer, lambda one: one.body.body[0].with_changes(leading_lines=one.leading_lines))


def _convert_state_dict(conversion: Conversion, call: cst.Call, accelerator: str) -> None:
    assert isinstance(call.func, cst.Attribute)
    owner = call.func.value
    if isinstance(owner, cst.Attribute) and owner.attr.value == "module":
        owner = owner.value
    if conversion.script.kind_of(owner) == "model":
        conversion.edits.replace(call, f"{accelerator}.get_state_dict({to_code(owner)})")


def check_file(conversion: Conversion, call: cst.Call) -> None:
    """Report a file that every process writes."""
    name = conversion.script.qualified_name(call.func)
    method = call.func.value if isinstance(call.func, cst.Name) else get_method(call)
    modes = {to_code(arg.value)[1:2] for arg in call.args[1:] if isinstance(arg.value, cst.SimpleString)}
    downloads = _downloads(call, name)
    if method == "open" and name != "builtins.open" and call.args:
        modes = {to_code(arg.value)[1:2] for arg in call.args[:1] if isinstance(arg.value, cst.SimpleString)}
    opens = method == "open" and bool(modes & {"w", "a", "x"})
    if name in _FOLDERS:
        if not any(
            arg.keyword and arg.keyword.value == "exist_ok" and to_code(arg.value) != "False"
            for arg in call.args
        ) and not conversion.is_guarded(call):
            conversion.finding(
                call,
                f"Every process creates this folder, and fails where another one was first. Write os.makedirs({to_code(call.args[0].value)}, exist_ok=True).",
            )
        return
    if not (opens or downloads or method in _WRITES | _IMAGES or name == "numpy.save"):
        return
    if call in conversion.saved or conversion.is_guarded(call):
        return
    if method not in _IMAGES or not _guard(conversion, call):
        conversion.finding(
            call,
            "Every process downloads these files at the same time. Move this below the creation of the Accelerator, into with accelerator.main_process_first():"
            if downloads
            else "Every process writes this file. Write it under if accelerator.is_main_process:, with values that all processes compute before.",
        )


def _downloads(call: cst.Call, name: str) -> bool:
    """Return whether a call downloads a dataset, also by the position of the argument in the classes of torchvision."""
    named = get_positional(call, -1, "download")
    position = 5 if name.endswith(".CelebA") else 4
    value = named or (
        get_positional(call, position, "download") if name.startswith("torchvision.datasets.") else None
    )
    return value is not None and to_code(value) == "True"


def _guard(conversion: Conversion, call: cst.Call) -> bool:
    """Run a statement that writes a file on the main process; return False if all processes must compute its arguments."""
    script = conversion.script
    statement = script.parents[call]
    line = script.parents.get(statement)
    nodes = list(descendants(call))
    if (
        not isinstance(statement, cst.Expr)
        or not isinstance(line, cst.SimpleStatementLine)
        or len(line.body) != 1
        or not conversion.can_reach(call)
        or any(
            script.is_model_call(one) or get_method(one) in {"item", "gather_for_metrics"} for one in nodes
        )
        or any(isinstance(one, cst.Call) and one in script.callees for one in nodes)
    ):
        return False
    test = cst.parse_expression(f"{conversion.accelerator(call)}.is_main_process")
    conversion.edits.change(
        line,
        lambda one: cst.If(
            test, cst.IndentedBlock([one.with_changes(leading_lines=[])]), leading_lines=one.leading_lines
        ),
    )
    return True
