"""Rules of the source tree: allowed imports, and the modules that may contain certain names."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from support.sources.fence import EXTENSIONS, HALVES, TABLES, WORDS, find_extensions, find_words, remove_rows
from support.sources.syntax import list_nodes, parse

from accel_runtime.environment import installation
from accel_runtime.environment import settings as env
from accel_runtime.environment.accelerate import launch

ROOT = Path(__file__).parent.parent
CLI = sorted((ROOT / "accel_cli").rglob("*.py"))
RUNTIME = sorted((ROOT / "accel_runtime").rglob("*.py"))
READ_THE_ENVIRONMENT = (
    "accel_cli/commands/",
    # The program that has started a command gets the reason of a refusal, and passes its environment on.
    "accel_cli/main.py",
    "accel_cli/python_launch.py",
    "accel_cli/wizard/session.py",
    # The shell completes the names of the profiles of this user.
    "accel_cli/profile/options.py",
    "accel_cli/launchers/single.py",
    "accel_cli/runner/agent.py",
    "accel_cli/runner/run.py",
    "accel_cli/runner/forkserver.py",
    "accel_cli/runner/processes.py",
    "accel_cli/runner/rendezvous.py",
    "accel_cli/worker.py",
    "accel_cli/extensions/estimate/command.py",
    "accel_cli/extensions/migrate/command.py",
    "accel_cli/extensions/xla/",
    "accel_cli/extensions/slurm/service.py",
    # The first process of a container reads its environment, as `accel launch` reads a shell's.
    "accel_cli/extensions/sagemaker/entry.py",
    # On the host of a launch, it reads the address at which ssh reached it.
    "accel_cli/extensions/ssh/entry.py",
    # Variables of a block, by which transformers reads no values on some ranks.
    "accel_runtime/parallel/node_loading.py",
    # A variable says if another machine has started the launch.
    "accel_cli/control.py",
    # The client of object stores takes credentials and endpoints, as those of other tools do.
    "accel_runtime/extensions/object_stores/obstore_client.py",
    "accel_runtime/extensions/object_stores/client_process.py",
    # The client takes the headers that Ray's own command line does; the actor passes its environment on.
    "accel_cli/extensions/ray/service.py",
    "accel_cli/extensions/ray/node.py",
    "accel_cli/extensions/skypilot/service.py",
    # The kubeconfig is that of kubectl, and in a pod the cluster is in the variables.
    "accel_cli/extensions/kubernetes/cluster.py",
    # It switches the reports of another library in the ranks off.
    "accel_cli/extensions/kubernetes/train_job_status.py",
    # Git gets the environment without its own variables, which name other repositories.
    "accel_cli/launchers/git.py",
    # The terminal's own variables say whether colours are wanted.
    "accel_cli/console.py",
    "accel_cli/launchers/sections.py",
    "accel_runtime/accelerator/accelerator.py",
    # A logger exists before any Accelerator. ClearML's and MLflow's own variables take precedence over arguments.
    "accel_runtime/monitoring/logging.py",
    "accel_runtime/extensions/trackers/clearml.py",
    "accel_runtime/extensions/trackers/mlflow.py",
    # torch_xla is configured through variables of its own, and some of them change numbers.
    "accel_runtime/extensions/xla/",
    # The self-check passes the variables of its rank on to the node check, a process of its own.
    "accel_runtime/selfcheck.py",
    "accel_runtime/extensions/node_check/measure.py",
    # One switch, which XLA's replicas have too: they are threads, without settings of their own.
    "accel_runtime/collectives/transport.py",
    # They change the environment, as the functions of Accelerate do whose names they have.
    "accel_runtime/accelerate/environment.py",
    "accel_runtime/accelerate/launch.py",
    "accel_runtime/backends/__init__.py",
    # deepspeed reads its variables when it is imported.
    "accel_runtime/extensions/deepspeed/",
    # It reports on the first rank only.
    "accel_runtime/environment/accelerate/import_hook.py",
    # The address at which a process group is created, and the record of its process for those that it starts.
    "accel_runtime/backends/arrivals.py",
    "accel_runtime/notebook.py",
    # As the facade of an Accelerator: whether it resumes, and its run.
    "accel_runtime/transformers.py",
    "accel_runtime/observe/heartbeat.py",
    "accel_runtime/observe/progress.py",
    "accel_runtime/observe/torch_hooks.py",
)

LAYERS = {
    "accel_runtime": (
        "extensions", "utils", "accel_runtime",
        # Module paths of Accelerate, without code.
        "big_modeling data_loader hooks launchers local_sgd logging optimizer parallelism_config scheduler state",
        "notebook torch_probe selfcheck transformers",
        "accelerate", "accelerator", "checkpoint", "export", "checks", "data", "training", "parallel", "tracking", "monitoring", "backends", "storage",
        "collectives", "observe", "foundation", "environment",
    ),
    "accel_cli": (
        "extensions", "__main__", "main", "commands", "wizard", "accel_cli", "python_launch", "accelerate", "profile", "launchers", "runner", "runs", "planning", "worker",
        "failure_hints", "console", "control", "errors", "early_signals", "start_time",
    ),
}  # fmt: skip
"""The layers of both halves from the top, with their packages and modules: each imports from lower layers only."""
ALIASES = LAYERS["accel_runtime"][3].split()
MAX_MODULES = 15
LARGE_PACKAGES = {
    "accel_cli/extensions/migrate": "the converter of scripts has a module for each kind of statement",
}
"""The packages with more than `MAX_MODULES` modules, each with the reason."""


@cache
def imports(path):
    """List every module a file imports, at the top or inside a function."""
    names = []
    for node in list_nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name(path)}:{node.lineno}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def name(path):
    return str(path.relative_to(ROOT))


def find_imports(paths, packages):
    """List the imports of some packages, each with the file it is in."""
    return [
        (name(path), module) for path in paths for module in imports(path) if module.split(".")[0] in packages
    ]


def test_the_source_trees_are_not_empty():
    assert len(CLI) > 20
    assert len(RUNTIME) > 15


def test_the_command_line_imports_the_contract_of_the_runtime_and_checkpoints_without_torch():
    """`test_checkpoint_commands_do_not_import_torch` tests that these modules do not import it."""
    imported = find_imports(CLI, {"accel_runtime"})
    allowed = (
        "accel_runtime.environment.",
        "accel_runtime.observe.",
        "accel_runtime.storage.",
        "accel_runtime.extensions.",
    )
    assert not [(path, module) for path, module in imported if not f"{module}.".startswith(allowed)]


def test_the_runtime_does_not_import_the_command_line():
    assert not find_imports(RUNTIME, {"accel_cli"})


def test_only_the_runner_of_the_command_line_imports_torch():
    """The node check is a part of torch's agent, which the runner starts."""
    importers = {path for path, _ in find_imports(CLI, {"torch"}) if not path.startswith("accel_cli/runner/")}
    assert importers == {"accel_cli/extensions/node_check/preflight.py"}


def test_only_env_py_contains_names_of_accel_variables():
    # `accel env` prints every variable of this prefix. A rank begins with the standard library only.
    allowed = {
        ROOT / "accel_cli" / "worker.py",
        ROOT / "accel_runtime" / "environment" / "settings.py",
        ROOT / "accel_cli" / "commands" / "env.py",
    }
    strings = [
        (name(path), node.value)
        for path in {*CLI, *RUNTIME} - allowed
        for node in list_nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [(path, text) for path, text in strings if text.startswith("ACCEL_") and "\n" not in text]


def test_variables_and_keys_of_accelerate_stand_in_the_vocabulary_only():
    words = {
        word
        for setting in launch.list_settings()
        for word in (setting.variable, setting.key)
        if word.startswith(
            ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "fsdp_", "parallelism_config_", "zero")
        )
    }
    vocabulary = ROOT / "accel_runtime" / "environment" / "accelerate"
    spelled = {
        node.value
        for path in {*CLI, *RUNTIME}
        if vocabulary not in path.parents
        for node in list_nodes(path)
        if isinstance(node, ast.Constant) and node.value in words
    }
    # A field of the plugin, a variable that a function of Accelerate's name sets, and a key in files of DeepSpeed.
    assert spelled == {
        "fsdp_version",
        "zero_stage",
        "zero3_init_flag",
        "zero3_save_16bit_model",
        "ACCELERATE_DEBUG_RDV_FILE",
    }


def test_checkpoints_are_saved_and_loaded_without_modules_of_file_systems():
    paths = sorted((ROOT / "accel_runtime" / "checkpoint").glob("*.py"))
    storage = {module for path in paths for module in imports(path) if ".storage." in module}
    assert any(module.startswith("accel_runtime.storage.store.") for module in storage)
    of_file_systems = ("directory", "file_store", "file_system", "scan")
    assert not [module for module in storage if module.split(".")[2] in of_file_systems]


def test_torch_xla_and_aws_are_imported_by_their_own_packages_only():
    assert {path for path, _ in find_imports([*CLI, *RUNTIME], {"torch_xla"})} == {
        "accel_cli/extensions/xla/replicas.py",
        "accel_runtime/extensions/xla/library.py",
    }
    assert not find_imports(RUNTIME, {"boto3", "botocore", "sagemaker", "pydantic"})


def test_only_the_tables_name_an_extension():
    """Locations in strings count as imports. An extension names itself only, in both halves."""
    named = set()
    for path in [*CLI, *RUNTIME]:
        strings = [
            node.value
            for node in list_nodes(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        others = find_extensions("\n".join([*imports(path), *strings])) - find_extensions(name(path))
        named |= {(name(path), extension) for extension in others if name(path) not in TABLES}
    assert not named


WORDS_ELSEWHERE = {
    "public names, keys, options and variables of Accelerate, with the advice about them": {
        "accel_cli/accelerate/config_conversion.py": "tpu tpus xla",
        "accel_cli/accelerate/config_values.py": "tpu xla",
        "accel_cli/accelerate/foreign_options.py": "tpu xla",
        "accel_cli/accelerate/variables.py": "tpu",
        "accel_runtime/accelerate/fsdp_utils.py": "dcp",
        "accel_runtime/accelerate/imports.py": "aim boto3 clearml comet_ml deepspeed dvclive mlflow sagemaker swanlab torch_xla tpu trackio",
        "accel_runtime/accelerate/package.py": "sagemaker",
        "accel_runtime/accelerator/accelerator.py": "deepspeed",
        "accel_runtime/accelerator/state.py": "deepspeed",
        "accel_runtime/environment/accelerate/launch.py": "aws deepspeed sagemaker tpu xla",
        "accel_runtime/environment/accelerate/missing_names.py": "clearml deepspeed torch_xla tpu xla",
        "accel_runtime/environment/accelerate/sharding.py": "deepspeed slurm ssh zero2 zero3 zero_3 zero_stage",
        "accel_runtime/environment/accelerate/variables.py": "deepspeed",
        # `RNGType`, and `LoggerType` with its members.
        "accel_runtime/foundation/options.py": "xla",
        # Arguments of its plugins that need the other engine.
        "accel_runtime/parallel/plugins.py": "deepspeed",
        "accel_runtime/tracking/__init__.py": "aim clearml comet_ml cometml dvclive mlflow swanlab trackio",
    },
    "members of DistributedType": {
        "accel_runtime/foundation/options.py": "deepspeed tpu xla",
    },
    "variables that a running job sets, and the messages about them": {
        "accel_cli/planning/nodes.py": "sagemaker skypilot slurm srun tpu",
        "accel_runtime/backends/arrivals.py": "salloc slurm srun",
        "accel_runtime/checkpoint/project_checkpoints.py": "sky skypilot slurm",
        "accel_runtime/environment/settings.py": "pjrt",
    },
    "keys and values of a profile, options and arguments that choose the extension": {
        "accel_cli/launchers/torchrun.py": "preflight",
        "accel_cli/commands/launch.py": "numerics preflight",
        "accel_cli/python_launch.py": "numerics preflight",
        "accel_cli/profile/options.py": "numerics preflight",
        "accel_cli/profile/schema.py": "node_dir sagemaker smddp store_every tpus",
        "accel_runtime/accelerator/checkpointing.py": "node_dir store_every",
        "accel_runtime/accelerator/options.py": "node_dir store_every",
        "accel_runtime/checkpoint/node_saves.py": "node_dir store_every",
        "accel_runtime/checkpoint/save.py": "node_dir",
        "accel_runtime/environment/settings.py": "node_dir smddp store_every xla",
        "accel_runtime/foundation/options.py": "node_dir store_every",
    },
    "files, libraries and formats of others, in data that is searched for them": {
        "accel_cli/launchers/secret_files.py": "aws boto clearml jinja2 kubeconfig kubernetes mlflow sbatch sky skypilot slurm ssh",
        "accel_cli/launchers/source_files.py": "jinja2 sbatch slurm",
        "accel_cli/runner/failures.py": "smddp",
        "accel_cli/runner/hang_report.py": "botocore",
        "accel_runtime/storage/tensor_file.py": "dcp",
    },
    "a command that a hint names": {
        "accel_cli/failure_hints.py": "estimate",
    },
}
"""The words of extensions that may stand in the core, by reason and file."""


def test_words_of_extensions_stand_in_extensions_only():
    """Rows of tables are none; `WORDS` has the words of each extension."""
    assert WORDS.keys() == {*EXTENSIONS}
    allowed = {
        (file, word)
        for files in WORDS_ELSEWHERE.values()
        for file, words in files.items()
        for word in words.split()
    }
    found = [
        (name(path), word)
        for path in [*CLI, *RUNTIME]
        if not find_extensions(name(path))
        for word in find_words(path)
    ]
    assert not [(file, *word) for file, word in found if (file, word.word) not in allowed]
    assert not allowed - {(file, word.word) for file, word in found}, "remove these from WORDS_ELSEWHERE"


def test_the_tables_name_every_extension():
    tables = "".join((ROOT / table).read_text() for table in TABLES)
    assert find_extensions(tables) == {*EXTENSIONS}


@pytest.mark.parametrize("table", TABLES)
def test_a_row_of_a_table_is_one_line(table):
    """`remove_extensions` deletes these lines."""
    text = (ROOT / table).read_text()
    core = remove_rows(text, EXTENSIONS)
    assert text != core
    ast.parse(core)


def test_the_layers_name_every_package_and_module():
    for half in HALVES:
        paths = [
            path
            for path in (ROOT / half).iterdir()
            if path.suffix == ".py" or (path / "__init__.py").exists()
        ]
        there = {half if path.stem == "__init__" else path.stem for path in paths}
        assert there == {*" ".join(LAYERS[half]).split()}
    assert all(
        path.is_dir()
        for half in HALVES
        for path in (ROOT / half / "extensions").iterdir()
        if path.stem != "__init__"
    )


def test_a_package_has_at_most_fifteen_modules():
    """The module paths of Accelerate have no code, and do not count."""
    counts = Counter(
        name(path.parent)
        for path in [*CLI, *RUNTIME]
        if path.stem != "__init__" and not (name(path.parent) == "accel_runtime" and path.stem in ALIASES)
    )
    del counts["accel_runtime/utils"]
    assert {package for package, count in counts.items() if count > MAX_MODULES} == {*LARGE_PACKAGES}


def test_only_listed_modules_read_the_environment():
    reads = {
        name(path)
        for path in [*CLI, *RUNTIME]
        for node in list_nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ"
    }
    assert not [path for path in sorted(reads) if not path.startswith(READ_THE_ENVIRONMENT)]
    assert not [entry for entry in READ_THE_ENVIRONMENT if not any(path.startswith(entry) for path in reads)]


def test_every_module_has_a_docstring():
    assert not [name(path) for path in [*CLI, *RUNTIME] if not ast.get_docstring(parse(path))]


def read_graph(half):
    """Return the modules that each module imports, at the top, inside functions and for typing."""
    modules = {
        name(path)[:-3].replace("/", ".").removesuffix(".__init__"): path
        for path in sorted((ROOT / half).rglob("*.py"))
    }
    return {
        module: {one if one in modules else one.rpartition(".")[0] for one in imports(path)}
        & modules.keys() - {module}
        for module, path in modules.items()
    }


def find_layer(module):
    """Return the number of a module's layer, 0 at the top."""
    half, _, rest = module.partition(".")
    return next(
        i for i, layer in enumerate(LAYERS[half]) if (rest.partition(".")[0] or half) in layer.split()
    )


@pytest.mark.parametrize("half", HALVES)
def test_modules_import_from_lower_layers_only(half):
    """`test_only_the_tables_name_an_extension` tests the imports of extensions."""
    assert not {
        (module, imported)
        for module, all_imported in read_graph(half).items()
        for imported in all_imported
        if module.split(".")[:2] != imported.split(".")[:2]
        and find_layer(imported) <= find_layer(module)
        and not find_extensions(imported)
    }


GETATTR = "__getattr__ = build_getattr(__name__)"
"""The only other statement of such a module: names that accel takes from Accelerate."""


def test_modules_at_the_module_paths_of_accelerate_have_no_code():
    """They import the names from the package that has the code, so that type checkers and pickle find it."""
    of_utils = {*(ROOT / "accel_runtime" / "utils").glob("*.py")} - {ROOT / "accel_runtime/utils/__init__.py"}
    assert not {
        name(path)
        for path in {*of_utils, *(ROOT / "accel_runtime" / f"{alias}.py" for alias in ALIASES)}
        for node in parse(path).body
        if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr))
        and not ast.unparse(node).startswith("__all__")
        and ast.unparse(node) != GETATTR
    }


@pytest.mark.parametrize("half", HALVES)
def test_the_imports_of_modules_have_no_circle(half):
    list(TopologicalSorter(read_graph(half)).static_order())


def test_no_module_loads_unsafely_or_starts_a_shell():
    refused = {"yaml.load", "os.system", "pickle.load", "pickle.loads"}
    calls = []
    for path in [*CLI, *RUNTIME]:
        for node in list_nodes(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                unsafe = called == "torch.load" and words.get("weights_only") != "True"
                if unsafe or called in refused or words.get("shell") == "True":
                    calls.append((name(path), node.lineno, called))
    assert not calls


def test_only_the_console_writes_to_the_terminal_of_a_command():
    """It shows control characters as escapes. The others relay the output of ranks and jobs, or run without a command."""
    relays = {
        "accel_cli/console.py",
        "accel_cli/__main__.py",  # before the console can be imported
        "accel_cli/extensions/ray/driver.py",
        "accel_cli/runner/bootstrap.py",
        "accel_cli/runner/forkserver.py",
        "accel_cli/extensions/sagemaker/entry.py",
        "accel_cli/worker.py",
    }
    writers = set()
    for path in CLI:
        for node in list_nodes(path):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in {"print", "typer.echo", "typer.secho"} or re.match(
                r"sys\.std(out|err)(\.buffer)?\.write", called
            ):
                writers.add(name(path))
    assert writers <= relays


def test_text_is_encoded_and_decoded_in_one_module():
    """Text of scripts, paths and other programs may have any bytes and surrogates: a strict codec would raise."""
    for path in CLI:
        for node in list_nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_strict = node.func.attr in {"encode", "decode"} and not (node.args or node.keywords)
                assert not is_strict, f"{name(path)}:{node.lineno}: {ast.unparse(node)}"


UNTYPED = {
    # State dicts of torch and of the script.
    "checkpoint/state_items.py": {
        "ModelItem",
        "_list_parameters",
        "match_tensors",
        "_find_moved_parameters",
        "_build_groups",
        "_join_groups",
        "_keep_dtypes",
    },
    "checkpoint/training_state.py": {"states", "items"},
    "data/loader.py": {"state_dict", "load_state_dict"},
    # States of all items by name, of any form.
    "checkpoint/load.py": {"read"},
    # Nodes of JSON.
    "checkpoint/serialization.py": {"_serialize_scalar", "_build_special", "_parse_numpy"},
}
"""Functions of loaders and checkpoints that take or return an untyped dict."""


def test_state_of_loaders_and_checkpoints_is_typed():
    def has_untyped_dict(node):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = [argument.annotation for argument in arguments] + [node.returns]
        texts = [ast.unparse(each) for each in annotations if each is not None]
        return any(re.search(r"\b(dict|Mapping)\[str, Any\]", text) for text in texts)

    found = {}
    for path in RUNTIME:
        module = path.relative_to(ROOT / "accel_runtime").as_posix()
        if not module.startswith(("data/", "checkpoint/", "extensions/node_disks/")):
            continue
        functions = [node for node in list_nodes(path) if isinstance(node, ast.FunctionDef)]
        if names := {node.name for node in functions if has_untyped_dict(node)}:
            found[module] = names
    constructors = {"ModelItem": "__init__"}
    allowed = {
        module: {constructors.get(function, function) for function in functions}
        for module, functions in UNTYPED.items()
    }
    assert found == allowed


def test_modules_of_the_runtime_have_no_mutable_state():
    """XLA runs replicas as threads of one process, and a second Accelerator must not share state."""
    for path in RUNTIME:
        for node in parse(path).body:
            value = getattr(node, "value", None)
            target = ast.unparse(node).split("=")[0].split(":")[0].strip()
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(
                value, (ast.List, ast.Dict, ast.Set)
            ):
                constant = target.strip("_").isupper() or target == "__all__"
                assert constant, f"{name(path)}: {target}"


def test_commands_without_training_import_neither_torch_nor_clients_of_services(tmp_path):
    (tmp_path / "x.py").write_text("")
    commands = (
        ["--help"],
        ["launch", "--help"],
        ["config", "show"],
        ["config", "default"],
        ["launch", "--dry-run", "--nproc-per-node", "2", "x.py"],
        ["launch", "--explain", "--set", "launcher.kind=sagemaker", "x.py"],
    )
    code = f"""
import sys
def check(step):
    loaded = {{'torch', 'boto3', 'botocore', 'libcst', 'sagemaker', 'kubernetes', 'ray'}} & set(sys.modules)
    assert not loaded, (step, loaded)
import accel_runtime, accel_runtime.environment.settings
check("accel_runtime")
import accel_cli.launchers
check("accel_cli.launchers")
from accel_cli.main import main
for command in {commands!r}:
    try:
        main(command)
    except SystemExit as error:
        assert not error.code, (command, error.code)
    check(command)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr


def test_help_does_not_import_slow_packages():
    code = (
        "import sys, atexit\n"
        "slow = {'accel_runtime.environment.settings', 'libcst', 'pydantic', 'questionary', 'tempfile', 'yaml'}\n"
        "atexit.register(lambda: print(slow & set(sys.modules), file=sys.stderr))\n"
        "from accel_cli.main import main; main(['--help'])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stderr.strip() == "set()"


def test_the_source_distribution_contains_the_files_of_the_repository():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no repository")
    settings = (ROOT / "pyproject.toml").read_text()
    included = json.loads(
        re.search(r"^\[tool\.hatch\.build\.targets\.sdist\]\ninclude = (.*)$", settings, re.MULTILINE)[1]
    )
    always = {"pyproject.toml", "README.md", "LICENSE"}
    there = {line.partition("/")[0] for line in listed.stdout.splitlines() if not line.startswith(".")}
    assert there == {*included, *always}


def test_the_citation_has_the_version_of_the_package():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == env.__version__


def test_no_text_installs_a_package_of_another_name():
    """`accel` on the public index is an unrelated package; this project is `accel-runtime`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no repository")
    install = re.compile(r"""\baccel\[[a-z{]|pip3? install (?:-\S+ )*["']?accel(?![\w-])""")
    for file in filter(None, listed.stdout.split("\0")):
        text = (ROOT / file).read_bytes().decode(errors="replace")
        assert not install.search(text), (file, install.search(text))


def test_no_text_installs_accel_or_its_extras_from_an_index():
    """It is on none: `accel_runtime.environment.installation` names the packages themselves; pages name the source tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no repository")
    install = re.compile(r"accel-runtime\[|\binstall (?:-\S+ )*[\"']?accel[-_]runtime\b")
    checks = {
        "pyproject.toml",
        name(Path(__file__)),
        "CHANGELOG.md",
    }  # extras of pyproject.toml name each other
    for file in {*filter(None, listed.stdout.split("\0"))} - checks:
        if (ROOT / file).is_file():
            found = install.search((ROOT / file).read_bytes().decode(errors="replace"))
            assert not found, (file, found)


def test_one_module_writes_the_commands_that_install_packages():
    commands = [
        (name(path), node.value)
        for path in [*CLI, *RUNTIME]
        if path.name != "installation.py"
        for node in list_nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    # `pip install` in a help text or docstring describes what a container does.
    assert not [(path, text) for path, text in commands if re.search(r"\bpip3? install\b", text)]


def test_every_package_that_a_message_installs_is_a_requirement_of_the_distribution():
    required = {
        re.match(r"[\w.-]+", text)[0].replace("_", "-").lower()
        for text in requires(installation.DISTRIBUTION)
    }
    calls = [
        (name(path), node)
        for path in [*CLI, *RUNTIME]
        for node in list_nodes(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"format_install", "format_new_environment"}
    ]
    assert len(calls) > 10
    for path, call in calls:
        extra = next((each.value for each in call.keywords if each.arg == "extra"), None)
        if isinstance(extra, ast.Constant):
            assert installation.list_requirements(extra.value), (path, ast.unparse(call))
        for package in call.args:
            if isinstance(package, ast.Constant) and ast.unparse(call.func) == "format_install":
                distribution = package.value.partition("[")[0].replace("_", "-")
                assert distribution in required, (path, ast.unparse(call))


def map_torch_names(path):
    """Map the names that a file imports from torch to their dotted paths."""
    bound = {}
    for node in list_nodes(path):
        if isinstance(node, ast.Import):
            bound |= {
                alias.asname or "torch": alias.name if alias.asname else "torch"
                for alias in node.names
                if f"{alias.name}.".startswith("torch.")
            }
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


REPLACE_TORCH = {
    "accel_runtime/observe/": "measures parts of steps, waits for threads at the end of a group",
    "accel_runtime/foundation/torch_internals.py": "private names of torch",
    "accel_runtime/parallel/node_loading.py": "torch.load in a block of accelerator.loading(), on ranks that read no values",
    "accel_cli/runner/agent.py": "torch's agent, in the launch process: it looks up the full host name at each event",
    "accel_cli/runner/rendezvous.py": "torch's rendezvous, in the launch process: its delays are no options",
    "accel_cli/extensions/migrate/counter_runs.py": "a process that runs a script to compare it: counters instead of random numbers",
    "accel_cli/extensions/migrate/probe.py": "the same: files that the script saves, and its seeds",
}
"""The modules that may assign to attributes of torch's modules and classes, with what they replace. Elsewhere, torch is changed
through its interface."""


def list_bindings(path):
    """List the variables that a file assigns, also in loops over tuples, with their values."""
    pairs = []
    for node in list_nodes(path):
        if isinstance(node, ast.Assign):
            pairs += [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs.append((node.target, node.value))
        elif isinstance(node, ast.For) and isinstance(node.iter, (ast.Tuple, ast.List)):
            pairs += [(node.target, value) for value in node.iter.elts]
    return [(target.id, value) for target, value in pairs if isinstance(target, ast.Name)]


def list_replaced(path):
    """List the attributes of torch's modules and classes that a file assigns to or deletes."""
    bound = {"torch": "torch"} | map_torch_names(path)

    def resolve(node):
        first, _, remaining = ast.unparse(node).partition(".")
        return f"{bound[first]}.{remaining}".rstrip(".") if first in bound else ""

    for variable, value in list_bindings(path):
        # Modules of torch are looked up where torch must not be imported. What a call of torch returns is an object.
        if re.match(r"sys\.modules(\[|\.get\()'torch\b", ast.unparse(value)):
            bound[variable] = "torch"
        elif resolve(value) and not isinstance(value, ast.Call):
            bound[variable] = resolve(value)
    replaced = []
    for node in list_nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            replaced += [resolve(node)] if resolve(node.value) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"setattr", "delattr"}:
            replaced += [ast.unparse(node)] if resolve(node.args[0]) else []
    return replaced


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.save = print",
        "import torch.nn.functional as F\nF.relu: object = print",
        "from torch.utils.data import DataLoader\nDataLoader.__iter__ = None",
        "from torch import nn\nsetattr(nn.Module, name, print)",
        "from torch import autograd\ndel autograd.backward",
        "import torch\nfunctional = torch.nn.functional\nfunctional.relu = print",
        "import sys\nlibrary = sys.modules.get('torch.distributed')\nlibrary.barrier = print",
        "import sys\nfor module in (sys.modules['torch'],):\n    module.save = print",
    ],
)
def test_assignments_to_attributes_of_torch_are_found(code, tmp_path):
    (tmp_path / "module.py").write_text(code)
    assert len(list_replaced(tmp_path / "module.py")) == 1


def test_functions_of_torch_are_replaced_in_listed_modules_only():
    """Attributes of torch's objects, such as `model.forward`, are no part of this rule."""
    replaced = {name(path): found for path in [*CLI, *RUNTIME] if (found := list_replaced(path))}
    allowed = tuple(REPLACE_TORCH)
    assert not {path: found for path, found in replaced.items() if not path.startswith(allowed)}
    assert not [entry for entry in allowed if not any(path.startswith(entry) for path in replaced)]


def test_private_names_of_torch_are_in_one_module():
    """Attributes of torch's objects, such as `module._buffers`, cannot be distinguished here."""
    private = re.compile(r"\._(?!_)")
    private_names = []
    for path in set(RUNTIME) - {ROOT / "accel_runtime" / "foundation" / "torch_internals.py"}:
        bound = map_torch_names(path)
        chains = [ast.unparse(node) for node in list_nodes(path) if isinstance(node, ast.Attribute)]
        dotted = [
            f"{bound.get(first, '')}.{remaining}"
            for first, _, remaining in (c.partition(".") for c in chains)
        ]
        private_names += [
            (name(path), dotted_name)
            for dotted_name in {*bound.values(), *dotted}
            if dotted_name.startswith("torch.") and private.search(dotted_name)
        ]
    assert not private_names
