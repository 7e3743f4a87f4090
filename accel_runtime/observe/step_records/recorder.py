"""The recorder of a rank: hooks in torch that write what the steps of a script compute.

It only observes: the hooks draw no random numbers, and change no tensor. torch is used only once the script has imported it.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import re
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from accel_runtime.environment.settings import Settings, SettingsError, __version__
from accel_runtime.observe.recorders import LoadedBatches
from accel_runtime.observe.step_records.digests import (
    copy_values,
    digest_generators,
    digest_tensor,
    list_batches,
    list_indices,
    list_tensors,
    read_tensors,
)
from accel_runtime.observe.step_records.record import (
    FILE,
    TENSORS_FILE,
    VERSION,
    Batch,
    Entry,
    ForwardPass,
    ModelHead,
    OptimizerHead,
    RunHead,
    Selection,
    StepRecord,
    Summary,
    encode,
)

__all__ = ["Recorder"]

_MAX_BYTES = 1 << 30
"""Size of a file at which the record ends."""
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"})
_INNER_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_LIBRARIES = (f"{Path(__file__).parents[2]}{os.sep}", f"{os.sep}site-packages{os.sep}", "<")
"""Beginnings or parts of the paths of files that are no part of the script."""
_VARIABLES = ("CUBLAS_", "NVIDIA_TF32", "PYTHONHASHSEED")
_Method = Callable[..., None]


def _observes(method: _Method) -> _Method:
    """Return a method of the recorder after whose error the record ends, and not the training."""

    @wraps(method)
    def observe(recorder: Recorder, *args: Any) -> None:
        try:
            method(recorder, *args)
        except Exception as error:  # noqa: BLE001 - objects of scripts raise any
            recorder.fail(error)

    return observe


class _Names:
    """Names of objects, while these exist: others may get their ids."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}

    def add(self, value: Any, name: str) -> None:
        """Name an object that has no name."""
        if self.find(value) is None:
            self._names[id(value)] = weakref.ref(value), name

    def find(self, value: Any) -> str | None:
        """Return the name of an object; None if it has none."""
        reference, name = self._names.get(id(value), (None, None))
        return name if reference is not None and reference() is value else None


class Recorder:
    """Recorder of the steps of this process.

    Args:
        folder: The folder in which it writes.
        selection: The steps that it records.
        environ: The environment, with the rank.
        on_step: Called after each step that is recorded, with its number.
    """

    def __init__(
        self,
        folder: Path,
        selection: Selection,
        environ: Mapping[str, str],
        on_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._folder, self._selection, self._environ, self._on_step = folder, selection, environ, on_step
        self._pid = os.getpid()
        self._torch: Any = None
        self._file: Any = None
        self._size, self._step = 0, 1
        """The size of the file; the number of the step that is computed now."""
        self._is_on = selection.has_step(1)
        """True if this step is recorded."""
        self._names = _Names()
        """The names of parameters and modules."""
        self._positions = _Names()
        """Those of parameters of no module that the script has called."""
        self._models: list[tuple[weakref.ref[Any], str]] = []
        """The modules with parameters that the script calls, with the beginning of their names."""
        self._watched: dict[int, weakref.ref[Any]] = {}
        """The parameters whose gradients are recorded, by id."""
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._described: set[int] = set()
        """The numbers of the optimizers whose heads are written."""
        self._skipped: dict[str, None] = {}
        """Names of tensors of this step that could not be read."""
        self._unsharded: dict[int, weakref.ref[Any]] = {}
        """The whole parameters of sharded modules, which exist in a pass only, by id."""
        self._is_sharded = self._is_over = False
        """True if a rank has parts of parameters; true if no more is recorded."""
        self._module_hooks: list[Any] = []
        self._stack: list[int] = []
        """The modules that compute now."""
        self._passes: list[ForwardPass] = []
        self._ended: ForwardPass | None = None  # that whose backward pass runs
        self._before: tuple[Entry, ...] | None = None
        self._before_clipping: tuple[Entry, ...] | None = None
        self._clipping, self._clipped_after, self._is_in_backward = "", 0, False
        self._batches: dict[str, tuple[Batch, ...]] = {}
        """The last batch of each loader that no backward pass has followed yet."""
        self._sources: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._last_random: dict[str, str] = {}
        """The states of the generators at the last batch, or at the end of the last pass."""
        self._tensors: dict[str, Any] = {}
        self._begin_pass()
        self._read: tuple[Entry, ...] = ()
        self._values: dict[str, Summary] = {}
        self._last_values: dict[str, Summary] = {}
        """Those of the step before, whose parameters are those before this one."""

    @property
    def has_begun(self) -> bool:
        """Return whether a batch was loaded, or a pass or a step was computed."""
        return self._step > 1 or bool(self._last_random or self._passes) or self._ended is not None

    def _begin_pass(self) -> None:
        self._random: dict[str, str] = {}
        self._drawn_by_data: set[str] = set()
        self._inputs: list[Batch] = []
        self._elements = 1
        self._mode: list[str] = []
        self._outputs: list[Entry] = []
        self._gradients: list[Entry] = []
        self._has_gradients = False

    # Hooks of torch

    def install(self, torch: ModuleType) -> None:
        """Install the hooks."""
        self._torch = torch
        self._replace_backward()
        self._watch_optimizers(sys.modules["torch.optim.optimizer"])
        self._watch_clipping()
        modules = sys.modules["torch.nn.modules.module"]
        self._module_hooks = [
            modules.register_module_forward_pre_hook(self._build_pre_hook()),
            modules.register_module_forward_hook(self._build_hook(), with_kwargs=True),
        ]
        self._watch_compilation()
        LoadedBatches(self._keep_batch, self._drop_batch).install()
        atexit.register(self.end)

    def _replace_backward(self) -> None:
        torch = self._torch
        backward = torch.autograd.backward

        @wraps(backward)
        def record_pass(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_recorded():
                backward(tensors, *args, **kwargs)
                return
            self._end_forward(tensors)
            # Activations that are computed again are no outputs.
            self._is_in_backward = True
            try:
                backward(tensors, *args, **kwargs)
            finally:
                self._is_in_backward = False
            if self._ended is not None:
                self._end_pass(self._ended)

        torch.autograd.backward = record_pass

    def _watch_compilation(self) -> None:
        """Record the calls of modules that are compiled in place, whose hooks are a part of what is compiled and see no values."""
        compiler, base = self._torch.compiler, self._torch.nn.Module
        compile_module = base.compile

        @wraps(compile_module)
        def compile_and_watch(module: Any, *args: Any, **kwargs: Any) -> None:
            compile_module(module, *args, **kwargs)
            call = module._compiled_call_impl  # noqa: SLF001 - what `__call__` calls (torch 2.9 to 2.13)

            def call_and_record(*args: Any, **kwargs: Any) -> Any:
                if compiler.is_compiling():
                    return call(*args, **kwargs)
                self._enter_module(module)
                output = call(*args, **kwargs)
                self._leave_module(module, {**dict(enumerate(args)), **kwargs}, output)
                return output

            module._compiled_call_impl = call_and_record  # noqa: SLF001 - as above

        base.compile = compile_and_watch

    def _watch_optimizers(self, module: Any) -> None:
        add = module.Optimizer.add_param_group

        @wraps(add)
        def add_and_watch(optimizer: Any, group: Any) -> None:
            add(optimizer, group)
            if os.getpid() == self._pid:
                self._optimizers.setdefault(optimizer, len(self._optimizers))

        module.Optimizer.add_param_group = add_and_watch
        module.register_optimizer_step_pre_hook(self._begin_step)
        module.register_optimizer_step_post_hook(self._end_step)

    def _watch_clipping(self) -> None:
        for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
            clip = self._build_clipping(getattr(sys.modules["torch.nn.utils"], name))
            for module in (sys.modules["torch.nn.utils"], sys.modules["torch.nn.utils.clip_grad"]):
                if hasattr(module, name):
                    setattr(module, name, clip)

    def _build_clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def record_and_clip(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_recorded() and self._before_clipping is None:
                self._begin_clipping("value" if "value" in clip.__name__ else "norm", limit)
            return clip(parameters, limit, *args, **kwargs)

        return record_and_clip

    @_observes
    def _begin_clipping(self, kind: str, limit: Any) -> None:
        self._before_clipping = self._digest(self._list_gradients(), "before_clipping")
        self._clipping, self._clipped_after = f"{kind} {float(limit):.9g}", len(self._passes)

    def _build_pre_hook(self) -> Callable[[Any, Any], None]:
        compiler = self._torch.compiler

        def enter(module: Any, _args: Any) -> None:
            if not compiler.is_compiling():
                self._enter_module(module)

        return enter

    def _build_hook(self) -> Callable[[Any, Any, Any, Any], None]:
        compiler = self._torch.compiler

        def leave(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if not compiler.is_compiling():
                self._leave_module(module, {**dict(enumerate(args)), **kwargs}, output)

        return leave

    # Samples

    @_observes
    def _keep_batch(self, iterator: Any, batch: Any, index: Any) -> None:
        """Keep a batch until a backward pass follows; one that none follows, as in an evaluation, is no sample of a step."""
        if not (self._is_recorded() and self._torch.is_grad_enabled()):
            return
        if iterator not in self._sources:
            source = _find_line()
            number = sum(one.partition("#")[0] == source for one in self._sources.values())
            self._sources[iterator] = f"{source}#{number}" if number else source
        source = self._sources[iterator]
        self._batches[source] = list_batches(source, batch, list_indices(index))
        last, self._last_random = self._last_random, digest_generators()
        self._drawn_by_data |= _find_changed(last, self._last_random)

    def _drop_batch(self, iterator: Any) -> None:
        self._batches.pop(self._sources.pop(iterator, ""), None)

    # Modules

    def _is_recorded(self) -> bool:
        return (
            self._is_on
            and os.getpid() == self._pid
            and threading.current_thread() is threading.main_thread()
            and not self._torch.compiler.is_compiling()
        )

    @_observes
    def _enter_module(self, module: Any) -> None:
        if not self._is_recorded() or self._is_in_backward:
            return
        if not self._stack and self._torch.is_grad_enabled():
            self._enter_model(module)
        self._stack.append(id(module))

    def _enter_model(self, module: Any) -> None:
        """Record the state in which a forward pass begins."""
        parameters = list(module.parameters())
        if not any(one.requires_grad for one in parameters):
            return
        self._add_model(module)
        if self._before is None and not self._passes:
            # A script may call the parts of its model one after another.
            trained = [one for optimizer in self._optimizers for one in _list_parameters(optimizer)]
            tensors = {**self._name_parameters([*parameters, *trained]), **self._list_buffers()}
            self._before = self._digest(tensors, "before")
        self._random = self._random or digest_generators()
        self._mode.append(self._describe_mode(module))

    def _add_model(self, module: Any) -> None:
        if any(reference() is module for reference, _ in self._models):
            return
        number = len(self._models)
        prefix = f"{number}:" if number else ""
        self._models.append((weakref.ref(module), prefix))
        for name, part in (*module.named_modules(), *module.named_parameters()):
            self._names.add(part, prefix + _clean(module, name))
        is_local = not (
            any(hasattr(one, "to_local") for one in module.parameters())
            or any(type(one).__name__ == "FullyShardedDataParallel" for one in module.modules())
        )
        self._is_sharded |= not is_local
        self._write(encode("model", ModelHead(number, _name_class(module), repr(_unwrap(module)), is_local)))

    def _describe_mode(self, module: Any) -> str:
        torch = self._torch
        fixed = sorted({self._names.find(one) or "" for one in module.modules() if not one.training} - {""})
        dtypes = [
            f"autocast {kind} {torch.get_autocast_dtype(kind)}"
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        return "; ".join([*dtypes, *([f"in evaluation mode: {', '.join(fixed)}"] if fixed else [])])

    @_observes
    def _leave_module(self, module: Any, arguments: dict[Any, Any], output: Any) -> None:
        if not self._is_recorded() or self._is_in_backward:
            return
        if self._is_sharded and self._torch.is_grad_enabled():
            self._watch_unsharded(module)
        # An exception in a module has left it without a call of this function.
        while self._stack and self._stack.pop() != id(module):
            pass
        if not self._stack and self._torch.is_grad_enabled():
            self._record_inputs(module, arguments)
        if self._selection.modules and self._torch.is_grad_enabled():
            name = self._name_module(module)
            outputs = {f"{name}{key}": one for key, one in list_tensors(output)}
            entries = self._digest(outputs, f"modules.{len(self._passes)}")
            # A module and one that wraps it have one output.
            if entries != tuple(self._outputs[len(self._outputs) - len(entries) :]):
                self._outputs += entries

    def _record_inputs(self, module: Any, arguments: dict[Any, Any]) -> None:
        """Record the arguments of a module that the script calls, which a hook before the forward pass gets without those by name."""
        if any(one.requires_grad for one in module.parameters()):
            self._inputs += list_batches("model", arguments)
            sizes = (one.numel() for _, one in list_tensors(arguments))
            self._elements = max(self._elements, *sizes, 1)

    def _name_module(self, module: Any) -> str:
        name = self._names.find(module)
        if name is None:
            return type(module).__name__
        number, colon, rest = name.partition(":")
        if colon and not rest:
            return f"output of model {number}"
        return name or "output of the model"

    def _watch_unsharded(self, module: Any) -> None:
        """Record the gradients of whole parameters, which a sharded module has from its forward to its backward pass."""
        name = self._names.find(module)
        for key, parameter in module._parameters.items():  # noqa: SLF001 - those of `parameters` are also of inner modules
            if parameter is None or hasattr(parameter, "to_local") or not parameter.requires_grad:
                continue
            known = self._unsharded.get(id(parameter))
            if name is not None and parameter.is_leaf and (known is None or known() is not parameter):
                self._unsharded[id(parameter)] = weakref.ref(parameter)
                self._names.add(parameter, f"{name}{'.' if name and name[-1] != ':' else ''}{key}")
                parameter.register_post_accumulate_grad_hook(self._record_gradient)

    # Passes

    @_observes
    def _end_forward(self, tensors: Any) -> None:
        self._ended = None
        self._watch_gradients()
        roots = [tensors] if isinstance(tensors, self._torch.Tensor) else list(tensors)
        losses = [
            (digest_tensor(one), float(one.detach().double()) if one.numel() == 1 else None) for one in roots
        ]
        random = digest_generators()
        # Without a batch, it is not known when the inputs were drawn.
        before = self._last_random if self._batches else self._random
        batches = [batch for columns in self._batches.values() for batch in columns]
        self._batches.clear()
        self._stack.clear()
        ended = ForwardPass(
            batches=tuple(batches),
            random=self._random or random,
            drawn_by_data=tuple(sorted(self._drawn_by_data)),
            drawn=tuple(sorted(_find_changed(before, random) if before else ())),
            inputs=tuple(self._inputs),
            elements=self._elements,
            mode=" | ".join(dict.fromkeys(filter(None, self._mode))),
            modules=tuple(self._outputs) if self._selection.modules else None,
            losses=tuple(losses),
            buffers=self._digest(self._list_buffers(), f"buffers.{len(self._passes)}"),
        )
        if not self._passes:
            left = {name: one for name, one in self._list_gradients().items() if one.any()}
            ended = replace(ended, left=self._digest(left, "left"))
        self._begin_pass()
        self._ended = ended

    @_observes
    def _end_pass(self, ended: ForwardPass) -> None:
        gradients = tuple(self._gradients) if self._has_gradients else None
        after = self._digest(self._list_gradients(), f"after_backward.{len(self._passes)}")
        self._passes.append(replace(ended, gradients=gradients, after_backward=after))
        self._gradients = []
        self._last_random = digest_generators()

    def _watch_gradients(self) -> None:
        """Record the gradients of all parameters before any exchange.

        A model may be sharded up to its first backward pass, which replaces parameters, and hooks of theirs would be lost. These hooks run as a part of the accumulation, after all hooks of tensors. DDP takes the gradient in one that runs after it
        (torch 2.9 to 2.13, `AccumulateGrad` and `Reducer`).
        """
        parameters = [one for optimizer in self._optimizers for one in _list_parameters(optimizer)]
        for model, _ in self._list_models():
            parameters += model.parameters()
        for parameter in parameters:
            watched = self._watched.get(id(parameter))
            is_known = watched is not None and watched() is parameter
            if (
                is_known
                or id(parameter) in self._unsharded
                or not parameter.requires_grad
                or not parameter.is_leaf
            ):
                continue
            self._watched[id(parameter)] = weakref.ref(parameter)
            # The hooks of a parameter of which a rank has a part do not get the gradient of this rank.
            if not hasattr(parameter, "to_local"):
                parameter.register_post_accumulate_grad_hook(self._record_gradient)

    def _list_gradients(self) -> dict[str, Any]:
        parameters = [one for reference in self._watched.values() if (one := reference()) is not None]
        return {
            name: one.grad for name, one in self._name_parameters(parameters).items() if one.grad is not None
        }

    @_observes
    def _record_gradient(self, parameter: Any) -> None:
        # It may run in a thread of the autograd engine.
        if self._is_in_backward and parameter.grad is not None:
            self._has_gradients = True
            name = self._find_name(parameter)
            self._gradients += self._digest({name: parameter.grad}, f"gradients.{len(self._passes)}")

    # Steps

    @_observes
    def _begin_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._is_recorded():
            return
        if not self._passes and (
            self._batches or self._random
        ):  # gradients of another function than `backward`
            self._end_forward(())
            if self._ended is not None:
                self._end_pass(self._ended)
        number = self._optimizers.setdefault(optimizer, len(self._optimizers))
        parameters = self._name_parameters(_list_parameters(optimizer))
        if self._before is None:
            self._before = self._digest(parameters, "before")
        if number not in self._described:
            self._described.add(number)
            names = tuple(tuple(map(self._find_name, group["params"])) for group in optimizer.param_groups)
            self._write(encode("optimizer", OptimizerHead(number, type(optimizer).__name__, names)))
        gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        self._read = self._digest(gradients, "read")

    @_observes
    def _end_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        is_recorded = self._is_recorded()
        if is_recorded:
            self._write_step(optimizer)
            self._passes, self._before = [], None
            self._before_clipping, self._clipping, self._clipped_after = None, "", 0
            self._last_values, self._values, self._tensors = self._values, {}, {}
            self._skipped = {}
            self._begin_pass()
        elif os.getpid() != self._pid or self._torch.compiler.is_compiling():
            return
        self._step += 1
        self._is_on = self._selection.has_step(self._step) and not self._is_over
        self._stack.clear()
        if self._selection.is_over(self._step):
            self.end()
            for hook in self._module_hooks:
                hook.remove()
            self._module_hooks = []
        if is_recorded:
            self._on_step(self._step - 1)

    def _write_step(self, optimizer: Any) -> None:
        parameters = self._name_parameters(_list_parameters(optimizer))
        state = {
            f"{name}.{key}": value
            for name, parameter in parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, self._torch.Tensor)
        }
        line = StepRecord(
            step=self._step,
            optimizer=self._optimizers[optimizer],
            before=self._name_again(self._before, parameters),
            passes=tuple(self._passes),
            before_clipping=self._before_clipping,
            clipped_after=self._clipped_after,
            clipping=self._clipping,
            read=self._read,
            norm=sum(self._values[digest].norm ** 2 for _, digest in self._read if digest in self._values)
            ** 0.5,
            options=_list_options(optimizer),
            rates=tuple(float(group.get("lr", 0)) for group in optimizer.param_groups),
            state=self._digest(state, "state"),
            parameters=self._digest(parameters, "parameters"),
            random=digest_generators(),
            values=self._values,
            skipped=tuple(self._skipped),
        )
        if self._selection.tensors and self._tensors:
            from safetensors.torch import save_file  # noqa: PLC0415 - rarely needed

            save_file(self._tensors, self._folder / TENSORS_FILE.format(self._step))
        self._write(encode("step", line))

    # Tensors

    def _digest(self, tensors: Mapping[str, Any], stage: str) -> tuple[Entry, ...]:
        entries = []
        here = {name: one for name, one in tensors.items() if one.device.type != "meta"}
        for name, found in zip(here, read_tensors(list(here.values()), self._find_summary), strict=True):
            if found is None:  # of a subclass, quantized, nested
                self._skipped[name] = None
                continue
            digest, summary = found
            entries.append((name, digest))
            if summary is not None:
                self._values[digest] = summary
            if self._selection.tensors:
                self._tensors[f"{stage}/{name}"] = copy_values(here[name])
        return tuple(entries)

    def _find_summary(self, digest: str) -> Summary | None:
        return self._values.get(digest) or self._last_values.get(digest)

    def _name_parameters(self, parameters: Iterable[Any]) -> dict[str, Any]:
        return {self._find_name(one): one for one in parameters}

    def _find_name(self, parameter: Any) -> str:
        if (name := self._names.find(parameter)) is not None:
            return name
        if self._positions.find(parameter) is None:
            for optimizer, number in self._optimizers.items():
                for index, group in enumerate(optimizer.param_groups):
                    for position, one in enumerate(group["params"]):
                        name = f"optimizer {number}, group {index}, parameter {position}"
                        self._positions.add(one, name)
        return self._positions.find(parameter) or "a parameter of no optimizer"

    def _name_again(
        self, entries: tuple[Entry, ...] | None, parameters: Mapping[str, Any]
    ) -> tuple[Entry, ...] | None:
        """Return entries with the names that parameters have since a module was called that has them."""
        names = {self._positions.find(one): name for name, one in parameters.items()}
        return entries and tuple((names.get(name, name), digest) for name, digest in entries)

    def _list_models(self) -> list[tuple[Any, str]]:
        return [(model, prefix) for reference, prefix in self._models if (model := reference()) is not None]

    def _list_buffers(self) -> dict[str, Any]:
        return {
            prefix + _clean(model, name): buffer
            for model, prefix in self._list_models()
            for name, buffer in model.named_buffers()
            if isinstance(buffer, self._torch.Tensor)
        }

    # The file

    def _write(self, line: str) -> None:
        if self._file is None:
            self._file = (self._folder / FILE).open("a", encoding="utf-8")
            self._size = self._file.tell()
            self._put(encode("run", self._describe_run()))
        if line:
            self._put(line)

    def _put(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()
        self._size += len(line)
        if self._size >= _MAX_BYTES:
            self._end(f"the file reached {_MAX_BYTES >> 20} MiB")

    def end(self) -> None:
        """Write that the record is complete: of a process that was ended from outside, or of a run that goes on, it is not."""
        if self._is_over or self._torch is None or os.getpid() != self._pid:
            return
        with suppress(OSError, ValueError):
            if self._file is None:
                self._write("")
            self._end("")

    def fail(self, error: Exception) -> None:
        """End the record at an error; the training goes on."""
        if self._is_over:
            return
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, OSError):
            reason = f"cannot write {self._folder}: {error.strerror}"
        print(f"accel: the record of numbers ends in step {self._step}: {reason}", file=sys.stderr)  # noqa: T201
        self._is_on, self._is_over = False, True
        with suppress(OSError, ValueError):
            if self._file is None:
                self._write("")
            self._end(reason)

    def _end(self, reason: str) -> None:
        self._is_on, self._is_over = False, True
        self._file.write(encode("end", {"reason": reason}))
        self._file.close()

    def _describe_run(self) -> RunHead:
        torch, environ = self._torch, self._environ
        flags = {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            "mkldnn": torch.backends.mkldnn.enabled,
            "threads": torch.get_num_threads(),
            "default dtype": torch.get_default_dtype(),
        }
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "accel": __version__,
            "cuda": torch.version.cuda,
            "numpy": getattr(sys.modules.get("numpy"), "__version__", None),
            "device": _find_device(torch),
            "processor": _find_processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
        variables = {name: value for name, value in sorted(environ.items()) if name.startswith(_VARIABLES)}
        with suppress(SettingsError):
            defaults = Settings().to_env()
            of_accel = Settings.from_env(environ).to_env()
            variables |= {name: value for name, value in of_accel.items() if value != defaults[name]}
        settings = {**versions, **flags, **variables}
        return RunHead(
            version=VERSION,
            rank=int(environ.get("RANK", "0")),
            world_size=int(environ.get("WORLD_SIZE", "1")),
            host=socket.gethostname(),
            selection=asdict(self._selection),
            settings={name: str(value) for name, value in settings.items() if value is not None},
        )


def _find_device(torch: ModuleType) -> str:
    if torch.cuda.is_initialized():
        name: str = torch.cuda.get_device_name()
        return name
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or accelerator.type == "cuda" else accelerator.type


def _find_processor() -> str:
    """Return the model of the processor, on which the kernels that libraries choose depend."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _find_changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """Return the generators whose states have changed; all of those that had none before."""
    return {name for name, state in after.items() if before.get(name) != state}


def _find_line() -> str:
    """Return the line of the script that runs now."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as `inspect.currentframe`
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_LIBRARIES[0], "<")) and _LIBRARIES[1] not in path:
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _list_parameters(optimizer: Any) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _list_options(optimizer: Any) -> dict[str, Any]:
    """Return the options of the groups that JSON has, without the learning rates."""
    options = {}
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in {"params", "lr", "initial_lr"}:
                plain = value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value
                options[f"group {index}, {name}"] = json.loads(json.dumps(plain, default=str))
    return options


def _is_wrapper(module: Any) -> bool:
    """Return whether a module has another one as `module`; classes of libraries are subclasses of torch's."""
    return not _WRAPPERS.isdisjoint(each.__name__ for each in type(module).__mro__)


def _unwrap_once(module: Any) -> Any:
    if _is_wrapper(module):
        return module.module
    return module._orig_mod if type(module).__name__ == "OptimizedModule" else module  # noqa: SLF001 - its name in state dicts


def _unwrap(module: Any) -> Any:
    while (inner := _unwrap_once(module)) is not module:
        module = inner
    return module


def _name_class(module: Any) -> str:
    names = []
    while (inner := _unwrap_once(module)) is not module:
        names.append(type(module).__name__)
        module = inner
    return " of ".join([*names, type(module).__name__])


def _clean(module: Any, name: str) -> str:
    """Return the name of a part of a module as that module has it which is wrapped."""
    name = _INNER_WRAPPERS.sub("", f"{name}.").removesuffix(".")
    return (
        f"{name}.".removeprefix("module.").removesuffix(".")
        if _is_wrapper(module) or _is_wrapper(_unwrap_once(module))
        else name
    )
