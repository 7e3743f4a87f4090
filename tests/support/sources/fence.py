"""The fence between the core and the extensions: the tables of the core, and the deletion of extensions from a copy of the tree."""

from __future__ import annotations

import ast
import importlib
import io
import json
import os
import re
import shutil
import sys
import tokenize
import traceback
from pathlib import Path
from typing import NamedTuple

from support.sources.syntax import list_nodes

ROOT = Path(__file__).parents[3]
HALVES = ("accel_cli", "accel_runtime")
TABLES = (
    "accel_cli/accelerate/config_conversion.py",
    "accel_cli/accelerate/config_values.py",
    "accel_cli/commands/checkpoint.py",
    "accel_cli/launchers/__init__.py",
    "accel_cli/main.py",
    "accel_cli/planning/launch_options.py",
    "accel_cli/planning/machine.py",
    "accel_cli/planning/nested_launchers.py",
    "accel_cli/profile/settings_sections.py",
    "accel_cli/runner/preparations.py",
    "accel_cli/runs/sinks.py",
    "accel_runtime/__init__.py",
    "accel_runtime/accelerator/options.py",
    "accel_runtime/backends/__init__.py",
    "accel_runtime/checkpoint/node_saves.py",
    "accel_runtime/environment/accelerate/variables.py",
    "accel_runtime/environment/engines.py",
    "accel_runtime/environment/group_libraries.py",
    "accel_runtime/observe/recorders.py",
    "accel_runtime/parallel/__init__.py",
    "accel_runtime/selfcheck.py",
    "accel_runtime/storage/any_store.py",
    "accel_runtime/storage/formats.py",
    "accel_runtime/tracking/__init__.py",
    "accel_runtime/utils/__init__.py",
    "accel_runtime/utils/dataclasses.py",
    "accel_runtime/utils/deepspeed.py",
)
"""The files of the core that name extensions: in each, a line with `extensions.NAME` is a row of a table, and nothing else."""
EXTENSIONS = sorted(
    {path.parent.name for half in HALVES for path in (ROOT / half / "extensions").glob("*/__init__.py")}
)


def _name(*words):
    """Return the pattern of words in identifiers too, as in `is_xla`, but not within other words."""
    return rf"(?<![A-Za-z])(?:{'|'.join(words)})(?![a-z])"


WORDS = {
    "deepspeed": r"(?i:deepspeed|zero_?stage|zero_?[123](?!\d))|\bZeRO\b",
    "estimate": r"\bestimate\b",
    "foreign_checkpoints": _name("dcp", "DCP", "dist_cp", "foreign_checkpoints"),
    "kubernetes": "(?i:kubernetes)|"
    + _name("kubectl", "[Kk]ubeconfig", "JobSet", "TrainJob", "Kueue", "[Kk]ubeflow"),
    "migrate": _name("libcst") + "|accel migrate",
    "node_check": _name("[Pp]reflight", "PREFLIGHT"),
    "node_disks": _name("node_dirs?", "store_every", "node_?disks?", "NodeDisks?"),
    "numerics": _name("numerics", "NUMERICS") + "|accel diff",
    "object_stores": _name("obstore", "S3", "AWS", "GCS") + r"|\b(?:s3|gs|az|abfss?)://",
    "opentelemetry": _name("(?i:opentelemetry)", "OTEL", "otel", "OTLP", "otlp", "TRACEPARENT"),
    "ray": _name("ray", "Ray", "RAY"),
    "report": _name("plotly", "jinja2") + "|accel report",
    "sagemaker": "(?i:sagemaker|smddp|smdistributed)|" + _name("boto3?", "botocore"),
    "skypilot": "(?i:skypilot)|" + _name("sky"),
    "slurm": "(?i:slurm)|" + _name("sbatch", "srun", "salloc", "squeue", "scancel"),
    "ssh": _name("sshd?", "Ssh", "SSH", "rsync"),
    "trackers": _name("(?i:aim|clearml|comet_?ml|dvclive|mlflow|swanlab|trackio)"),
    "xla": _name("(?i:torch_xla|xla|tpus?|libtpu|pjrt)") + "|(?:ranks|replicas)_are_threads",
}
"""The words of each extension, as a pattern: its name, service and packages, and the names that only it has."""


class FoundWord(NamedTuple):
    """A word of an extension in a line of a file."""

    line: int
    extension: str
    word: str
    text: str


def find_words(path):
    """Yield the words of extensions in a source file, but for its own, rows of tables, comments and docstrings."""
    source = path.read_text("utf-8")
    name = str(path.relative_to(ROOT))
    # Most files have none: searching a file as a whole is faster than line by line.
    others = [
        extension for extension in WORDS.keys() - find_extensions(name) if re.search(WORDS[extension], source)
    ]
    if not others:
        return
    skipped = {
        number
        for node in list_nodes(path)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
    for number, line in enumerate(source.splitlines(), 1):
        if number in skipped or (name in TABLES and find_extensions(line)):
            continue
        code = line[: comments.get(number)]
        for extension in others:
            for word in sorted({found[0].lower() for found in re.finditer(WORDS[extension], code)}):
                yield FoundWord(number, extension, word, code.strip())


def find_extensions(text):
    """Return the names of the extensions that a text names, as `extensions.NAME` or `extensions/NAME`."""
    return {*re.findall(r"\bextensions[./](\w+)", text)} & {*EXTENSIONS}


def list_tables(name):
    """List the tables with rows of an extension."""
    return [table for table in TABLES if name in find_extensions((ROOT / table).read_text("utf-8"))]


def remove_rows(text, names):
    """Return the source of a table without the rows of some extensions."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not find_extensions(line) & {*names})


def copy_sources(tree):
    """Copy both halves into a folder, with their bytecode, so that it need not be compiled again."""
    for half in HALVES:
        shutil.copytree(ROOT / half, tree / half)


def remove_extensions(tree, names):
    """Delete extensions from a copy of the sources: their folders in both halves, and their rows in the tables."""
    for name in names:
        for half in HALVES:
            shutil.rmtree(tree / half / "extensions" / name, ignore_errors=True)
    for table in TABLES:
        path = tree / table
        path.write_text(remove_rows(path.read_text("utf-8"), names), encoding="utf-8")


def restore_extensions(tree, names):
    """Put extensions back into a copy of the sources, with their bytecode."""
    for name in names:
        for half in HALVES:
            if (folder := ROOT / half / "extensions" / name).exists():
                shutil.copytree(folder, tree / half / "extensions" / name)
    for table in TABLES:
        shutil.copy2(ROOT / table, tree / table)


def print_import_errors(tree):
    """Import every module of a copy of the sources, and print the errors as JSON, by module.

    A package that is not installed is no error.
    """
    _import_from(tree)
    errors = {}
    for half in HALVES:
        for path in sorted(Path(tree, half).rglob("*.py")):
            module = _format_module(path.relative_to(tree))
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - all errors are listed
                if not isinstance(error, ModuleNotFoundError) or error.name.startswith(HALVES):
                    where = [f for f in traceback.extract_tb(error.__traceback__) if tree in f.filename][-1]
                    errors[module] = f"{Path(where.filename).relative_to(tree)}:{where.lineno}: {error!r}"
    _print_and_exit(errors)


def print_rows(tree, *tables):
    """Print as JSON the rows of some tables of a copy of the sources."""
    _import_from(tree)
    _print_and_exit(list_rows(tables))


def list_rows(tables):
    """Import some tables, and return the location of each row by file, table and name."""
    rows = {}
    for path in tables:
        for title, table in vars(importlib.import_module(_format_module(path))).items():
            if title == "TRACKERS":
                rows |= {f"{path} {title} {name}": entry.module for name, entry in table.items()}
            elif type(table).__name__ == "Registry":
                rows |= {f"{path} {title} {name}": location for name, location in table._locations.items()}
    return rows


def _import_from(tree):
    """Import accel from a copy of the sources, and forget what the process has imported of it before."""
    for name in [name for name in sys.modules if name.partition(".")[0] in HALVES]:
        del sys.modules[name]
    sys.path.insert(0, tree)
    sys.dont_write_bytecode = True
    for half in HALVES:
        assert Path(importlib.import_module(half).__file__).parent == Path(tree, half)


def _print_and_exit(value):
    """Print a value as JSON and end the process at once: tearing down torch takes longer than importing a table."""
    print(json.dumps(value), flush=True)
    os._exit(0)


def _format_module(path):
    """Return the dotted name of the module at a path in the tree."""
    return str(path)[:-3].replace("/", ".").removesuffix(".__init__")
