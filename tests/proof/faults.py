"""Fault attribution: inject faults into real launches, and check the rank, the line and the cause that accel names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proof import Options
from proof.fault_reports import read_attribution
from proof.fault_table import FAULTS, Fault, Place

__all__ = ["CASES", "TITLE", "Case", "Outcome", "headline", "judge", "render", "run", "run_case"]

TITLE = "Fault attribution"
_AT_ONCE = 4
"""Launches at the same time; most of them wait."""
_STALL_S = 3
_LIMIT_S = 150
"""Seconds after which a launch is ended: it has named nothing."""
_SHOWN_CHARACTERS = 1500


@dataclass(frozen=True)
class Case:
    """A fault in one kind of launch.

    Attributes:
        fault: Its key in the table.
        launcher: `single`, `torchrun`, or `two machines` for two network namespaces with one agent each.
        ranks: The number of ranks.
        faulty: The rank with the fault.
    """

    fault: str
    launcher: str
    ranks: int
    faulty: int

    @property
    def name(self) -> str:
        """Its name for `FAULT=`."""
        where = "" if self.launcher == "single" else f", {self.ranks} ranks, rank {self.faulty}"
        return f"{self.fault} [{self.launcher}{where}]"


@dataclass(frozen=True)
class Outcome:
    """What a case has shown.

    Attributes:
        output: What the launch has printed, of each machine.
        folder: The folder of the script.
        code: The exit code of the launch, of the first machine.
        seconds: Its duration.
    """

    outputs: Sequence[str]
    folder: str
    code: int | None
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What is right in a report; None where there is nothing to name, as the rank of one process."""

    rank: bool | None
    line: bool | None
    cause: bool
    blames_wrongly: bool = False
    got: str = ""
    expected: str = ""

    @property
    def is_right(self) -> bool:
        """Return True if nothing is wrong."""
        return self.rank is not False and self.line is not False and self.cause


def judge(case: Case, fault: Fault, outcome: Outcome) -> Verdict:  # noqa: C901 - a case of each blame
    """Compare the reports of a launch with what was injected."""
    attributions = [read_attribution(output, outcome.folder) for output in outcome.outputs]
    text = "\n".join(each.text for each in attributions)
    cause = bool(re.search(fault.cause, text, re.DOTALL))
    expected = f"{_describe_blame(case, fault)}{_format_place(fault.line)}, /{fault.cause}/"
    accused: dict[int, set[Place]] = {}
    mentioned: dict[int, set[Place]] = {}
    for each in attributions:
        for target, source in ((accused, each.accused), (mentioned, each.mentioned)):
            for rank, places in source.items():
                target.setdefault(rank, set()).update(places)
    got = f"accused {_format_ranks(accused)}; listed {_format_ranks(mentioned)}"
    everyone = set(range(case.ranks))
    rank: bool | None
    line: bool | None = None
    match fault.blame:
        case "faulty":
            rank = set(accused) == {case.faulty}
            line = fault.line in accused.get(case.faulty, ()) if fault.line else None
        case "each":
            named = {**mentioned, **{r: places | mentioned.get(r, set()) for r, places in accused.items()}}
            rank = set(named) == everyone or (case.ranks > 2 and case.faulty in named)
            line = fault.line in named.get(case.faulty, ())
            if case.ranks == 2 and fault.line_of_others:
                line = line and all(
                    fault.line_of_others in named.get(r, ()) for r in everyone - {case.faulty}
                )
        case "all":
            rank = bool(accused) and set(accused) <= everyone
            line = any(fault.line in places for places in accused.values())
        case "host":
            hosts = set(re.findall(r"^accel: error: (h\d) \(", text, re.MULTILINE))
            rank = cause and hosts <= {"h1"}
        case "launch":
            rank = None if not accused else False
            cause = cause and bool(outcome.code)
        case "warning":
            notes = [
                line
                for output in outcome.outputs
                for line in output.splitlines()
                if re.search(fault.cause, line)
            ]
            names = [
                number
                for note in notes
                for numbers in re.findall(r"\brank ([\d, ]+)", note)
                for number in re.findall(r"\d+", numbers)
            ]
            named_ranks = {*map(int, names)}
            # Weights are compared with those of rank 0; of two ranks, either may be the wrong one.
            rank = case.faulty in named_ranks and (named_ranks <= {0, case.faulty} or named_ranks == everyone)
            cause = bool(notes)
            got = f"warnings name {sorted(named_ranks)}: {' | '.join(notes)[:300]}"
            line = (
                bool(fault.line) and any(f"{fault.line[0]}:{fault.line[1]}" in note for note in notes)
                if fault.line
                else None
            )
        case "nobody":
            rank = not accused
    if case.ranks == 1:
        rank = None
    blames_wrongly = fault.blame in {"faulty", "launch"} and bool(accused.keys() - {case.faulty})
    return Verdict(rank, line, cause, blames_wrongly, got, expected)


def _describe_blame(case: Case, fault: Fault) -> str:
    texts = {
        "faulty": f"rank {case.faulty}",
        "each": f"every rank with its call, rank {case.faulty} apart from the others",
        "all": "any rank, since all fail",
        "host": "machine h1",
        "launch": "no rank",
        "warning": f"rank {case.faulty} in a warning",
        "nobody": "no rank",
    }
    return texts[fault.blame]


def _format_place(place: Place | None) -> str:
    return f" at {place[0]}:{place[1]}" if place else ""


def _format_ranks(ranks: Mapping[int, Sequence[Place] | set[Place]]) -> str:
    texts = [
        f"rank {rank}{''.join(map(_format_place, sorted(places)))}" for rank, places in sorted(ranks.items())
    ]
    return ", ".join(texts) or "none"


def run_case(case: Case, folder: Path, cluster: Any = None) -> Outcome:
    """Launch the script of a case in a folder, cause what does not come from the script, and wait for the end.

    The cluster is that of the cases with Slurm or ssh.
    """
    fault = FAULTS[case.fault]
    for name, text in fault.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / ".git").mkdir()  # no project file of a parent
    (folder / "disk").mkdir()
    started = time.monotonic()
    with _provide(fault.needs, folder) as enter:
        if cluster is not None:
            outputs, code = _run_on_cluster(case, fault, folder, cluster)
        elif case.launcher == "two machines":
            outputs, code = _run_on_machines(case, fault, folder)
        else:
            outputs, code = _run_here(case, fault, folder, enter)
    return Outcome(outputs, str(folder), code, time.monotonic() - started)


def _list_options(case: Case, fault: Fault) -> list[str]:
    """Return the arguments of `accel` after `launch`."""
    if case.launcher == "single":
        places = ["--no-profile", "--cpu", "-q", "--set", "launcher.kind=single"]
    else:
        count = case.ranks if case.launcher == "torchrun" else case.ranks // 2
        stalls = ["--stall-timeout", str(_STALL_S), "--stall-action", "fail"]
        if case.launcher != "slurm":
            stalls += ["--shutdown-timeout", "1"]
        device = [] if "device=cuda" in fault.options else ["--cpu"]
        places = ["--no-profile", *device, "-q", "--nproc-per-node", str(count), *stalls]
    if case.launcher == "two machines":
        places += ["--nnodes", "2", "--rdzv-endpoint", "h0:29400"]
    if case.launcher == "slurm":
        places += ["--set", "launcher.kind=slurm", "--nnodes", "2"]
    if case.launcher == "ssh":
        places += ["--hosts", "h0,h1"]
    if fault.needs == "port":
        places += ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29871", "--node-rank", "0"]
        places += ["--set", "launcher.allow_loopback=true", "--set", "launcher.rdzv_timeout=5"]
    script = "trian.py" if fault.needs == "trian.py" else "train.py"
    return [*places, *fault.options, script, str(case.faulty)]


def _build_environ(folder: Path, name: str = "home") -> dict[str, str]:
    """Return an environment without variables of accel and of launchers, and a folder for the files of runs."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCEL_", "ACCELERATE_")) and key not in launcher
    }
    path = f"{environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    return {**environ, "ACCEL_HOME": str(folder / name), "PATH": path, "_TYPER_FORCE_DISABLE_TERMINAL": "1"}


def _run_here(case: Case, fault: Fault, folder: Path, enter: Any) -> tuple[list[str], int | None]:
    """Launch on this machine; return the output, and the exit code or None at the limit."""
    from support.processes.commands import Accel

    path = folder / "output"
    with path.open("wb") as file:
        process = Accel(
            "launch", *_list_options(case, fault), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            cwd=folder, env=_build_environ(folder),
        )  # fmt: skip
        enter(process.pid)
        code = _wait(process)
    return [path.read_text(encoding="utf-8", errors="replace")], code


def _wait(process: subprocess.Popen[Any], limit: float = _LIMIT_S) -> int | None:
    """Return the exit code; end the launch at the limit, and return None."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
        return None


def _run_on_machines(case: Case, fault: Fault, folder: Path) -> tuple[list[str], int | None]:
    """Launch on two hosts in network namespaces, and do to the second one what the fault needs."""
    from support.hosts.network import hosts
    from support.processes.waits import wait_until

    with hosts(2) as two:
        count = 1 if fault.needs == "absent host" else 2
        options = _list_options(case, fault)
        processes = [
            host.accel(
                "launch", "--ranks", "all", "--node-rank", str(number), *options,
                env=_build_environ(folder, f"home{number}"), cwd=folder,
            )
            for number, host in enumerate(two[:count])
        ]  # fmt: skip
        if fault.needs in {"kill host", "cut host", "kill launcher", "stop launcher"}:
            wait_until(lambda: len([*folder.glob("up*")]) == case.ranks)
            time.sleep(0.5)
            match fault.needs:
                case "kill host":
                    two[1].kill()
                case "cut host":
                    two[1].cut()
                case "kill launcher":
                    processes[1].kill()
                case "stop launcher":
                    processes[1].terminate()
        with ThreadPoolExecutor(count) as pool:
            outputs = [*pool.map(_read_all, processes)]
    # A machine that is gone prints nothing that counts.
    return outputs[: 1 if fault.needs else 2], processes[0].returncode


def _run_on_cluster(case: Case, fault: Fault, folder: Path, cluster: Any) -> tuple[list[str], int | None]:
    """Launch in a job of Slurm, or over ssh from the first host."""
    from support.processes.commands import Accel

    environ = _build_environ(folder)
    arguments = ["launch", "--ranks", "all", *_list_options(case, fault)]
    if case.launcher == "ssh":
        environ["PATH"] = f"{cluster.folder}:{environ['PATH']}"
        process = cluster.machines[0].accel(*arguments, env=environ, cwd=folder)
    else:
        environ["PATH"] = f"{cluster.path}:{environ['PATH']}"
        process = Accel(
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=environ,
        )
    output = _read_all(process)
    return [output], process.returncode


def _read_all(process: subprocess.Popen[str]) -> str:
    """Return the output of a launch, which is ended at the limit."""
    try:
        return process.communicate(timeout=_LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=20)[0]
        process.kill()
        return process.communicate()[0]


@contextlib.contextmanager
def _provide(need: str, folder: Path) -> Iterator[Any]:
    """Provide what a fault needs: a function that is called with the process id of the launch is returned."""
    if need == "memory":
        group = _make_memory_group(folder)
        try:
            yield lambda pid: (group / "cgroup.procs").write_text(str(pid))
        finally:
            _remove_group(group)
    elif need == "disk":
        disk = str(folder / "disk")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
        try:
            yield lambda _: None
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
    elif need == "port":
        with socket.create_server(("127.0.0.1", 29871)):
            yield lambda _: None
    else:
        yield lambda _: None


_CGROUPS = Path("/sys/fs/cgroup")


def _make_memory_group(folder: Path) -> Path:
    """Make a control group with 1 GiB, of the first version or the second.

    Raises:
        OSError: This user may not.
    """
    for parent, setting in ((_CGROUPS / "memory", "memory.limit_in_bytes"), (_CGROUPS, "memory.max")):
        if parent.is_dir():
            group = parent / f"accel-proof-{os.getpid()}-{folder.name}"
            group.mkdir()
            if (group / setting).exists():
                (group / setting).write_text(str(1 << 30))
                return group
            group.rmdir()
    raise OSError("no control group for memory")


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + 20
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
        time.sleep(0.1)


_ON_MACHINES = (
    "exception in the main thread: raise",
    "exception in the main thread: raise, Accelerator",
    "exception in the main thread: in a function of another module",
    "exception in the main thread: in a hook of a gradient",
    "import or syntax error: SyntaxError in a module",
    "failure of a data-loader worker: __getitem__ with 1 workers",
    "failure of a child process: multiprocessing pool",
    "exit with a code: sys.exit(3)",
    "exit with a code: os._exit(3)",
    "rank that leaves early with code 0: sys.exit()",
    "rank that leaves early with code 0: sys.exit(), Accelerator",
    "fatal signal in native code: SIGSEGV",
    "fatal signal in native code: SIGABRT",
    "signal from another process: SIGKILL",
    "signal from another process: SIGSTOP",
    "rank that does not come to a collective of torch: late for all_reduce",
    "rank that does not come to a collective of torch: late for backward of DDP",
    "rank that does not come to a collective of torch: late for all_gather_object",
    "rank that does not come to a collective of the Accelerator: late for gather, Accelerator",
    "rank that does not come to a collective of the Accelerator: late for reduce, Accelerator",
    "rank that hangs elsewhere: in a lock",
    "rank that hangs elsewhere: in an empty queue",
    "ranks in different calls of torch: one rank skips a barrier",
    "ranks in different calls of the Accelerator: gather and reduce",
    "ranks in different calls of the Accelerator: gather of different widths",
    "wrong data on one rank: loaders of different lengths",
    "damaged checkpoint: bit flip",
)
"""The faults that are injected on two machines too."""
_ON_CLUSTERS = (
    "exception in the main thread: raise",
    "exit with a code: sys.exit(3)",
    "fatal signal in native code: SIGSEGV",
    "rank that does not come to a collective of torch: late for all_reduce",
)
"""The faults that are injected over ssh and in a Slurm job too: their agents are those of two machines."""
_ON_ONE_PROCESS = (
    "exception in the main thread: raise",
    "exception in the main thread: in a function of another module",
    "import or syntax error: SyntaxError in the script",
    "failure of a data-loader worker: __getitem__ with 1 workers",
    "exit with a code: sys.exit(text)",
    "fatal signal in native code: SIGSEGV",
    "damaged checkpoint: bit flip",
    "full disk: save_state",
)
"""The faults that are injected with the launcher `single` too, where the process prints its error itself."""


def _list_cases() -> list[Case]:
    """Return the cases: each fault in pairs of launcher, ranks and faulty rank, not in all products."""
    cases = []
    for number, (key, fault) in enumerate(FAULTS.items()):
        if fault.blame == "host":
            cases.append(Case(key, "two machines", 2, 1))
            continue
        cases.append(Case(key, "torchrun", 2, 1))
        if number % 3 == 0 and fault.blame != "launch":
            cases.append(Case(key, "torchrun", 4, 0))
    cases += [
        Case(key, "two machines", *((4, 3) if number % 3 == 0 else (2, number % 2)))
        for number, key in enumerate(_ON_MACHINES)
    ]
    cases += [Case(key, launcher, 2, 1) for launcher in ("slurm", "ssh") for key in _ON_CLUSTERS]
    return [*cases, *(Case(key, "single", 1, 0) for key in _ON_ONE_PROCESS)]


CASES: Sequence[Case] = _list_cases()


def attempt(case: Case, root: Path, cluster: Any = None) -> dict[str, Any]:
    """Run and judge a case; return its record."""
    fault = FAULTS[case.fault]
    folder = Path(tempfile.mkdtemp(dir=root))
    outcome = run_case(case, folder, cluster)
    shutil.rmtree(folder, ignore_errors=True)
    verdict = judge(case, fault, outcome)
    mark = "right" if verdict.is_right else "WRONG"
    print(f"{mark} {outcome.seconds:5.1f} s  {case.name}", file=sys.stderr, flush=True)
    return {
        **asdict(case),
        "name": case.name,
        "kind": fault.kind,
        "expected": verdict.expected,
        "got": verdict.got,
        "rank_right": verdict.rank,
        "line_right": verdict.line,
        "cause_right": verdict.cause,
        "right": verdict.is_right,
        "blamed_wrongly": verdict.blames_wrongly,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 1),
        "output": "" if verdict.is_right else _shorten(outcome),
    }


def _shorten(outcome: Outcome) -> str:
    """Return the end of what a launch has printed, without names of this machine and of the folder."""
    texts = []
    for output in outcome.outputs:
        text = output.replace(outcome.folder, "...").replace(socket.gethostname(), "HOST")
        text = re.sub(r"/\S*/(?=site-packages/|lib/python|tests/)", ".../", text)
        texts.append(text.strip()[-_SHOWN_CHARACTERS:])
    return "\n----\n".join(texts)


def run_cases(cases: Sequence[Case], root: Path) -> list[dict[str, Any]]:
    """Run cases a few at a time; those on several machines one after the other, since their networks have one name."""
    records: dict[Case, dict[str, Any]] = {}
    here = [case for case in cases if case.launcher in {"torchrun", "single"}]
    with ThreadPoolExecutor(_AT_ONCE) as pool, ThreadPoolExecutor(1) as apart:
        machines = apart.submit(_run_apart, [case for case in cases if case not in here], root)
        records.update(zip(here, pool.map(lambda case: attempt(case, root), here), strict=True))
        records.update(machines.result())
    return [records[case] for case in cases if case in records]


def _run_apart(cases: Sequence[Case], root: Path) -> dict[Case, dict[str, Any]]:
    """Run the cases on several machines; without root they are left out."""
    records: dict[Case, dict[str, Any]] = {}
    if os.geteuid():
        return records
    for launcher in ("two machines", "slurm", "ssh"):
        chosen = [case for case in cases if case.launcher == launcher]
        if chosen:
            with _start_cluster(launcher, root) as cluster:
                records.update((case, attempt(case, root, cluster)) for case in chosen)
    return records


@contextlib.contextmanager
def _start_cluster(launcher: str, root: Path) -> Iterator[Any]:
    """Start the hosts that all cases of a launcher share."""
    if launcher == "slurm":
        from support.hosts.slurm import SlurmCluster

        with contextlib.closing(SlurmCluster().start()) as cluster:
            yield cluster
    elif launcher == "ssh":
        from support.hosts.ssh import ssh_hosts

        with ssh_hosts(2, root / "ssh") as cluster:
            yield cluster
    else:
        yield None


def run(options: Options) -> dict[str, Any]:
    """Run all cases."""
    started = time.monotonic()
    return {"cases": run_cases(CASES, options.folder), "seconds": round(time.monotonic() - started)}


def headline(results: Mapping[str, Any]) -> tuple[str, str]:
    """Return the number of cases with the right rank, line and cause."""
    cases = results["cases"]
    right = sum(case["right"] for case in cases)
    return f"{right} of {len(cases)}", "injected faults with the right rank, line and cause"


def render(results: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    cases = results["cases"]
    number, _ = headline(results)
    launchers = Counter(case["launcher"] for case in cases)
    no_line = sum(case["line_right"] is None for case in cases)
    lines = [
        (
            f"**{number}** injected faults were named with the right rank, line and cause, in "
            f"{results['seconds'] // 60} minutes."
        ),
        "",
        (
            f"Each of {len({case['fault'] for case in cases})} faults is a script with a marked line, run by a real `accel launch` "
            f"with `--stall-timeout {_STALL_S} --stall-action fail`, so that a hang is reported after {_STALL_S} seconds instead of "
            f"minutes ({', '.join(f'{count} with {name}' for name, count in launchers.items())}). The rank, the line of the mark and the "
            "cause are written beside the script, and compared with what the launch prints; a case is right if all three are. "
            f"{no_line} cases have no line of the script, such as a signal from outside: then rank and cause are compared."
        ),
        "",
        "| Fault | right | wrong rank | wrong line | wrong cause | another rank blamed |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_render_row(kind, cases) for kind in dict.fromkeys(case["kind"] for case in cases)),
        "",
        (
            "Where either of two ranks may be the wrong one, as in calls that differ, the report must list each with its call and line. "
            "The last column counts reports that hold a rank responsible which has no fault; they are among the wrong ones."
        ),
        "",
        *(
            _render_wrong(fault, cases)
            for fault in dict.fromkeys(case["fault"] for case in cases if not case["right"])
        ),
        "",
        (
            "[The record](proof/faults.json) has the output of each. One case, or all whose names contain a text: "
            f"`PYTHONPATH=tests:. .venv/bin/python -m proof.faults '{cases[0]['name']}'`."
        ),
    ]
    return "\n".join(lines)


def _render_row(kind: str, cases: Sequence[Mapping[str, Any]]) -> str:
    of_kind = [case for case in cases if case["kind"] == kind]
    wrong = [sum(case[f"{part}_right"] is False for case in of_kind) for part in ("rank", "line", "cause")]
    counts = [*wrong, sum(case["blamed_wrongly"] for case in of_kind)]
    right = sum(case["right"] for case in of_kind)
    return f"| {kind} | {right} of {len(of_kind)} | {' | '.join(str(count or '') for count in counts)} |"


def _render_wrong(fault: str, cases: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for a fault, with the first of its cases that are wrong."""
    wrong = [case for case in cases if case["fault"] == fault and not case["right"]]
    parts = [
        part for part in ("rank", "line", "cause") if any(case[f"{part}_right"] is False for case in wrong)
    ]
    number = f"{len(wrong)} of {sum(case['fault'] == fault for case in cases)}"
    return f"- **{fault}**: wrong {' and '.join(parts)} in {number}. Expected: {wrong[0]['expected']}. Found: {wrong[0]['got']}."


def main() -> None:
    """Run the cases whose names contain a text, and print their records; exit with 1 if one is wrong."""
    pattern = sys.argv[1]
    chosen = [case for case in CASES if pattern in case.name]
    if not chosen:
        names = "\n".join(case.name for case in CASES)
        sys.exit(f"No case contains {pattern!r}. Choose from:\n{names}")
    with tempfile.TemporaryDirectory(prefix="accel-fault-") as folder:
        records = run_cases(chosen, Path(folder))
    for record in records:
        print(json.dumps(record, indent=1, ensure_ascii=False).replace("\\n", "\n"))
    sys.exit(any(not record["right"] for record in records))


if __name__ == "__main__":
    main()
