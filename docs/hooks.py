"""Generate the reference pages, the text that blocks copy, and the ranks of search results, when mkdocs builds the site."""

from __future__ import annotations

import ast
import html
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic.fields import FieldInfo
from typer.core import TyperArgument, TyperGroup

import accel_runtime
from accel_cli import errors
from accel_cli.accelerate.config_conversion import JOB_RULES
from accel_cli.accelerate.config_values import OFF, AccelerateConfig, KeyRule
from accel_cli.extensions.opentelemetry.sink import GAUGES
from accel_cli.extensions.opentelemetry.spans import SPANS
from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.sections import Question, Section
from accel_cli.main import accel
from accel_cli.planning import nodes
from accel_cli.planning.launch_options import list_foreign_options, normalize_option
from accel_cli.profile.schema import SETTINGS_SECTIONS, Profile
from accel_cli.runs.goodput import CAUSES
from accel_cli.runs.live_view import MEANINGS
from accel_cli.runs.progress import RunProgress
from accel_cli.runs.prometheus import METRICS, CounterMetricFamily
from accel_cli.runs.snapshot import RANK_FIELDS, RUN_FIELDS
from accel_runtime.accelerate.package import PACKAGE_NAMES
from accel_runtime.environment import settings as env
from accel_runtime.environment.accelerate import launch, missing_names
from accel_runtime.environment.accelerate.setting import Choices, Setting
from accel_runtime.environment.engines import ENGINES
from accel_runtime.environment.settings import Settings
from accel_runtime.extensions.xla import ROUNDING

__all__ = [
    "accelerate_page",
    "cli_page",
    "errors_page",
    "findings_page",
    "metrics_page",
    "on_files",
    "on_page_content",
    "profile_page",
    "variables_page",
]

ROOT = Path(__file__).resolve().parents[1]

_NOT_MEASURED = """\
# Benchmarks

This build of the documentation contains no measurements. `make bench` compares accel with bare torch, torchrun and
Accelerate on your machine, and writes this page.
"""
_TYPE_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; `mkdocs` calls this once per build."""
    pages = {
        "reference/cli.md": cli_page(),
        "reference/profile.md": profile_page(),
        "reference/variables.md": variables_page(),
        "reference/errors.md": errors_page(),
        "reference/metrics.md": metrics_page(),
        "reference/accelerate.md": accelerate_page(),
        "reference/findings.md": findings_page(),
    }
    if files.get_file_from_path("benchmarks.md") is None:
        pages["benchmarks.md"] = _NOT_MEASURED
    pages["llms.txt"] = llms_text(config)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def llms_text(config: MkDocsConfig) -> str:
    """Return the contents of the site for language models (https://llmstxt.org): each page with its first sentence."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += ["`accel skill` prints what to run, and how to read failures, for the installed version.", ""]
    for entry in config.nav or []:
        ((title, below),) = entry.items()
        rows = [
            f"- [{name}]({_find_url(config, page)}){_read_first_sentence(page)}"
            for name, page in _list_pages(title, below)
        ]
        lines += [f"## {title}", "", *rows, ""]
    return "\n".join(lines)


def _list_pages(title: str, entry: Any) -> Iterator[tuple[str, str]]:
    """Yield the titles and files of the pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield title, entry
        return
    for item in entry:
        ((name, below),) = item.items() if isinstance(item, dict) else ((Path(item).stem, item),)
        yield from _list_pages(name, below)


def _find_url(config: MkDocsConfig, page: str) -> str:
    if page.startswith("http"):
        return page
    base = (config.site_url or "").rstrip("/")
    return f"{base}/{page}" if base else page


def _read_first_sentence(page: str) -> str:
    """Return the first sentence of a page in the folder, after a colon; empty for a generated one."""
    file = ROOT / "docs" / page
    if not file.is_file():
        return ""
    paragraphs = file.read_text(encoding="utf-8").split("\n\n")
    first = next((text for text in paragraphs if re.match(r"[A-Za-z`*\[]", text)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    sentence = re.match(r".*?\.(?=\s|$)", plain)
    text = (sentence[0] if sentence else plain).rstrip(".:")
    return f": {text}" if text else ""


_COPIED = re.compile(r'<div class="language-(console|diff) highlight">(.*?)</div>', re.DOTALL)


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """Change what blocks copy, and the rank of a page in the search; `mkdocs` calls this for each page."""
    if page.url.startswith(("api/", "design/", "reference/")):
        page.meta["search"] = {"boost": 0.5}  # below the guides
    return _COPIED.sub(_add_copied_text, content)


def _add_copied_text(block: re.Match[str]) -> str:
    """Make the button copy the commands of a console block, or the new side of a diff."""
    code = block[2].partition("<code>")[2]  # after the title
    lines = html.unescape(re.sub(r"<[^>]+>", "", code)).splitlines()
    if block[1] == "console":
        copied = [line[2:].partition("  # ")[0] for line in lines if line.startswith("$ ")]
    else:
        copied = [line[1:] for line in lines if not line.startswith("-")]
    # Material for MkDocs copies this attribute in place of the text of the block.
    return block[0].replace("<div ", f'<div data-copy="{html.escape(chr(10).join(copied))}" ', 1)


# The command line ----------------------------------------------------------------------


def cli_page() -> str:
    """Return the page of all commands with their arguments and options, from the commands."""
    intro = (
        "# Command line (CLI)\n\n"
        "Generated from the commands; `accel COMMAND --help` prints the same. Every command also accepts "
        "`--help` or `-h`. [Exit codes](../when-it-fails.md#exit-codes) lists the exit codes.\n"
    )
    return "\n".join([intro, *_commands("accel", accel)])


def _commands(name: str, command: Any) -> Iterator[str]:
    """Yield the section of a command, and those of its subcommands."""
    yield _command(name, command)
    if isinstance(command, TyperGroup):
        for below, inner in command.commands.items():
            yield from _commands(f"{name} {below}", inner)


def _command(name: str, command: Any) -> str:
    # As for completion: launchers add their options to those of `accel launch`.
    command.make_context(name, [], resilient_parsing=True)
    parts = [f"## `{name}`", command.help or ""]
    if isinstance(command, TyperGroup):
        parts.append(_table(("Command", "Description"), _summaries(name, command)))
    arguments = [p for p in command.params if isinstance(p, TyperArgument)]
    options = [p for p in command.params if not isinstance(p, TyperArgument)]
    if arguments:
        rows = [(_argument(p), _cell(p.help or "")) for p in arguments]
        parts.append(_table(("Argument", "Meaning"), rows))
    if options:
        rows = [(_option(p), _meaning(p)) for p in options]
        parts.append(_table(("Option", "Meaning"), rows))
    if command.epilog:
        label, _, example = command.epilog.partition(": ")
        parts.append(f"{label}: `{example}`")
    return "\n\n".join(part for part in parts if part) + "\n"


def _summaries(name: str, group: TyperGroup) -> list[tuple[str, str]]:
    return [
        (f"[`{name} {below}`](#{name.replace(' ', '-')}-{below})", (inner.help or "").splitlines()[0])
        for below, inner in group.commands.items()
    ]


def _argument(argument: Any) -> str:
    several = "..." if argument.nargs == -1 else ""
    word = f"{argument.metavar or argument.name}{several}"
    return f"`{word}`" if argument.required else f"`[{word}]`"


def _option(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or 'TEXT'}"
    return ", ".join(f"`{spelling}{value}`" for spelling in sorted(option.opts, key=len))


def _meaning(option: Any) -> str:
    default = option.default
    return _cell((option.help or "") + ("" if default in (None, False) else f" Default: `{default}`."))


# The profile ---------------------------------------------------------------------------


def profile_page() -> str:
    """Return the page of all profile keys, from the models that validate them."""
    parts = [
        "# Profile keys",
        _MADE,
        "## Keys of a profile",
        _keys(Profile, "", leave_out=("launcher", *SETTINGS_SECTIONS)),
        "## `launcher`",
        _KINDS,
    ]
    for kind, launcher in LAUNCHERS.items():
        parts += [f"### `kind: {kind}`", f"{launcher.title}.", _keys(launcher, "launcher.")]
    for name, section in SETTINGS_SECTIONS.items():
        description = Profile.model_fields[name].description or ""
        parts += [f"## `{name}`", f"{description} {_DIVIDES}", _keys(section, f"{name}.")]
    return "\n\n".join(parts) + "\n"


_MADE = """\
Generated from the models that validate a profile. [Profiles](../profile.md) describes how profiles are found and
combined."""
_KINDS = """\
How processes are started. `kind` selects the launcher; the other keys of the section depend on the kind."""
_DIVIDES = "All launchers except `xla` support it; see\n[profiles](../profile.md#parallelism)."


def _keys(section: type[Section], prefix: str, leave_out: Sequence[str] = ()) -> str:
    """Return the table of a section's keys; those that `accel config` asks for come first."""
    fields = [(name, field) for name, field in section.model_fields.items() if name not in leave_out]
    fields.sort(
        key=lambda entry: entry[0] != "kind" and not any(isinstance(m, Question) for m in entry[1].metadata)
    )
    rows = [
        (f"`{prefix}{name}`", _kind(field), _default(name, field), _cell(field.description or ""))
        for name, field in fields
    ]
    return _table(("Key", "Type", "Default", "Meaning"), rows)


def _kind(field: FieldInfo) -> str:
    """Return the type and bounds of a field as text."""
    least = [f", at least {m.ge}" for m in field.metadata if hasattr(m, "ge")]
    above = [f", above {m.gt}" for m in field.metadata if hasattr(m, "gt")]
    return _format_type(field.annotation) + "".join([*least, *above])


def _format_type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in {Union, types.UnionType}:
        return " or ".join(_format_type(part) for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is dict:
        return "mapping of names to texts"
    if get_origin(annotation) is list:
        return "list of texts"
    if get_origin(annotation) is tuple:
        return (
            "pairs `name=value`, separated by commas"
            if get_origin(get_args(annotation)[0]) is tuple
            else "texts, separated by commas"
        )
    # The type of an Annotated field in a union is still wrapped.
    return _TYPE_NAMES[get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation]


def _default(name: str, field: FieldInfo) -> str:
    """Return the default of a field as text; a launcher has none."""
    if name == "kind":
        return "none"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "unset" if value is None else f"`{value}`" if value or value == 0 else "empty"


# The environment variables -------------------------------------------------------------


def variables_page() -> str:
    """Return the page of all environment variables, from `accel_runtime.environment.settings` and the nodes of a launch."""
    module = griffe.load("accel_runtime.environment.settings", search_paths=[ROOT])
    header = ("Variable", "Values", "Meaning")
    parts = ["# Environment variables", _VARIABLES, "## Settings", _SETTINGS]
    parts.append(_table(header, _variables_of(Settings)))
    for title, text, values in (
        ("Launcher", _LAUNCHER, _LAUNCHER_VALUES),
        ("Set by the launcher", _SET_BY_LAUNCHER, _SET_VALUES),
        ("Variables of other tools", _OTHER_TOOLS, _OTHER_VALUES),
    ):
        rows = [
            (f"`{getattr(env, name)}`", kind, _format_docstring(module[name]))
            for name, kind in values.items()
        ]
        parts += [f"## {title}", text, _table(header, rows)]
    rejected = ", ".join(f"`{name}`" for name in ROUNDING)
    parts.append(f"{rejected} are rejected on TPUs: set `mixed_precision` instead.")
    schedulers = [
        (source, ", ".join(f"`{name}`" for name in names)) for source, names in nodes.VARIABLES.items()
    ]
    parts += ["## Variables of schedulers", _SCHEDULERS, _table(("Source", "Variables"), schedulers)]
    return "\n\n".join(parts) + "\n"


_VARIABLES = """\
Generated from the classes that read the variables. An invalid value, or a misspelled name that begins with `ACCEL_`, is
an error that names the variable."""
_SETTINGS = """\
Each of these variables overrides the key of the same name in the [profile](profile.md) for one run. `--set` and the other
options of `accel launch` take precedence over variables. They also work without `accel launch`. The launcher sets the same
variables for the processes it starts."""
_LAUNCHER = "These variables have no key in the profile."
_LAUNCHER_VALUES = {
    "HOME": "a directory",
    "PROFILE": "a name",
    "TRUSTED_PROJECTS": "directories",
    "NODE_NAME": "a name",
    "FAILURE_FILE": "a file",
    "RUN_FILE": "a file",
    "NUM_PROCESSES": "a number",
    "TRUST_NETWORK": "`1`, `true`, `0`, `false`",
}
_SET_BY_LAUNCHER = """\
`accel launch` sets these variables, and those of torchrun: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`,
`MASTER_ADDR`, `MASTER_PORT` and related ones. `accel launch --explain` prints the variables of a launch. Do not set
them yourself."""
_SET_VALUES = {
    "LAUNCH": "a name",
    "RANK_FOLDER": "a directory",
    "RANK_PROCESS": "a process",
    "CONTROL": "two numbers",
    "RDZV_SOCKET": "a number",
    "EXPORTED": "names and values",
    "ACCELERATE_LIMITS": "JSON",
}
_OTHER_TOOLS = """\
accel also reads [Accelerate's variables](../coming-from-accelerate.md#environment-variables) and these:"""
_OTHER_VALUES = {"PJRT": "`TPU`, `CPU`, ...", "EARLY_FP16": "`1`, `true`, `0`, `false`"}
_SCHEDULERS = """\
`accel launch` reads these variables to find the nodes of a job and the rank of this node; see
[multi-node training](../several-machines.md#in-a-scheduler)."""


def _variables_of(settings: type[Any], before: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield a row for the variable of each field, and of each field of a section."""
    module = griffe.load(settings.__module__, search_paths=[ROOT])
    hints = get_type_hints(settings)
    for f in fields(settings):
        if f.name == "engines":
            for engine in ENGINES.names:
                yield from _variables_of(ENGINES[engine], f"{engine}_")
        elif is_dataclass(hints[f.name]):
            yield from _variables_of(hints[f.name], f"{f.name}_")
        else:
            meaning = _format_docstring(module[f"{settings.__name__}.{f.name}"])
            yield f"`{env.variable_name(before + f.name)}`", _format_type(hints[f.name]), meaning


# The errors ----------------------------------------------------------------------------


def errors_page() -> str:
    """Return the page of all exception classes, from the sources."""
    runtime = griffe.load("accel_runtime", search_paths=[ROOT])
    commands = griffe.load("accel_cli.errors", search_paths=[ROOT])
    rows = [
        (f"`{item.name}`", f"`{item.bases[0]}`, in `{_find_import(item)}`", _format_docstring(item))
        for item in sorted(_exceptions(runtime), key=lambda item: str(item.name))
    ]
    exits = [
        (f"`{item.name}`", str(getattr(errors, item.name).exit_code), _format_docstring(item))
        for item in _exceptions(commands)
    ]
    parts = ["# Errors", _ERRORS, _table(("Error", "Base class and module", "Meaning"), rows)]
    parts += ["## Other errors of a script", _BUILT_IN]
    parts += ["## Errors of the command", _EXITS, _table(("Error", "Exit code", "Meaning"), exits)]
    return "\n\n".join(parts) + "\n"


_ERRORS = """\
Generated from the classes. A message has the form *what failed: why. What to do.* [Troubleshooting](../troubleshooting.md)
lists messages by their text.

## Errors of a script

A failure that concerns all processes is raised on all of them, so that none waits for the others."""
_BUILT_IN = """\
| Error | Raised |
| --- | --- |
| `ValueError` | for an invalid argument; the message contains the value and the expected ones |
| `TypeError` | for an argument of the wrong type, or one that accel does not have |
| `RuntimeError` | for a call that is not possible at this point, for example after `prepare` |
| `ImportError` | for a name of Accelerate that accel [does not have](../coming-from-accelerate.md#unsupported-names), or a missing optional package |"""
_EXITS = """\
`accel` prints these errors as one message to stderr, without a traceback, and exits with the code. A failure of the script
has the exit code of the script: see [exit codes](../when-it-fails.md#exit-codes)."""
_INTERNAL = {"ConnectionLostError", "EstimateError", "KeyExistsError"}
"""Exceptions that accel handles or converts before a script or a user sees them."""


def _exceptions(module: Any) -> Iterator[Any]:
    """Yield the public exception classes of a module and of its submodules."""
    for name, item in module.members.items():
        # An alias is an imported name, which is a member of its own module too.
        if item.is_alias or name.startswith("_"):
            continue
        if item.is_module:
            yield from _exceptions(item)
        elif item.is_class and name.endswith("Error") and name not in _INTERNAL:
            yield item


def _find_import(item: Any) -> str:
    """Return the module from which a script imports a class."""
    return "accel_runtime" if item.name in accel_runtime.__all__ else item.module.path


# Accelerate ----------------------------------------------------------------------------


def accelerate_page() -> str:
    """Return the page of Accelerate's keys, options, variables and names, from the tables that translate or refuse them."""
    header = ("Key and option", "Variable", "In accel")
    parts = ["# Names of Accelerate", _ACCELERATE, "## Keys, options and variables", _TRANSLATED]
    in_sections = {setting for section in launch.SECTIONS for setting in section.settings}
    general = [setting for setting in launch.list_settings() if setting not in in_sections]
    parts += ["### Processes, devices and formats", _table(header, _accelerate_rows(general))]
    for section in launch.SECTIONS:
        rows = _accelerate_rows(section.settings, in_section=True)
        rows += [("all others", "", section.reason)] if section.reason else []
        parts += [f"### `{section.key}`", _table(header, rows)]
    for name in JOB_RULES.names:
        job = JOB_RULES[name]
        own = [setting for setting in job.settings if setting not in launch.COMMON]
        keys = {setting.key: _meaning_of(setting) for setting in own}
        keys |= {f"{job.section}.{key}": _format_rule(rule) for key, rule in job.arguments.items()}
        converted = [(f"`{key}`", _cell(text)) for key, text in keys.items() if text]
        parts += [
            f"### `compute_environment: {job.environment}`",
            _JOB,
            _table(("Key", "In accel"), converted),
        ]
    above = {normalize_option(option) for option, _ in launch.list_options()}
    options = [
        (
            f"`{'-' if len(option) == 1 else '--'}{option}{'*' if option.endswith('-') else ''}`",
            foreign.advice,
        )
        for option, foreign in list_foreign_options().items()
        if option not in above
    ]
    parts += ["## Options of other launchers", _FOREIGN, _table(("Option", "Instead"), options)]
    # Long lists of names are no columns: a phone is too narrow for them.
    missing = [f"- {subject}: {_list_code(names)}" for subject, names, _ in missing_names.MISSING_NAMES]
    parts += [
        "## Unsupported names",
        _MISSING,
        "\n".join(missing),
    ]
    parts.append(f"These modules do not exist: {_list_code(missing_names.MISSING_MODULES)}.")
    differing = [(_list_code(functions), _cell(text)) for functions, text in missing_names.PARAMETERS]
    parts += ["## Parameters that differ", _table(("Names", "In accel"), differing)]
    taken = [f"- `{module}`: {_list_code(sorted(names))}" for module, names in PACKAGE_NAMES.items()]
    parts += ["## Names that are taken from Accelerate", _TAKEN, "\n".join(taken)]
    return "\n\n".join(parts) + "\n"


_ACCELERATE = """\
Generated from the tables that accel translates and refuses by, for Accelerate 1.15.0. [Migrate from
Accelerate](../coming-from-accelerate.md) lists the differences in behaviour."""
_TRANSLATED = """\
A key of the configuration file is what `accel config import` and `--config-file` read, an option is one of `accelerate
launch`, and a variable one that its launcher sets. Each means the key of the [profile](profile.md) in the last column, or
has no counterpart for the reason there. Each key of a section is an option too: `--zero_stage`, `--fsdp_version`."""
_JOB = "These keys become the section `launcher` of the job; the others are those above."
_FOREIGN = """\
`accel launch` translates an option above that has one meaning here, and those of torchrun [in the
table](../from-torchrun.md#options). It refuses all others with this advice; `*` stands for the rest of a name."""
_MISSING = """\
Importing one of these names is an `ImportError`, reading a member an `AttributeError`, and passing an argument a
`TypeError`. This table and the next are complete: a test compares them with the public interface of Accelerate, which is
the names of `accelerate`, of `accelerate.utils` and of the modules that training scripts import from, with members of classes
and parameters."""
_TAKEN = """\
They are those of the installed `accelerate`; without it, importing one is an `ImportError` with the command that installs it."""


def _accelerate_rows(settings: Iterable[Setting], *, in_section: bool = False) -> list[tuple[str, ...]]:
    """Return the rows of settings with a key, an option or a variable; in a section, each key is an option too."""
    rows: list[tuple[str, ...]] = []
    for setting in settings:
        is_option = setting.advice or setting in {launch.MIXED_PRECISION, launch.GPU_IDS}
        options = setting.options or ((setting.key,) if setting.key and is_option else ())
        named = [
            *([setting.key] if setting.key else []),
            *(f"--{option}" for option in options if not in_section),
        ]
        if named or setting.variable:
            variables = [setting.variable] if setting.variable else []
            rows.append((_list_code(named), _list_code(variables), _meaning_of(setting) or "no effect"))
    return rows


def _meaning_of(setting: Setting) -> str:
    """Return the key of the profile that a setting means, or why it means none; empty if neither is known."""
    reasons = (setting.equivalent, setting.reason, setting.instead, setting.advice)
    texts = [f"`{setting.profile_key}`" if setting.profile_key else next(filter(None, reasons), "")]
    texts += [f"the variable is rejected: {setting.refusal}"] if setting.refusal else []
    if isinstance(setting.values, Choices):
        reasons_of: dict[str, list[str]] = {reason: [] for reason in setting.values.refused.values()}
        for value, reason in setting.values.refused.items():
            reasons_of[reason].append(value)
        texts += [f"{_list_code(values)}: {reason}" for reason, values in reasons_of.items()]
    return _cell("; ".join(filter(None, texts)))


def _format_rule(rule: KeyRule) -> str:
    """Return the key of the profile that an argument becomes, or why it becomes none; empty for a section."""
    text = rule.convert("", AccelerateConfig()).text
    return f"`{rule.target}`" if rule.target else "" if text == OFF.text else text


def _list_code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# The findings of `accel migrate` ----------------------------------------------------------


def findings_page() -> str:
    """Return the page of all findings and notes of `accel migrate`, from the calls that record them in the sources."""
    parts = ["# Findings of accel migrate", _FINDINGS]
    for title, text, names in _KINDS_OF_FINDINGS:
        messages = sorted({message for name, message in _list_findings() if name in names})
        parts += [f"## {title}", text, "\n".join(f"- {_cell(message)}" for message in messages)]
    return "\n\n".join(parts) + "\n"


_FINDINGS = """\
Generated from the sources of [`accel migrate`](../migrate.md): each message has the reason and what to write. `...` stands for a name
or a line of the script."""
_KINDS_OF_FINDINGS = (
    (
        "Scripts that are left unchanged",
        "A part of them would compute a wrong result on several processes.",
        {"unsafe", "UnsafeError"},
    ),
    ("Places that are reported", "The rest of the script is converted.", {"finding"}),
    ("Notes", "The change is made, and several processes behave differently than one.", {"note"}),
)
_RECORDERS = frozenset(name for _, _, names in _KINDS_OF_FINDINGS for name in names)
_Values = dict[str, list[ast.expr]]
"""The values that a name is assigned, in a module or a function."""


def _list_findings() -> Iterator[tuple[str, str]]:
    """Yield the function that records a message, and the message."""
    for path in sorted((ROOT / "accel_cli" / "extensions" / "migrate").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from _read_findings(tree, _list_assigned(tree.body))


def _read_findings(node: ast.AST, values: _Values) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef):
        values = values | _list_assigned(list(ast.walk(node)))
    if isinstance(node, ast.Call) and len(node.args) > 1:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _RECORDERS:
            yield from (
                (name, re.sub(r"\.{3,}", "...", text).strip()) for text in _read_texts(node.args[1], values)
            )
    for child in ast.iter_child_nodes(node):
        yield from _read_findings(child, values)


def _list_assigned(nodes: Iterable[ast.AST]) -> _Values:
    assigned: _Values = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    return assigned


def _read_texts(node: ast.expr, values: _Values) -> list[str]:
    """Return the texts that an expression may be, with `...` for what is known at run time only."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.IfExp):
        return [*_read_texts(node.body, values), *_read_texts(node.orelse, values)]
    if isinstance(node, ast.Name):
        others = {name: found for name, found in values.items() if name != node.id}
        return [text for value in values.get(node.id, []) for text in _read_texts(value, others)]
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
    else:
        return []
    texts = [""]
    for part in parts:
        found = _read_texts(part, values)
        texts = [before + text for before in texts for text in (found if len(found) in {1, 2} else ["..."])]
    return texts


def _format_docstring(item: Any) -> str:
    return _cell(item.docstring.value)


# The metrics and fields of a run -------------------------------------------------------


def metrics_page() -> str:
    """Return the page of what a run shows of itself: columns, fields of JSON, metrics, and causes of lost time."""
    field = ("Field", "Value")
    fields_of_progress = [(f"`{name}`", text) for name, text in _list_progress()]
    prometheus = [
        (
            f"`{name}{'_total' if metric.family is CounterMetricFamily else ''}`",
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.text,
        )
        for name, metric in METRICS.items()
    ]
    gauges = [(f"`accel.{name}`", f"`{unit}`", text) for name, (unit, text) in GAUGES.items()]
    causes = [(f"`{name}`", text) for name, text in CAUSES.items()]
    parts = [
        "# Metrics and fields",
        _METRICS,
        "## Columns of `accel top`",
        _table(("Column", "Meaning"), [(f"`{name}`", text) for name, text in MEANINGS.items()]),
        "## JSON of `accel top`",
        _TOP,
        _table(field, [(f"`{name}`", text) for name, text in RUN_FIELDS.items()]),
        "Of a rank:",
        _table(field, [(f"`{name}`", text) for name, text in RANK_FIELDS.items()]),
        "## Fields of a progress file",
        _table(field, fields_of_progress),
        "## Prometheus",
        _table(
            ("Metric", "Labels", "Value"), [("`accel_run_info`", "`run`, `script`", "The run."), *prometheus]
        ),
        "## OpenTelemetry",
        _table(("Metric", "Unit", "Value"), gauges),
        _table(("Span", "Time"), [(f"`{name}`", text) for name, text in SPANS.items()]),
        "## Causes of lost time",
        _table(("Cause", "Time"), causes),
    ]
    return "\n\n".join(parts) + "\n"


_METRICS = """\
Generated from the sources. [Watch a run](../watching.md) and [metrics, dashboards and progress files](../metrics.md) describe
how they are switched on. Unknown values are `null` in JSON, and missing in metrics; new ones may be added."""
_TOP = """\
`accel top --json` prints one object for a run. Of a submitted job, it has `job`, with the fields of `accel jobs status`, and `log`, a
list of lines."""


def _list_progress() -> Iterator[tuple[str, str]]:
    """Yield the fields of a progress file with the docstrings of the classes that have them."""
    module = griffe.load("accel_cli.runs.progress", search_paths=[ROOT])
    for name in RunProgress(time=0.0, run="", state="starting").to_dict():
        owner = "RunProgress" if name in module["RunProgress"].members else "Health"
        yield name, _format_docstring(module[f"{owner}.{name}"]).replace("None", "`null`")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
