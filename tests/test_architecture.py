"""The rules of the house: who may import what, and where names may be spelled."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLI = sorted((ROOT / "accel_cli").rglob("*.py"))
RUNTIME = sorted((ROOT / "accel_runtime").rglob("*.py"))


def imports(path):
    """Every module a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path):
    return str(path.relative_to(ROOT))


def test_there_are_files_to_look_at():
    assert len(CLI) > 20
    assert len(RUNTIME) > 15


@pytest.mark.parametrize("path", CLI, ids=name)
def test_the_command_line_knows_only_the_contract_of_the_runtime(path):
    known = [module for module in imports(path) if module.split(".")[0] == "accel_runtime"]
    assert all(f"{module}.".startswith("accel_runtime.env.") for module in known), known


@pytest.mark.parametrize("path", RUNTIME, ids=name)
def test_the_runtime_does_not_know_the_command_line(path):
    assert not [module for module in imports(path) if module.split(".")[0] == "accel_cli"]


@pytest.mark.parametrize("path", CLI, ids=name)
def test_torch_is_imported_where_a_torchrun_plan_is_run_and_nowhere_else(path):
    uses = [module for module in imports(path) if module.split(".")[0] == "torch"]
    assert not uses or name(path).startswith("accel_cli/agent/")


@pytest.mark.parametrize("path", [*CLI, *RUNTIME], ids=name)
def test_a_variable_of_accel_is_spelled_in_the_contract_only(path):
    strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    spelled = [s for s in strings if isinstance(s, str) and s.startswith("ACCEL_") and "\n" not in s]
    # `accel env` prints every variable of this prefix.
    allowed = {"accel_runtime/env.py", "accel_cli/commands/env.py"}
    assert not spelled or name(path) in allowed


@pytest.mark.parametrize("path", [*CLI, *RUNTIME], ids=name)
def test_torch_xla_and_aws_stay_in_the_rooms_that_are_theirs(path):
    outside = (
        {"torch_xla", "boto3", "botocore", "sagemaker", "pydantic"} if path in RUNTIME else {"torch_xla"}
    )
    if name(path) in {"accel_runtime/backends/xla.py", "accel_cli/replicas.py"}:
        outside.discard("torch_xla")
    assert not {module.split(".")[0] for module in imports(path)} & outside


@pytest.mark.parametrize("path", [*CLI, *RUNTIME], ids=name)
def test_the_environment_is_read_at_the_edges_only(path):
    edges = (
        "accel_cli/commands/",
        "accel_cli/wizard/session.py",
        "accel_cli/launchers/single.py",
        "accel_cli/agent/",
        "accel_cli/quiet.py",
        "accel_cli/launchers/slurm/submit.py",
        "accel_cli/forkserver/",
    )
    # A host of a SageMaker job stands where a person's shell would: it reads the container's environment and passes it on.
    edges += ("accel_cli/container/entry.py", "accel_cli/container/host.py")
    # Whether a person wants colours is said by the terminal's own variables.
    edges += (
        "accel_cli/console.py",
        "accel_cli/worker.py",
        "accel_cli/replicas.py",
        "accel_runtime/accelerator.py",
        "accel_runtime/topology.py",
    )
    # A logger exists before any Accelerator. ClearML's and MLflow's own variables win over arguments.
    edges += (
        "accel_runtime/logging.py",
        "accel_runtime/tracking/clearml.py",
        "accel_runtime/tracking/mlflow.py",
    )
    # torch_xla is told through variables of its own, and some of them change numbers.
    edges += ("accel_runtime/backends/xla.py",)
    edges += ("accel_runtime/current.py", "accel_runtime/launchers.py", "accel_runtime/heartbeat.py")
    reads = [
        n
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Attribute) and n.attr == "environ"
    ]
    named_os = [n for n in reads if isinstance(n.value, ast.Name) and n.value.id == "os"]
    assert not named_os or name(path).startswith(edges)


@pytest.mark.parametrize("path", [*CLI, *RUNTIME], ids=name)
def test_a_file_opens_with_one_sentence_and_has_one_subject(path):
    source = path.read_text()
    said = ast.get_docstring(ast.parse(source)) or ""
    assert said, "a file opens with a sentence that says what it is about"
    assert len(source.splitlines()) < 420


@pytest.mark.parametrize("path", [*CLI, *RUNTIME], ids=name)
def test_unsafe_loading_and_shells_are_nowhere(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert called != "torch.load" or words.get("weights_only") == "True"
            assert called not in {"yaml.load", "os.system", "pickle.load", "pickle.loads"}
            assert words.get("shell") != "True"


def test_nothing_in_the_modules_is_mutable_state():
    """XLA runs replicas as threads of one process, and a second Accelerator must not be a surprise."""
    for path in RUNTIME:
        for node in ast.parse(path.read_text()).body:
            value = getattr(node, "value", None)
            target = ast.unparse(node).split("=")[0].split(":")[0].strip()
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(
                value, (ast.List, ast.Dict, ast.Set)
            ):
                constant = target.strip("_").isupper() or target == "__all__"
                assert constant, f"{name(path)}: {target}"


@pytest.mark.parametrize(
    "code",
    [
        "import accel_runtime",
        "import accel_runtime.env",
        "import accel_cli.main",
        "from accel_cli.main import main; main(['--help'])",
        "from accel_cli.main import main; main(['launch', '--help'])",
        "from accel_cli.main import main; main(['launch', '--dry-run', '--nproc-per-node', '2', 'x.py'])",
        "from accel_cli.main import main; main(['config', 'show'])",
        "from accel_cli.main import main; main(['config', 'default'])",
    ],
)
def test_torch_is_not_imported_for(code, tmp_path):
    (tmp_path / "x.py").write_text("")
    check = (
        f"import sys, atexit\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n{code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "code",
    [
        "import accel_cli.launchers",
        "from accel_cli.main import main; main(['--help'])",
        "from accel_cli.main import main; main(['config', 'default'])",
        "from accel_cli.main import main; main(['launch', '--dry-run', '--nproc-per-node', '2', 'x.py'])",
        "from accel_cli.main import main; main(['launch', '--explain', '--set', 'launcher.kind=sagemaker', 'x.py'])",
    ],
)
def test_boto3_is_imported_only_by_who_asks_aws(code, tmp_path):
    (tmp_path / "x.py").write_text("")
    check = (
        "import sys, atexit\n"
        "atexit.register(lambda: print({'boto3', 'botocore', 'sagemaker'} & set(sys.modules), file=sys.stderr))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check + code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "set()"


def test_help_imports_neither_pydantic_nor_yaml():
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print({'pydantic', 'yaml', 'questionary'} & set(sys.modules), file=sys.stderr))\n"
        "from accel_cli.main import main; main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
