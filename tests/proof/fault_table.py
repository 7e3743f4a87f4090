"""The faults that the part `faults` injects: each a script with a marked line, and what a report must name.

The rank is the argument of the script, the line is that of the comment `#: fault` in its source, and the cause is a regular
expression written here. No expectation is read from the output of accel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import indent
from typing import Literal

__all__ = ["FAULTS", "MARK", "OTHERS_MARK", "Blame", "Fault", "Place", "find_mark"]

MARK, OTHERS_MARK = "#: fault", "#: others"
"""The ends of the lines at which the faulty rank, and the other ranks, are when the fault shows."""

Place = tuple[str, int]
"""A file of the case and a line in it."""

Blame = Literal["faulty", "each", "all", "nobody", "host", "launch", "warning"]
"""Which ranks a right report names.

`faulty`: the faulty rank, and no other. `each`: every rank with its call, since either may be the wrong one: the others at the
line of `OTHERS_MARK`. `all`: any rank, since all fail in the same way. `nobody`: no rank, since none is at fault. `host`: the lost
machine. `launch`: nothing starts, and the message names the mistake. `warning`: the faulty rank, in a warning: training goes on.
"""


@dataclass(frozen=True)
class Fault:
    """A fault and what a report of it must name.

    Attributes:
        name: Its name among those of its kind.
        kind: Its row in the table of the page.
        cause: A regular expression that the text of the report has to match.
        files: The sources, `train.py` and modules beside it.
        blame: The ranks to name.
        has_line: False if no line of the script causes it, as with a signal from another process: then no line may be named.
        options: Options of `accel launch`.
        needs: What the harness does beside the launch: `memory`, `disk`, `kill host`, `cut host`, `kill launcher`, `stop launcher`,
            `absent host`.
    """

    name: str
    kind: str
    cause: str
    files: Mapping[str, str]
    blame: Blame = "faulty"
    has_line: bool = True
    options: tuple[str, ...] = ()
    needs: str = ""

    @property
    def key(self) -> str:
        """Unique name."""
        return f"{self.kind}: {self.name}"

    @property
    def line(self) -> Place | None:
        """The marked line; None if the fault has none."""
        return find_mark(self.files, MARK) if self.has_line else None

    @property
    def line_of_others(self) -> Place | None:
        """The line of the other ranks, if it is marked."""
        has_mark = any(OTHERS_MARK in text for text in self.files.values())
        return find_mark(self.files, OTHERS_MARK) if has_mark else None


def find_mark(files: Mapping[str, str], mark: str) -> Place:
    """Return the only line that ends with a mark."""
    (place,) = (
        (name, number)
        for name, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if line.endswith(mark)
    )
    return place


_TORCH = """\
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
{top}
size = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
faulty = rank == int(sys.argv[1])
if size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
{before}
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
if size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
batch = torch.ones(4, 2)
{ready}
for step in range(8):
    if step == 3:
        pass
{step}
    loss = model(batch).sum()
    loss.backward(){next}
    optimizer.step()
    optimizer.zero_grad()
{after}
"""
"""A script with `torch.distributed` and without accel."""

_ACCEL = """\
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel_runtime import Accelerator, ProjectConfiguration
{top}
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("{project}", automatic_checkpoint_naming=True))
rank, size = accelerator.process_index, accelerator.num_processes
faulty = rank == int(sys.argv[1])
torch.manual_seed(0)
{before}
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.ones({samples}, 2)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
{ready}
for step, (batch,) in enumerate(loader):
    if step == 3:
        pass
{step}
    loss = model(batch).sum()
    accelerator.backward(loss){next}
    optimizer.step()
    optimizer.zero_grad()
{after}
"""
"""A script with an `Accelerator`."""

_LOAD = f"def load():\n    time.sleep(1000)  {MARK}\n"
"""A function in which a rank stays."""


def _write(base: str, **parts: str) -> str:
    """Return a script; `step` runs on all ranks in the fourth step."""
    parts = {
        "top": "",
        "before": "",
        "ready": "",
        "step": "",
        "after": "",
        "next": "",
        "project": "project",
        "samples": "128",
    } | parts
    parts["step"] = indent(parts["step"], " " * 8)
    return re.sub(r"\{(\w+)\}", lambda match: parts[match[1]], base)


def _torch(**parts: str) -> dict[str, str]:
    return {"train.py": _write(_TORCH, **parts)}


def _accel(**parts: str) -> dict[str, str]:
    return {"train.py": _write(_ACCEL, **parts)}


@dataclass
class _Table:
    """Collects the faults of a kind."""

    faults: list[Fault] = field(default_factory=list)

    def add(self, kind: str, name: str, cause: str, files: Mapping[str, str], **options: object) -> None:
        """Add a fault."""
        fault = Fault(name, kind, cause, files, **options)  # type: ignore[arg-type]
        assert fault.key not in {other.key for other in self.faults}, fault.key
        assert not fault.has_line or fault.line
        self.faults.append(fault)


def _add_exceptions(table: _Table) -> None:
    """Add exceptions in the main thread."""
    kind = "exception in the main thread"
    raises = f"if faulty:\n    raise ValueError('no data')  {MARK}"
    table.add(kind, "raise", "ValueError: no data", _torch(step=raises))
    table.add(kind, "raise, Accelerator", "ValueError: no data", _accel(step=raises))
    table.add(kind, "assert", "AssertionError: wrong", _torch(step=f"assert not faulty, 'wrong'  {MARK}"))
    table.add(
        kind, "in a function of another module", "KeyError: 'label'",
        _torch(top="import helper", step="if faulty:\n    helper.read({})")
        | {"helper.py": f"def read(sample):\n    return pick(sample)\n\ndef pick(sample):\n    return sample['label']  {MARK}\n"},
    )  # fmt: skip
    table.add(
        kind, "in a hook of a gradient", "ValueError: bad gradient",
        _torch(
            top=f"def check(gradient):\n    raise ValueError('bad gradient')  {MARK}\n",
            step="if faulty:\n    next(model.parameters()).register_hook(check)",
        ),
    )  # fmt: skip
    table.add(
        kind, "in a hook of a gradient, Accelerator", "ValueError: bad gradient",
        _accel(
            top=f"def check(gradient):\n    raise ValueError('bad gradient')  {MARK}\n",
            step="if faulty:\n    next(model.parameters()).register_hook(check)",
        ),
    )  # fmt: skip
    table.add(
        kind, "in the backward of an autograd.Function", "ZeroDivisionError",
        _torch(
            top="class Twice(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n"
            f"    @staticmethod\n    def backward(ctx, gradient):\n        return gradient * (1 / 0)  {MARK}\n",
            step="if faulty:\n    batch = Twice.apply(batch.requires_grad_())",
        ),
    )  # fmt: skip
    table.add(
        kind, "in a forward hook", "RuntimeError: activation",
        _accel(
            top=f"def watch(*_):\n    raise RuntimeError('activation')  {MARK}\n",
            step="if faulty:\n    next(model.modules()).register_forward_hook(watch)",
        ),
    )  # fmt: skip
    table.add(
        kind, "shapes that do not fit in a layer", "mat1 and mat2 shapes cannot be multiplied",
        _torch(step=f"if faulty:\n    torch.nn.Linear(3, 1)(batch)  {MARK}"),
    )  # fmt: skip
    table.add(
        kind, "allocation that is too large", "DefaultCPUAllocator: can't allocate memory",
        _torch(step=f"if faulty:\n    torch.empty(1 << 50)  {MARK}"),
    )  # fmt: skip
    table.add(
        kind, "recursion without an end", "RecursionError",
        _torch(top=f"def down(n):\n    return down(n + 1)  {MARK}\n", step="if faulty:\n    down(0)"),
    )  # fmt: skip
    table.add(
        kind, "raise from", "RuntimeError: cannot read",
        _accel(step=f"if faulty:\n    try:\n        {{}}['x']\n    except KeyError as error:\n        raise RuntimeError('cannot read') from error  {MARK}"),
    )  # fmt: skip
    table.add(
        kind, "exception group", "ExceptionGroup: several",
        _torch(step=f"if faulty:\n    raise ExceptionGroup('several', [ValueError('one'), KeyError('two')])  {MARK}"),
    )  # fmt: skip
    table.add(
        kind, "missing file", "FileNotFoundError.*absent.csv",
        _accel(step=f"if faulty:\n    open('absent.csv')  {MARK}"),
    )  # fmt: skip
    table.add(
        kind, "in the scheduler's function", "IndexError",
        _torch(
            before=f"def rate(step):\n    return [1, 1][step]  {MARK}\n",
            step="if faulty:\n    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)\n    for _ in range(3):\n        scheduler.step()",
        ),
    )  # fmt: skip
    table.add(
        kind, "before the process group exists", "ValueError: no data",
        _torch(top=f"if os.environ.get('RANK', '0') == sys.argv[1]:\n    raise ValueError('no data')  {MARK}"),
    )  # fmt: skip
    table.add(
        kind, "RuntimeError whose text reads like a lost connection", "RuntimeError: connection reset by the data server",
        _torch(step=f"if faulty:\n    raise RuntimeError('connection reset by the data server')  {MARK}"),
    )  # fmt: skip


def _add_imports(table: _Table) -> None:
    kind = "import or syntax error"
    on_rank = "if os.environ.get('RANK', '0') == sys.argv[1]:\n    "
    broken = {"helper.py": f"def read():\n    return (1 +  {MARK}\n"}
    table.add(kind, "SyntaxError in a module", "SyntaxError: '\\(' was never closed",
              _torch(top=f"{on_rank}import helper") | broken)  # fmt: skip
    table.add(kind, "SyntaxError in the script", "SyntaxError: invalid syntax",
              {"train.py": f"import sys\nx = = 1  {MARK}\n"}, blame="all")  # fmt: skip
    table.add(kind, "IndentationError in the script", "IndentationError",
              {"train.py": f"import sys\nif True:\nx = 1  {MARK}\n"}, blame="all")  # fmt: skip
    table.add(kind, "module not found", "ModuleNotFoundError: No module named 'absent_module'",
              _torch(top=f"{on_rank}import absent_module  {MARK}"))  # fmt: skip
    table.add(kind, "module not found in a module", "ModuleNotFoundError: No module named 'absent_module'",
              _accel(top=f"{on_rank}import helper") | {"helper.py": f"import os\nimport absent_module  {MARK}\n"})  # fmt: skip
    table.add(kind, "name not found in a module", "ImportError: cannot import name 'absent'",
              _torch(top=f"{on_rank}from helper import absent  {MARK}") | {"helper.py": "x = 1\n"})  # fmt: skip


def _add_threads_and_children(table: _Table) -> None:
    thread, worker, child = (
        "exception in a thread",
        "failure of a data-loader worker",
        "failure of a child process",
    )
    read = f"def read():\n    raise ValueError('no data')  {MARK}\n"
    table.add(thread, "result of a thread pool", "ValueError: no data",
              _torch(top=f"from concurrent.futures import ThreadPoolExecutor\n{read}",
                     step="if faulty:\n    ThreadPoolExecutor(1).submit(read).result()"))  # fmt: skip
    table.add(thread, "thread that should fill a queue", "ValueError: no data",
              _torch(top=f"import queue\n{read}",
                     step="if faulty:\n    threading.Thread(target=read).start()\n    queue.Queue().get()"))  # fmt: skip
    table.add(thread, "thread that should fill a queue, Accelerator", "ValueError: no data",
              _accel(top=f"import queue\n{read}",
                     step="if faulty:\n    threading.Thread(target=read).start()\n    queue.Queue().get()"))  # fmt: skip
    data = (
        "from torch.utils.data import DataLoader, Dataset\nclass Data(Dataset):\n    def __len__(self):\n        return 16\n"
        "    def __getitem__(self, index):\n        {body}\n        return torch.ones(2)\n"
    )
    loop = "if faulty:\n    for _ in DataLoader(Data(), batch_size=2, num_workers={workers}):\n        pass"
    for workers, row in ((0, "exception in the main thread"), (1, worker)):
        table.add(row, f"__getitem__ with {workers} workers", "KeyError: .*'label'",
                  _torch(top=data.replace("{body}", f"{{}}['label']  {MARK}"), step=loop.format(workers=workers)))  # fmt: skip
    table.add(worker, "__getitem__, Accelerator", "KeyError: .*'label'",
              _accel(top=data.replace("{body}", f"{{}}['label']  {MARK}"), step=loop.format(workers=2)))  # fmt: skip
    table.add(worker, "collate_fn", "stack expects each tensor to be equal size",
              _torch(top=f"{data.replace('{body}', '')}def collate(samples):\n    return torch.stack([torch.ones(n) for n in range(2)])  {MARK}\n",
                     step="if faulty:\n    for _ in DataLoader(Data(), batch_size=2, num_workers=1, collate_fn=collate):\n        pass"))  # fmt: skip
    table.add(worker, "SIGSEGV", "worker.*Segmentation fault",
              _torch(top=f"import ctypes\n{data.replace('{body}', f'ctypes.string_at(0)  {MARK}')}",
                     step=loop.format(workers=1)))  # fmt: skip
    killed = data.replace("{body}", "if index == 6: subprocess.run(['kill', '-KILL', str(os.getpid())])")
    table.add(worker, "SIGKILL", "data-loader worker.*ended|DataLoader worker.*(Killed|exited unexpectedly)",
              _torch(top=killed, step=loop.format(workers=1)), has_line=False)  # fmt: skip
    table.add(child, "multiprocessing pool", "ValueError: no data",
              _torch(top=f"import multiprocessing\n{read}",
                     step="if faulty:\n    with multiprocessing.get_context('fork').Pool(1) as pool:\n        pool.apply(read)"))  # fmt: skip
    table.add(child, "torch.multiprocessing.spawn", "ValueError: no data",
              _torch(top=f"import torch.multiprocessing as mp\ndef read(index):\n    raise ValueError('no data')  {MARK}\n",
                     step="if faulty:\n    mp.start_processes(read, nprocs=1, start_method='fork')"))  # fmt: skip
    table.add(child, "subprocess.run(check=True)", "CalledProcessError.*'false'.* exit status 1",
              _torch(step=f"if faulty:\n    subprocess.run(['false'], check=True)  {MARK}"))  # fmt: skip
    table.add(child, "child killed by SIGKILL", "died with <Signals.SIGKILL",
              _accel(step=f"if faulty:\n    subprocess.run(['sh', '-c', 'kill -KILL $$'], check=True)  {MARK}"))  # fmt: skip
    table.add(child, "process that a rank waits for", "RuntimeError: the reader ended with 1",
              _torch(top="import multiprocessing\ndef read():\n    sys.exit(1)\n",
                     step="if faulty:\n    reader = multiprocessing.get_context('fork').Process(target=read)\n    reader.start()\n    reader.join()\n"
                     f"    raise RuntimeError(f'the reader ended with {{reader.exitcode}}')  {MARK}"))  # fmt: skip


def _add_exits(table: _Table) -> None:
    kind = "exit with a code"
    for flavour, write in (("", _torch), (", Accelerator", _accel)):
        table.add(
            kind,
            f"sys.exit(3){flavour}",
            "exited with code 3",
            write(step=f"if faulty:\n    sys.exit(3)  {MARK}"),
        )
        table.add(kind, f"sys.exit(text){flavour}", "exited with code 1: no data",
                  write(step=f"if faulty:\n    sys.exit('no data')  {MARK}"))  # fmt: skip
        table.add(
            kind,
            f"os._exit(3){flavour}",
            "exited with code 3",
            write(step=f"if faulty:\n    os._exit(3)  {MARK}"),
        )
    table.add(kind, "sys.exit(3) in a function of another module", "exited with code 3",
              _torch(top="import helper", step="if faulty:\n    helper.stop()")
              | {"helper.py": f"import sys\n\ndef stop():\n    sys.exit(3)  {MARK}\n"})  # fmt: skip
    table.add(kind, "os._exit(3) in a thread", "exited with code 3",
              _torch(top=f"def stop():\n    os._exit(3)  {MARK}\n",
                     step="if faulty:\n    threading.Thread(target=stop).start()\n    time.sleep(1000)"))  # fmt: skip
    early = "rank that leaves early with code 0"
    has_left = "(had exited before with code 0|ended normally)"
    for flavour, write in (("", _torch), (", Accelerator", _accel)):
        table.add(early, f"sys.exit(){flavour}", has_left, write(step=f"if faulty:\n    sys.exit()  {MARK}"))
        table.add(
            early,
            f"os._exit(0){flavour}",
            "(had exited before with code 0|ended)",
            write(step=f"if faulty:\n    os._exit(0)  {MARK}"),
        )
        table.add(
            early,
            f"end of the script{flavour}",
            has_left,
            write(step="if faulty:\n    break"),
            has_line=False,
        )


def _add_signals(table: _Table) -> None:
    kind = "fatal signal in native code"
    for flavour, write in (("", _torch), (", Accelerator", _accel)):
        table.add(kind, f"SIGSEGV{flavour}", "terminated by SIGSEGV",
                  write(top=f"import ctypes\ndef native():\n    ctypes.string_at(0)  {MARK}\n", step="if faulty:\n    native()"))  # fmt: skip
    table.add(kind, "SIGSEGV in a module of its own", "terminated by SIGSEGV",
              _torch(top="import helper", step="if faulty:\n    helper.native()")
              | {"helper.py": f"import faulthandler\n\ndef native():\n    faulthandler._sigsegv()  {MARK}\n"})  # fmt: skip
    table.add(kind, "SIGSEGV in a thread", "terminated by SIGSEGV",
              _torch(top=f"import ctypes\ndef native():\n    ctypes.string_at(0)  {MARK}\n",
                     step="if faulty:\n    threading.Thread(target=native).start()\n    time.sleep(1000)"))  # fmt: skip
    table.add(kind, "SIGABRT", "terminated by SIGABRT", _torch(step=f"if faulty:\n    os.abort()  {MARK}"))
    table.add(
        kind,
        "SIGABRT, Accelerator",
        "terminated by SIGABRT",
        _accel(step=f"if faulty:\n    os.abort()  {MARK}"),
    )
    table.add(kind, "SIGFPE", "terminated by SIGFPE",
              _torch(top="import faulthandler", step=f"if faulty:\n    faulthandler._sigfpe()  {MARK}"))  # fmt: skip
    table.add(kind, "SIGBUS: a mapped file that was truncated", "terminated by SIGBUS",
              _torch(top="import mmap", step="if faulty:\n    with open('mapped', 'wb+') as file:\n        file.write(bytes(8192))\n        file.flush()\n"
                     f"        data = mmap.mmap(file.fileno(), 8192)\n        os.truncate('mapped', 0)\n        print(data[5000])  {MARK}"))  # fmt: skip
    table.add(kind, "stack overflow", "terminated by SIGSEGV",
              _torch(top="import faulthandler", step=f"if faulty:\n    faulthandler._stack_overflow()  {MARK}"))  # fmt: skip
    sent = "signal from another process"
    for name in ("KILL", "TERM"):
        table.add(sent, f"SIG{name}", f"terminated by SIG{name}",
                  _torch(step=f"if faulty:\n    subprocess.Popen(['kill', '-{name}', str(os.getpid())])\n    time.sleep(1000)"), has_line=False)  # fmt: skip
        table.add(sent, f"SIG{name}, Accelerator", f"terminated by SIG{name}",
                  _accel(step=f"if faulty:\n    subprocess.Popen(['kill', '-{name}', str(os.getpid())])\n    time.sleep(1000)"), has_line=False)  # fmt: skip
    table.add(sent, "SIGSTOP", "is stopped",
              _torch(step="if faulty:\n    subprocess.run(['kill', '-STOP', str(os.getpid())])"), has_line=False)  # fmt: skip
    table.add(sent, "SIGSTOP, Accelerator", "is stopped",
              _accel(step="if faulty:\n    subprocess.run(['kill', '-STOP', str(os.getpid())])"), has_line=False)  # fmt: skip
    table.add("out of memory", "killed by the kernel", "killed by the kernel because memory ran out",
              _torch(step="if faulty:\n    hoard = []\n    while True:\n        hoard.append(bytearray(b'x' * (1 << 24)))"),
              has_line=False, needs="memory")  # fmt: skip


_TORCH_CALLS = {
    "all_reduce": ("dist.all_reduce(torch.ones(5))", "all_reduce of"),
    "all_gather": ("dist.all_gather([torch.ones(5)] * size, torch.ones(5))", "all_gather of"),
    "all_gather_into_tensor": ("dist.all_gather_into_tensor(torch.ones(5 * size), torch.ones(5))", "all_?gather"),
    "broadcast": ("dist.broadcast(torch.ones(5), int(sys.argv[1]))", "broadcast of"),
    "reduce": ("dist.reduce(torch.ones(5), 0 if int(sys.argv[1]) else 1)", "reduce"),
    "reduce_scatter": ("dist.reduce_scatter_tensor(torch.ones(5), torch.ones(5 * size))", "reduce_scatter"),
    "scatter": ("dist.scatter(torch.ones(5), [torch.ones(5)] * size if faulty else None, int(sys.argv[1]))", "in scatter"),
    "gather": ("dist.gather(torch.ones(5), [torch.ones(5)] * size if not rank else None, 0)", "gather of"),
    "scatter from another rank": (
        "dist.scatter(torch.ones(5), [torch.ones(5)] * size if rank == (not int(sys.argv[1])) else None, int(not int(sys.argv[1])))",
        "in scatter",
    ),
    "all_to_all": ("dist.all_to_all_single(torch.ones(size), torch.ones(size))", "all_?to_?all"),
    "barrier": ("dist.barrier()", "barrier"),
    "all_gather_object": ("dist.all_gather_object([None] * size, rank)", "all_gather"),
    "broadcast_object_list": ("dist.broadcast_object_list([rank], int(sys.argv[1]))", "broadcast"),
    "gather_object": ("dist.gather_object(rank, [None] * size if not rank else None)", "gather"),
    "backward of DDP": ("", "all_reduce of"),
}  # fmt: skip
"""Calls of torch, and the text of a report about ranks that wait in them."""

_ACCEL_CALLS = {
    "gather": ("accelerator.gather(torch.ones(5))", "gather"),
    "gather_for_metrics": ("accelerator.gather_for_metrics(batch)", "gather_for_metrics"),
    "reduce": ("accelerator.reduce(torch.ones(5))", "reduce"),
    "pad_across_processes": ("accelerator.pad_across_processes(torch.ones(5))", "pad_across_processes"),
    "gather_object": (
        "from accel_runtime.utils import gather_object\ngather_object([rank])",
        "gather_object",
    ),
    "broadcast_object_list": (
        "from accel_runtime.utils import broadcast_object_list\nbroadcast_object_list([rank])",
        "broadcast_object_list",
    ),
    "wait_for_everyone": ("accelerator.wait_for_everyone()", "wait_for_everyone"),
    "backward": ("", "backward|all_reduce"),
    "save_state": ("accelerator.save_state()", "save_state"),
    "prepare": ("accelerator.prepare(torch.nn.Linear(2, 2))", "prepare"),
    "check_trigger": ("accelerator.check_trigger()", "check_trigger"),
}


def _add_hangs(table: _Table) -> None:
    """Add a rank that does not come to a collective, since it is elsewhere."""
    for name, (call, cause) in _TORCH_CALLS.items():
        table.add("rank that does not come to a collective of torch", f"late for {name}", cause,
                  _torch(top=_LOAD, step=f"if faulty:\n    load()\n{call}"))  # fmt: skip
    table.add("rank that does not come to a collective of torch", "late for a receiver: send", "recv",
              _torch(top=_LOAD, step="other = 0 if int(sys.argv[1]) else 1\nif faulty:\n    load()\n    dist.send(torch.ones(5), other)\n"
                     "elif rank == other:\n    dist.recv(torch.ones(5), int(sys.argv[1]))"))  # fmt: skip
    table.add("rank that does not come to a collective of torch", "late for init_process_group", "init_process_group|rendezvous|store",
              _torch(top=f"{_LOAD}if os.environ['RANK'] == sys.argv[1]:\n    load()\n"), options=("--set", "launcher.startup_timeout=3"))  # fmt: skip
    table.add("rank that does not come to a collective of torch", "late for the constructor of DDP", "all_?gather",
              _torch(top=_LOAD, before="if faulty:\n    load()"), options=("--set", "launcher.startup_timeout=3"))  # fmt: skip
    for name, (call, cause) in _ACCEL_CALLS.items():
        table.add("rank that does not come to a collective of the Accelerator", f"late for {name}, Accelerator", cause,
                  _accel(top=_LOAD, step=f"if faulty:\n    load()\n{call}"))  # fmt: skip
    table.add("rank that does not come to a collective of the Accelerator", "late for the first prepare, Accelerator", "prepare",
              _accel(top=_LOAD, before="if faulty:\n    load()"), options=("--set", "launcher.startup_timeout=3"))  # fmt: skip


def _add_places_of_hangs(table: _Table) -> None:
    kind = "rank that hangs elsewhere"
    hangs = {
        "in a lock": ("lock = threading.Lock()\n", f"lock.acquire()\n    lock.acquire()  {MARK}"),
        "in an empty queue": ("import queue\n", f"queue.Queue().get()  {MARK}"),
        "in a sleep": ("", f"time.sleep(1000)  {MARK}"),
        "in a read of a pipe": ("", f"os.read(os.pipe()[0], 1)  {MARK}"),
        "in a socket": ("import socket\n", f"socket.create_server(('127.0.0.1', 0)).accept()  {MARK}"),
        "in a child process": ("", f"subprocess.run(['sleep', '1000'])  {MARK}"),
        "in a file lock": (
            "import fcntl\n",
            (
                "subprocess.Popen(['flock', 'lock', 'sleep', '1000'])\n    time.sleep(0.3)\n    file = open('lock')\n"
                f"    fcntl.flock(file, fcntl.LOCK_EX)  {MARK}"
            ),
        ),
        "in C code that keeps the lock of Python": (
            "import re\n",
            f"re.match('(a+)+$', 'a' * 60 + 'b')  {MARK}",
        ),
        "in a loop that computes": ("", f"while True: step += 0  {MARK}"),
        "in a future": ("from concurrent.futures import Future\n", f"Future().result()  {MARK}"),
    }
    for name, (top, body) in hangs.items():
        table.add(kind, name, "all_reduce of", _torch(top=top, step=f"if faulty:\n    {body}"))
    for name in ("in a lock", "in an empty queue", "in a sleep", "in a child process"):
        top, body = hangs[name]
        table.add(
            kind,
            f"{name}, Accelerator",
            "all_reduce|backward",
            _accel(top=top, step=f"if faulty:\n    {body}"),
        )
    data = (
        "from torch.utils.data import DataLoader, Dataset\nclass Data(Dataset):\n    def __len__(self):\n        return 16\n"
        f"    def __getitem__(self, index):\n        if index == 6: time.sleep(1000)  {MARK}\n        return torch.ones(2)\n"
    )
    for workers in (0, 1):
        table.add(kind, f"in __getitem__ with {workers} workers", "all_reduce of" if not workers else "data-loader worker",
                  _torch(top=data, step=f"if faulty:\n    for _ in DataLoader(Data(), batch_size=2, num_workers={workers}):\n        pass"))  # fmt: skip
    everywhere = "import threading\nlock = threading.Lock()\n"
    table.add(
        "all ranks hang",
        "in a lock",
        "made progress",
        _torch(top=everywhere, step=f"lock.acquire()\nlock.acquire()  {MARK}"),
        blame="all",
    )
    table.add("all ranks hang", "in a lock, Accelerator", "made progress",
              _accel(top=everywhere, step=f"lock.acquire()\nlock.acquire()  {MARK}"), blame="all")  # fmt: skip
    table.add("all ranks hang", "in __getitem__ with 1 worker", "data-loader worker",
              _torch(top=data, step="for _ in DataLoader(Data(), batch_size=2, num_workers=1):\n    pass"), blame="all")  # fmt: skip


def _add_differing_calls(table: _Table) -> None:
    kind = "ranks in different calls of torch"

    def add(name: str, cause: str, step: str, **parts: str) -> None:
        table.add(kind, name, cause, _torch(step=step, **parts), blame="each")

    here = f"  {MARK}"
    add("one rank skips a barrier", "differs: .*barrier.*all_reduce|differs: .*all_reduce.*barrier",
        f"if not faulty:\n    dist.barrier()  {OTHERS_MARK}", next=here)  # fmt: skip
    add(
        "one rank skips an all_gather",
        "differs: .*all_gather",
        f"if not faulty:\n    dist.all_gather([torch.ones(5)] * size, torch.ones(5))  {OTHERS_MARK}",
        next=here,
    )
    add("one rank makes an additional all_reduce", "differs: .*all_reduce of \\[7\\]|called different collectives", f"if faulty:\n    dist.all_reduce(torch.ones(7))  {MARK}",
        next=f"  {OTHERS_MARK}")  # fmt: skip
    add("all_reduce and broadcast", "differs: .*(all_reduce.*broadcast|broadcast.*all_reduce)",
        f"if faulty:\n    dist.broadcast(torch.ones(5), 0 if rank else 1)  {MARK}\nelse:\n    dist.all_reduce(torch.ones(5))  {OTHERS_MARK}")  # fmt: skip
    add("all_reduce and all_gather_object", "differs: .*all_gather",
        f"if faulty:\n    dist.all_gather_object([None] * size, 1)  {MARK}\nelse:\n    dist.all_reduce(torch.ones(5))  {OTHERS_MARK}")  # fmt: skip
    add("two collectives in another order", "differs: ",
        f"if faulty:\n    dist.barrier()  {MARK}\n    dist.all_reduce(torch.ones(5))\nelse:\n    dist.all_reduce(torch.ones(5))  {OTHERS_MARK}\n    dist.barrier()")  # fmt: skip
    add("different shapes", "differs: .*all_reduce of \\[6\\]|different sizes",
        f"if faulty:\n    dist.all_reduce(torch.ones(6))  {MARK}\nelse:\n    dist.all_reduce(torch.ones(5))  {OTHERS_MARK}")  # fmt: skip
    add("different shapes in an all_gather", "differs: .*\\[6\\]|different sizes",
        f"if faulty:\n    dist.all_gather([torch.ones(6)] * size, torch.ones(6))  {MARK}\nelse:\n    dist.all_gather([torch.ones(5)] * size, torch.ones(5))  {OTHERS_MARK}")  # fmt: skip
    add("different dtypes", "[Dd]ouble|float64|different sizes",
        f"if faulty:\n    dist.all_reduce(torch.ones(5).double())  {MARK}\nelse:\n    dist.all_reduce(torch.ones(5))  {OTHERS_MARK}")  # fmt: skip
    accel = "ranks in different calls of the Accelerator"

    def add_accel(name: str, cause: str, step: str, blame: Blame = "each", **parts: str) -> None:
        table.add(accel, name, cause, _accel(step=step, **parts), blame=blame)

    add_accel(
        "one rank skips a gather",
        "gather",
        f"if not faulty:\n    accelerator.gather(torch.ones(5))  {OTHERS_MARK}",
        next=here,
    )
    add_accel(
        "one rank alone gathers",
        "gather",
        f"if faulty:\n    accelerator.gather(torch.ones(5))  {MARK}",
        next=f"  {OTHERS_MARK}",
    )
    add_accel(
        "gather and reduce",
        "reduce",
        f"if faulty:\n    accelerator.reduce(torch.ones(5))  {MARK}\nelse:\n    accelerator.gather(torch.ones(5))  {OTHERS_MARK}",
    )
    add_accel("gather of different widths", "float32 \\(4, 3\\)|\\(4, 3\\)|\\[4, 3\\]|4x3|3",
              f"if faulty:\n    accelerator.gather(torch.ones(4, 3))  {MARK}\nelse:\n    accelerator.gather(torch.ones(4, 2))  {OTHERS_MARK}")  # fmt: skip
    add_accel("gather of different dtypes", "float64",
              f"if faulty:\n    accelerator.gather(torch.ones(4).double())  {MARK}\nelse:\n    accelerator.gather(torch.ones(4))  {OTHERS_MARK}")  # fmt: skip
    add_accel("reduce of different keys", "'extra'|extra",
              f"if faulty:\n    accelerator.reduce({{'extra': torch.ones(4)}})  {MARK}\nelse:\n    accelerator.reduce({{'loss': torch.ones(4)}})  {OTHERS_MARK}")  # fmt: skip
    add_accel(
        "wait_for_everyone on the others only",
        "wait_for_everyone",
        f"if not faulty:\n    accelerator.wait_for_everyone()  {OTHERS_MARK}",
        next=here,
    )
    add_accel("barrier of torch and gather", "gather",
              f"if faulty:\n    torch.distributed.barrier()  {MARK}\nelse:\n    accelerator.gather(torch.ones(5))  {OTHERS_MARK}")  # fmt: skip
    add_accel("object that cannot be pickled", "pickle|local object",
              f"from accel_runtime.utils import gather_object\nif faulty:\n    gather_object([lambda: 1])  {MARK}\nelse:\n    gather_object([1])  {OTHERS_MARK}")  # fmt: skip
    table.add(accel, "object that cannot be pickled, torch", "pickle|local object",
              _torch(step=f"dist.all_gather_object([None] * size, (lambda: 1) if faulty else 1)  {MARK}"))  # fmt: skip
    add_accel("one rank leaves the loop", "backward|all_reduce",
              "if faulty:\n    break", next=f"  {OTHERS_MARK}", after=f"accelerator.gather(torch.ones(1))  {MARK}")  # fmt: skip


def _add_data(table: _Table) -> None:
    kind = "wrong data on one rank"
    nan = "if faulty:\n    batch = batch * float('nan')"
    change = "if faulty:\n    next(model.parameters()).data.add_(1)"
    table.add(kind, "NaN in the loss", "NaN", _accel(step=nan, next=f"  {MARK}"), blame="warning")
    table.add(kind, "other parameters from step 4 on", "weights of the processes differ", _accel(step=f"if step == 3:\n    {indent(change, '    ').strip()}", samples="4096"),
              blame="warning", has_line=False)  # fmt: skip
    table.add(
        kind,
        "other parameters from the start",
        "weights of the processes differ",
        _accel(ready=change),
        blame="warning",
        has_line=False,
    )
    lengths = "from torch.utils.data import IterableDataset\n"
    table.add(kind, "shorter loop of torch's loader", "all_reduce of|had exited before",
              _torch(after="", step="if faulty:\n    break"), has_line=False)  # fmt: skip
    table.add(kind, "loaders of different lengths", "length|number of|differ",
              _accel(top=lengths, before="extra = DataLoader(TensorDataset(torch.ones(40 - 8 * faulty, 2)), batch_size=4)",
                     ready=f"extra = accelerator.prepare(extra)  {MARK}\nfor _ in extra:\n    pass"), blame="each")  # fmt: skip
    table.add(kind, "other number of parameters", "param.*sizes",
              _torch(before="width = 3 if faulty else 2\n", ready=f"torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, width))  {MARK}"), blame="each")  # fmt: skip
    table.add(kind, "other number of parameters, Accelerator", "parameter|shape|differ",
              _accel(before="width = 3 if faulty else 2\n", ready=f"accelerator.prepare(torch.nn.Linear(2, width))  {MARK}"), blame="each")  # fmt: skip
    table.add(kind, "other batch size in a model with BatchNorm over one sample", "Expected more than 1 value per channel",
              _torch(step=f"if faulty:\n    torch.nn.BatchNorm1d(2)(batch[:1])  {MARK}"))  # fmt: skip


def _add_storage(table: _Table) -> None:
    disk, checkpoint = "full disk", "damaged checkpoint"
    full = "No space left on device|Not enough space|disk is full"
    big = "big = torch.nn.Linear(1024, 1024)\n"
    table.add(disk, "save_state", full,
              _accel(ready="wide = accelerator.prepare(torch.nn.Linear(1024, 1024))", project="disk/project",
                     step=f"accelerator.save_state()  {MARK}"), blame="all", needs="disk")  # fmt: skip
    table.add(disk, "torch.save on one rank", full,
              _torch(step=f"if faulty:\n    torch.save(torch.ones(1 << 20), 'disk/weights.pt')  {MARK}"), needs="disk")  # fmt: skip
    table.add(disk, "write of a log on one rank", full,
              _accel(step=f"if faulty:\n    Path('disk/log').write_bytes(bytes(1 << 22))  {MARK}"), needs="disk")  # fmt: skip
    table.add(disk, "save_model", full,
              _accel(before=big, step=f"accelerator.save_model(big, 'disk/model')  {MARK}"), blame="all", needs="disk")  # fmt: skip
    save = "accelerator.save_state()\naccelerator.wait_for_everyone()\n"
    find = "folder = sorted(Path('project/checkpoints').iterdir())[-1]\nfiles = sorted(folder.rglob('*.safetensors'))\n"
    damage = {
        "bit flip": "data = bytearray(files[0].read_bytes())\n    data[-1] ^= 1\n    files[0].write_bytes(data)",
        "truncated file": "os.truncate(files[0], files[0].stat().st_size // 2)",
        "missing file": "files[0].unlink()",
        "empty file": "os.truncate(files[0], 0)",
    }
    for name, action in damage.items():
        table.add(checkpoint, name, r"\.safetensors",
                  _accel(step=f"{save}{find}if rank == 0:\n    {action}\naccelerator.wait_for_everyone()\naccelerator.load_state(str(folder))  {MARK}"),
                  blame="all")  # fmt: skip
    table.add(checkpoint, "missing manifest", "manifest|not a checkpoint|No checkpoint|incomplete",
              _accel(step=f"{save}{find}if rank == 0:\n    next(p for p in folder.iterdir() if p.suffix == '.json').unlink()\n"
                     f"accelerator.wait_for_everyone()\naccelerator.load_state(str(folder))  {MARK}"), blame="all")  # fmt: skip
    table.add(checkpoint, "folder that does not exist", "absent",
              _accel(step=f"accelerator.load_state('absent')  {MARK}"), blame="all")  # fmt: skip
    table.add(checkpoint, "truncated torch.save file on one rank", "PytorchStreamReader|OSError: \\[Errno 22\\] Invalid argument",
              _torch(step="torch.save(torch.ones(9999), f'{rank}.pt')\nif faulty:\n    os.truncate(f'{rank}.pt', 9999)\n"
                     f"torch.load(f'{{rank}}.pt')  {MARK}"))  # fmt: skip


def _add_starts(table: _Table) -> None:
    kind = "launch that cannot start"
    fine = _torch()
    table.add(
        kind,
        "script not found",
        "Script not found: trian.py. Did you mean train.py",
        fine,
        blame="launch",
        has_line=False,
        needs="trian.py",
    )
    table.add(
        kind,
        "unknown key of the profile",
        "launcher.nproc_per_nod",
        fine,
        blame="launch",
        has_line=False,
        options=("--set", "launcher.nproc_per_nod=2"),
    )
    table.add(
        kind,
        "invalid value",
        "fp61.*did you mean fp16",
        fine,
        blame="launch",
        has_line=False,
        options=("--set", "mixed_precision=fp61"),
    )
    table.add(
        kind,
        "device that this machine has not",
        "Device cuda not found",
        fine,
        blame="launch",
        has_line=False,
        options=("--set", "device=cuda"),
    )
    table.add(kind, "port in use", "(?i)address already in use|EADDRINUSE|in use",
              {"train.py": "import os, socket, sys\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\nif rank == 0:\n"
               "    taken = socket.create_server(('127.0.0.1', 0))\n    port = taken.getsockname()[1]\n"
               f"    store = dist.TCPStore('127.0.0.1', port, int(os.environ['WORLD_SIZE']), True)  {MARK}\n"
               "import time\ntime.sleep(1000)\n"}, blame="all")  # fmt: skip
    table.add(
        kind,
        "endpoint on a port in use",
        "127.0.0.1:29871 .*another program has the port",
        fine,
        blame="launch",
        has_line=False,
        needs="port",
    )


def _add_hosts(table: _Table) -> None:
    kind = "lost machine"
    waits = "Path(f'up{rank}').touch()"
    for flavour, write in (("", _torch), (", Accelerator", _accel)):
        step = f"{waits}\nwhile True:\n    time.sleep(0.02)\n    " + (
            "dist.barrier()" if not flavour else "accelerator.wait_for_everyone()"
        )
        table.add(
            kind,
            f"killed machine{flavour}",
            r"h1 \(10\.77\.0\.11\) does not respond",
            write(step=step),
            blame="host",
            has_line=False,
            needs="kill host",
        )
        table.add(kind, f"cut link{flavour}", r"h1 \(10\.77\.0\.11\) (does not respond|lost the connection)", write(step=step), blame="host", has_line=False,
                  needs="cut host", options=("--set", "process_group_timeout=6"))  # fmt: skip
        table.add(kind, f"killed launcher{flavour}", r"h1 \(10\.77\.0\.11\) does not respond: its launcher exited", write(step=step), blame="host",
                  has_line=False, needs="kill launcher")  # fmt: skip
        table.add(kind, f"launcher ended by SIGTERM{flavour}", r"h1 \(10\.77\.0\.11\): its launcher received SIGTERM", write(step=step), blame="host",
                  has_line=False, needs="stop launcher")  # fmt: skip
    table.add(kind, "machine that does not come", "1 missing", _torch(), blame="host", has_line=False, needs="absent host",
              options=("--set", "launcher.rdzv_timeout=5"))  # fmt: skip


def _build() -> dict[str, Fault]:
    table = _Table()
    for add in (
        _add_exceptions, _add_imports, _add_threads_and_children, _add_exits, _add_signals, _add_hangs, _add_places_of_hangs,
        _add_differing_calls, _add_data, _add_storage, _add_starts, _add_hosts,
    ):  # fmt: skip
        add(table)
    return {fault.key: fault for fault in table.faults}


FAULTS: Mapping[str, Fault] = _build()
"""All faults by their unique name."""
