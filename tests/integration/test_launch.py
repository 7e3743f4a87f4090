"""`accel launch`: processes, exit codes, arguments, signals and messages."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.children import Process
from support.processes.commands import Accel, run_accel
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_for_texts

TELL = """
import json, os, sys
from pathlib import Path
rank = os.environ.get("RANK", "0")
told = {"argv": sys.argv, "file": __file__, "path0": sys.path[0], "name": __name__,
        "world": os.environ.get("WORLD_SIZE"), "omp": os.environ.get("OMP_NUM_THREADS"),
        "precision": os.environ.get("ACCEL_MIXED_PRECISION"), "package": __package__}
Path(os.environ["OUT"], rank + ".json").write_text(json.dumps(told))
"""


@pytest.fixture
def accel(cwd):
    """Runs `accel`, forked from an interpreter that has imported torch, in an empty folder."""
    return run_accel


@pytest.fixture
def read_results(tmp_path, monkeypatch):
    """Return the JSON that each rank of a launched script has written."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    return lambda: {path.stem: json.loads(path.read_text()) for path in sorted(out.iterdir())}


def test_one_process_replaces_the_launcher_and_keeps_its_exit_code(accel, script):
    script("import os, sys; print(os.getpid()); sys.exit(7)")
    command = [sys.executable, "-m", "accel_cli", "launch", "train.py"]
    with Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate(timeout=limit(200))
    assert (process.returncode, out.strip()) == (7, str(process.pid))
    assert err.startswith(
        "accel: single, 1 process, cpu, mixed precision no; profile: none, detected defaults"
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_module_of_the_working_folder_breaks_no_launch_and_is_that_of_the_script(script, cwd, count):
    """As `python -m accel_cli` runs on the nodes of Slurm and on the hosts of ssh."""
    for name in ("pydantic", "typing_extensions", "yaml"):
        script("mine = True\n", f"{name}.py")
    script("import sys, yaml\nprint(yaml.mine, sys.path[0])\n")
    command = [
        sys.executable,
        "-m",
        "accel_cli",
        "launch",
        "--cpu",
        "--nproc-per-node",
        str(count),
        "train.py",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=limit(200), check=False)
    assert (result.returncode, result.stdout) == (0, f"True {cwd}\n"), result.stderr


def test_the_requested_number_of_processes_runs(accel, script, read_results):
    script(TELL)
    result = accel("launch", "--cpu", "--nproc-per-node", 3, "train.py", "x")
    assert result.returncode == 0, result.stderr
    assert {rank: rank_result["world"] for rank, rank_result in read_results().items()} == {
        "0": "3",
        "1": "3",
        "2": "3",
    }


@pytest.mark.parametrize("count", [1, 2])
def test_a_script_has_the_environment_of_python(accel, script, read_results, count):
    path = script(TELL, "sub/train.py")
    result = accel(
        "launch", "--nproc-per-node", count, "--mixed-precision", "bf16", "sub/train.py", "--lr", "-1"
    )
    assert result.returncode == 0, result.stderr
    rank_result = read_results()["0"]
    assert (rank_result["argv"], rank_result["file"]) == (["sub/train.py", "--lr", "-1"], str(path))
    assert (rank_result["path0"], rank_result["name"], rank_result["precision"]) == (
        str(path.parent),
        "__main__",
        "bf16",
    )
    assert rank_result["package"] is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_module_runs_as_with_python_m(accel, script, read_results, count, cwd):
    script("", "pack/__init__.py")
    path = script("from . import __name__ as own\nassert own == 'pack'\n" + TELL, "pack/train.py")
    result = accel("launch", "--nproc-per-node", count, "-m", "pack.train", "--", "-m")
    assert result.returncode == 0, result.stderr
    rank_result = read_results()["0"]
    assert (rank_result["argv"], rank_result["package"], rank_result["name"]) == (
        [str(path), "--", "-m"],
        "pack",
        "__main__",
    )
    assert rank_result["path0"] == str(cwd)


@pytest.mark.parametrize("count", [1, 2])
def test_a_program_runs_without_python(accel, count):
    result = accel(
        "launch",
        "-q",
        *(["--ranks", "all"] if count > 1 else []),
        "--nproc-per-node",
        count,
        "--no-python",
        "sh",
        "-c",
        'echo "rank ${RANK:-0}: $1"',
        "_",
        "$$ x",
    )
    assert result.returncode == 0, result.stderr
    prefixes = [f"[{rank}] " if count > 1 else "" for rank in range(count)]
    assert sorted(result.stdout.splitlines()) == [f"{p}rank {rank}: $$ x" for rank, p in enumerate(prefixes)]


ARGS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12), max_size=4
)
AWKWARD = [
    "",
    " ",
    "a b",
    "--",
    "-1",
    "--help",
    "--cpu",
    "-m",
    "$$",
    "${local_rank}",
    "$HOME",
    "*",
    "'",
    '"',
    "\n",
    "é",
    "--set",
    "=",
    "\\",
]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(args=ARGS)
def test_arguments_of_one_process_are_unchanged(accel, script, args):
    script("import sys; print(ascii(sys.argv[1:]))")
    assert accel("launch", "-q", "train.py", *args).stdout.strip() == ascii(args)


def test_unusual_arguments_of_several_processes_are_unchanged(accel, script, read_results):
    script(TELL)
    args = [*AWKWARD, "train.py", *reversed(AWKWARD)]
    result = accel("launch", "--nproc-per-node", 2, "train.py", *args)
    assert result.returncode == 0, result.stderr
    assert [rank_result["argv"][1:] for rank_result in read_results().values()] == [args, args]


def test_arguments_that_are_not_utf_8_are_unchanged(script, cwd):
    script("import os, sys; print(os.fsencode(sys.argv[1]))")
    command = [sys.executable, "-m", "accel_cli", "launch", "-q", "train.py", b"\xff\xfe"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == r"b'\xff\xfe'"
    )


@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("os.kill(os.getpid(), 9)", 137, "terminated by SIGKILL"),
        ("os.abort()", 134, "terminated by SIGABRT"),
    ],
)
def test_the_exit_code_is_that_of_the_failed_rank_which_the_error_names(accel, script, ends, code, message):
    script(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ends}\ntime.sleep(60)")
    result = accel("launch", "--nproc-per-node", 2, "train.py")
    assert result.returncode == code
    error, end = result.stderr.splitlines()[-2:]
    assert error.startswith("accel: error: rank 1 of 2 on ")
    assert message in error
    assert f" with exit code {code}; logs: " in end


def test_a_traceback_begins_in_the_script(accel, script):
    path = script("def f():\n    raise ValueError('boom')\nf()\n")
    result = accel("launch", "--nproc-per-node", 2, "train.py")
    lines = result.stderr.splitlines()
    assert f'  File "{path}", line 3, in <module>' in lines
    assert not [line for line in lines if "worker.py" in line or "runpy" in line or "elastic" in line]


@pytest.mark.parametrize(("number", "count"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_ends_every_process(script, cwd, count, number):
    script(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "def stop(*_):\n    Path('saved' + os.environ.get('RANK', '0')).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nsignal.signal(signal.SIGINT, stop)\n"
        "Path('pid' + os.environ.get('RANK', '0')).write_text(str(os.getpid()))\n" + WAIT_FOR_SIGNAL
    )
    command = [sys.executable, "-m", "accel_cli", "launch", "--nproc-per-node", str(count), "train.py"]
    with Process(command, stderr=subprocess.DEVNULL) as process:
        wait_for_texts(cwd, "pid*", count)
        process.send_signal(number)
        code = process.wait(timeout=limit(40))
    # One process is the script, which saved and left with 0; an agent that was told to stop says so.
    assert code == (0 if count == 1 else 128 + number)
    assert len(list(cwd.glob("saved*"))) == count
    assert not [path for path in cwd.glob("pid*") if alive(int(path.read_text()))]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gone.py",), "Script not found: gone.py"),
        (("sub",), "Cannot run sub: it is a directory"),
        (
            ("--set", "mixed_precison=bf16", "train.py"),
            "mixed_precison: unknown key (did you mean mixed_precision?)",
        ),
        (("--set", "process_group_timeout=soon", "train.py"), "expected a whole number, got 'soon'"),
        (("--nproc-per-node", "0", "train.py"), "expected at least 1 or auto, got 0"),
        (("--nproc-per-node", "-1", "train.py"), "at least 1 or auto, got -1"),
        (("--nproc-per-node", "", "train.py"), "expected a whole number"),
        (("--nnodes", "0", "train.py"), "launcher.nnodes: expected at least 1, got 0"),
        (("--profile", "a/b", "train.py"), "Invalid profile name 'a/b'"),
        (("--profile", "gone", "train.py"), "Profile 'gone' (from --profile) not found"),
        (("--set", "device=cuda", "--nproc-per-node", "9", "train.py"), "Device cuda not found"),
        (("-m", "--no-python", "train.py"), "Pass either -m or --no-python, not both"),
        (("-m", "no_such_module_x"), "Module not found: 'no_such_module_x'"),
        (("--no-python", "no-such-program-x"), "Program not found: 'no-such-program-x'"),
        (("--frobnicate", "train.py"), "has no option --frobnicate"),
        ((), "accel: error: Missing argument 'SCRIPT'. See accel launch --help."),
        (
            ("--node-rank", "x", "train.py"),
            "Invalid value for '--node-rank': expected a whole number, got 'x'. See",
        ),
        (
            ("--node-rank", "-1", "train.py"),
            "Invalid value for '--node-rank': expected at least 0, got '-1'. See",
        ),
        (("--nproc-per-node",), "Option '--nproc-per-node' requires an argument. See"),
        (("",), "Cannot run '': the name is empty."),
        (("notes.ipynb",), "Cannot run notes.ipynb: a notebook is not a script."),
    ],
)
def test_invalid_input_is_one_message_with_exit_code_2(accel, script, cwd, args, message):
    script("from pathlib import Path; Path('started').touch()")
    (cwd / "sub").mkdir()
    result = accel("launch", *args)
    assert result.returncode == 2, result.stderr
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not (cwd / "started").exists()


def test_an_invalid_profile_is_named(accel, script, home):
    script("")
    (home / "profiles").mkdir(parents=True)
    (home / "profiles" / "x.yaml").write_bytes(b"\xff")
    result = accel("launch", "--profile", "x", "train.py")
    assert result.returncode == 2
    assert "x.yaml: it is not UTF-8 text" in result.stderr


def test_a_dry_run_prints_the_plan_and_runs_nothing(accel, script, cwd):
    script("from pathlib import Path; Path('started').touch()")
    result = accel(
        "launch", "--dry-run", "--nproc-per-node", 2, "--set", "env.MY_TOKEN=hunter2", "train.py", "a b"
    )
    assert result.returncode == 0
    assert "start: 2 processes\n" in result.stdout
    assert "script train.py 'a b'" in result.stdout
    assert "hunter2" not in result.stdout + result.stderr
    assert not (cwd / "started").exists()


def test_explain_prints_the_source_of_every_value(accel, script, home):
    script("")
    accel("config", "set", "mixed_precision=bf16")
    result = accel("launch", "--explain", "--cpu", "train.py")
    lines = result.stdout.splitlines()
    assert lines[:4] == [
        "set:",
        "  launcher.kind: single  [detected]",
        "* device: cpu  [--cpu]",
        f"* mixed_precision: bf16  [user: {home}/profiles/default.yaml:3]",
    ]
    assert "  process_group_timeout: 1800  [default]" in lines[lines.index("defaults:") :]


def test_the_start_line_names_the_profile_and_quiet_omits_it(accel, script, home):
    script("")
    accel("config", "set", "mixed_precision=bf16")
    assert accel("launch", "train.py").stderr == (
        f"accel: single, 1 process, cpu, mixed precision bf16; profile: user ({home}/profiles/default.yaml)\n"
    )
    assert accel("launch", "-q", "train.py").stderr == ""


def test_the_effective_profile_reaches_the_runtime_in_every_process(accel, script):
    script(
        "from accel_runtime import Accelerator\na = Accelerator()\n"
        "a.wait_for_everyone()\nprint(a.mixed_precision, a.device, a.num_processes, a.process_index)\n"
    )
    options = ("--cpu", "--mixed-precision", "bf16", "--nproc-per-node", 2, "--ranks", "all")
    result = accel("launch", "-q", *options, "train.py")
    assert sorted(result.stdout.splitlines()) == ["[0] bf16 cpu 2 0", "[1] bf16 cpu 2 1"], result.stderr


def test_lines_of_ranks_that_print_at_the_same_time_are_complete(accel, script):
    script("import os\nfor n in range(400):\n    print('rank', os.environ['RANK'], 'line', n, 'x' * 50)\n")
    result = accel("launch", "-q", "--nproc-per-node", 2, "--ranks", "all", "train.py")
    expected = {f"[{rank}] rank {rank} line {n} {'x' * 50}" for rank in range(2) for n in range(400)}
    assert sorted(result.stdout.splitlines()) == sorted(expected)


def test_a_line_is_shown_as_soon_as_it_is_printed(script):
    script("import os, sys\nif os.environ['RANK'] == '0':\n    print('here')\nsys.stdin.read()\n")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Accel("launch", "-q", "--nproc-per-node", 2, "train.py", **pipes) as process:
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(timeout=limit(200)) == 0


READS = """
import os, subprocess, sys
rank = os.environ["RANK"]
if rank == "0":
    first = input()
    print(first, sys.stdin.read().split(), sys.stdin is sys.__stdin__)
else:
    breakpoint()
    print(repr(sys.stdin.read()), subprocess.run(["cat"], capture_output=True).stdout)
"""


@pytest.mark.parametrize("method", ["forkserver", pytest.param("exec", marks=pytest.mark.slow)])
def test_standard_input_belongs_to_rank_0_and_debuggers_of_other_ranks_continue(accel, script, method):
    script(READS)
    Path("lines").write_text("a\nb\nc\n")
    options = ("-q", "--set", f"launcher.start_method={method}", "--nproc-per-node", 3, "--log-dir", "logs")
    with Path("lines").open() as lines:
        result = accel("launch", *options, "train.py", stdin=lines)
    assert (result.stdout, result.returncode) == ("a ['b', 'c'] True\n", 0)
    assert (
        len(re.findall(r"accel: rank [12] did not stop in the debugger at train.py:9: ", result.stderr)) == 1
    )
    logs = [
        log.read_text() for rank in (1, 2) for log in Path("logs").glob(f"*/attempt_0/rank_{rank}/output.log")
    ]
    assert [log.splitlines()[-1] for log in logs] == ["'' b''"] * 2


@pytest.mark.slow
def test_two_nodes_join_by_the_same_command(accel, script, tmp_path, port):
    """Both agents run here, on loopback, as two machines would."""
    script(
        "from accel_runtime import Accelerator\na = Accelerator()\nprint('I am', a.process_index, 'of', a.num_processes)\n"
    )
    command = (
        "launch", "-q", "--cpu", "--nnodes", "2", "--nproc-per-node", "1",
        "--ranks", "all", "--set", f"launcher.rdzv_endpoint=localhost:{port}",
        "--set", "launcher.allow_loopback=true", "train.py",
    )  # fmt: skip
    machines = [Accel(*command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [machine.communicate(timeout=limit(120))[0].strip() for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert sorted(outputs) == ["[0] I am 0 of 2", "[1] I am 1 of 2"]
    assert [machine.returncode for machine in machines] == [0, 0]


FINISHES_EARLY = """
import os, sys, time
from pathlib import Path
rank, failing, failures = os.environ["RANK"], sys.argv[1], int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == failing:
    while not (file := Path(f"pid{attempt}")).exists() or Path("/proc", file.read_text()).exists():
        time.sleep(0.05)
    time.sleep(1)  # the other node waits for this one
    if attempt < failures:
        sys.exit(3)
else:
    Path("new").write_text(str(os.getpid()))
    Path("new").rename(f"pid{attempt}")
print("finished attempt", attempt)
"""


@pytest.mark.full
@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("failing", ["0", "1"])
def test_a_rank_that_fails_after_another_node_has_finished_restarts_both_or_is_reported(
    script, cwd, port, failing, failures
):
    script(FINISHES_EARLY)
    command = (
        "launch", "-q", "--cpu", "--nnodes", "2", "--nproc-per-node", "1", "--ranks", "all",
        "--rdzv-endpoint", f"localhost:{port}", "--set", "launcher.allow_loopback=true",
        "--max-restarts", "1", "train.py", failing, failures,
    )  # fmt: skip
    machines = [
        Accel(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]
    try:
        outputs = [machine.communicate(timeout=limit(120))[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    codes = [machine.returncode for machine in machines]
    assert all("restart 1 of 1: rank " in output for output in outputs), outputs
    assert not any("Traceback" in output for output in outputs), outputs
    if failures == 1:
        assert codes == [0, 0], outputs
        assert all("finished attempt 1" in output for output in outputs)
        return
    assert sorted(codes) == [1, 3], outputs
    failed, finished = (outputs[codes.index(code)] for code in (3, 1))
    assert re.search(rf"^accel: error: rank {failing} of 2 .*: exited with code 3", failed, re.MULTILINE)
    assert "accel: error: the run ended on another machine: rank " in finished


def test_a_restart_starts_all_processes_again(accel, script, cwd):
    script(
        "import os, sys, time\nfrom pathlib import Path\nimport torch, torch.distributed as dist\n"
        "first = not Path('failed').exists()\n"
        "dist.init_process_group('gloo')\n"
        "if first and os.environ['RANK'] == '1':\n    Path('failed').touch(); sys.exit(5)\n"
        "if first:\n    time.sleep(60)\n"
        "t = torch.ones(1); dist.all_reduce(t); print('sum', int(t)); time.sleep(0.1)\n"
    )
    result = accel("launch", "-q", "--nproc-per-node", 2, "--set", "launcher.max_restarts=1", "train.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "sum 2\n"
    assert result.stderr.startswith("accel: restart 1 of 1: rank 1 on ")
    assert ": exited with code 5 (its log: " in result.stderr


EARLY = """
import torch
from accel_runtime import Accelerator, DistributedDataParallelKwargs
handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
accelerator = Accelerator(fp16=FP16, cpu=True, split_batches=True, device_placement=True,
                          rng_types=["torch", "generator"], kwargs_handlers=handlers)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    weights = accelerator.unwrap_model(model).weight
    print(accelerator.mixed_precision, [round(w, 3) for w in weights.flatten().tolist()])
"""


@pytest.mark.full
@pytest.mark.parametrize("fp16", [False, True])
def test_a_script_for_accelerate_trains_equally_on_one_and_two_processes(accel, script, monkeypatch, fp16):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script(EARLY.replace("FP16", str(fp16)))
    results = [accel("launch", "-q", "--nproc-per-node", count, "train.py") for count in (1, 2)]
    assert results[0].stdout.startswith("fp16 [" if fp16 else "no ["), results[0].stderr
    assert results[0].stdout == results[1].stdout, results[1].stderr


@pytest.mark.full
def test_the_example_trains_equally_on_one_and_two_processes(accel):
    example = Path(__file__).parents[2] / "examples" / "digits.py"
    commands = {
        "python": [sys.executable, example],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", example],
    }
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    outputs = {
        command_name: subprocess.run(
            [*map(str, command), "--epochs", "2"], env=environ, capture_output=True, text=True, check=True
        ).stdout
        for command_name, command in commands.items()
    }
    outputs["accel"] = accel("launch", "-q", "--nproc-per-node", 2, example, "--epochs", 2).stdout
    assert outputs["python"] == outputs["torchrun"] == outputs["accel"]
    accuracy = float(outputs["accel"].partition("test accuracy ")[2].split()[0])
    assert accuracy > 0.9
    assert "of 450)" in outputs["accel"]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
