"""Every launcher satisfies the contract of `launchers/launcher.py`, also the one of docs/writing-a-launcher.md.

A new launcher needs an entry in `SECTIONS`.
"""

import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from support.launchers import page_launcher, plans
from support.launchers.launch_specs import build_spec
from support.processes.commands import call_accel

from accel_cli.commands.plan_view import format_plan
from accel_cli.errors import UsageError
from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
from accel_cli.launchers import LAUNCHERS, list_options, torchrun
from accel_cli.launchers.job_launcher import JobLauncher
from accel_cli.launchers.launcher import DETACH
from accel_cli.launchers.sections import Question
from accel_cli.planning import machine
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.planning.plan import Plan
from accel_cli.profile import planner

SECTIONS = {
    "single": {},
    "torchrun": {"nproc_per_node": 2},
    "slurm": {"nnodes": 2},
    "ssh": {"hosts": ["a", "b"]},
    "xla": {},
    "sagemaker": {"instance_type": "ml.m5.large"},
    "kubernetes": {"image": "accel:cpu"},
    "ray": {"nnodes": 2},
    "skypilot": {"nnodes": 2},
    page_launcher.KIND: {"level": 5},
}
"""Keys of a section that every rule holds for, by the kind of the launcher."""
SENDING = [
    kind
    for kind, launcher in LAUNCHERS.items()
    if issubclass(launcher, JobLauncher) and "exclude" in launcher.model_fields
]
"""The launchers whose jobs may carry the files of a folder."""
# Every launcher can use it: those without accelerators, and xla.
MACHINE = Machine(8, others=(XlaDevices(Tpu(("TPU v5e",) * 4, "PCI"), Packages("2.9.0", "2.9.0", "0.0.21")),))
ARGUMENTS = ("--lr", "-1", "a b")


@pytest.fixture(scope="module", autouse=True)
def _page_launcher(tmp_path_factory):
    with page_launcher.importable(tmp_path_factory.mktemp("page") / "site"):
        yield


@pytest.fixture(autouse=True)
def _files(cwd, monkeypatch):
    (cwd / "train.py").write_text("pass")
    monkeypatch.setattr(machine, "detect_quickly", lambda _: MACHINE)


@pytest.fixture(params=SECTIONS)
def kind(request):
    """The kind of each launcher in turn."""
    return request.param


@pytest.fixture
def launcher(kind):
    """The class of each launcher in turn."""
    return LAUNCHERS[kind]


@pytest.fixture
def section(kind, launcher):
    """The section of each launcher in turn."""
    return launcher(**SECTIONS[kind])


def spec(*args, **options):
    return replace(build_spec(*(args or ARGUMENTS), **options), machine=MACHINE)


def assign(kind, **keys):
    """Return the assignments that select a launcher, as `--set` has them."""
    values = {"kind": kind, **SECTIONS[kind], **keys}
    return tuple(f"launcher.{key}={json.dumps(value)}" for key, value in values.items())


def prepare(kind, **options):
    """Return the plan of a command line that selects a launcher."""
    request = Request("train.py", ARGUMENTS, options={"set": assign(kind), **options})
    return plans.prepare(request, {"ACCEL_HOME": os.environ["ACCEL_HOME"]}, MACHINE)[1]


def list_files(folder):
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_every_launcher_has_a_section_here():
    assert set(SECTIONS) == {*LAUNCHERS}


# The section ------------------------------------------------------------------------------


def test_the_kind_is_the_name_in_the_table(kind, launcher):
    assert launcher.model_fields["kind"].default == kind
    assert launcher.title


def test_a_section_does_not_change(section):
    with pytest.raises(ValidationError, match="frozen"):
        section.kind = "other"


def test_every_key_has_a_description_and_a_default(launcher):
    for name, field in launcher.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name


def test_an_unknown_key_is_an_error_that_names_it(kind, launcher, capfd):
    with pytest.raises(ValidationError, match=r"wrong\n.*extra"):
        launcher(wrong=1)
    done = call_accel(capfd, "launch", *(f"--set={text}" for text in assign(kind, wrong=1)), "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "launcher.wrong: unknown key" in done.stderr


def test_the_suggested_answers_are_a_section_that_can_be_launched(launcher):
    answers = {}
    for name, field in launcher.model_fields.items():
        for question in field.metadata:
            if isinstance(question, Question) and question.when(answers):
                assert question.text.endswith("?"), name
                answers[name] = question.suggest(MACHINE, answers)
    answered = {name: answer for name, answer in answers.items() if answer is not None}
    assert launcher(**answered).plan(spec()).launcher == launcher.model_fields["kind"].default


def test_a_section_is_equal_after_it_was_written_to_a_profile(kind, section, cwd):
    keys = {"kind": kind, **section.model_dump(exclude_defaults=True)}
    (cwd / "accel.yaml").write_text(yaml.safe_dump({"schema_version": 1, "launcher": keys}))
    assert planner.resolve(Request("train.py"), os.environ, MACHINE).profile.launcher == section


def test_options_and_job_keys_set_keys_of_the_section(launcher):
    keys = {f"launcher.{name}" for name in launcher.model_fields}
    for option in launcher.launch_options:
        assert not option.key or launcher.key_aliases.get(option.key, option.key) in keys, option.flag
    assert keys >= {f"launcher.{name}" for name in launcher.job_keys}
    assert keys >= set(launcher.key_aliases.values())


# The plan ---------------------------------------------------------------------------------


def test_equal_launches_have_equal_plans_in_any_environment(kind, section, launcher, monkeypatch):
    plan = section.plan(spec())
    for name in ("RANK", "SLURM_JOB_ID", "RAY_ADDRESS", "PJRT_DEVICE", "AWS_REGION", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    assert launcher(**SECTIONS[kind]).plan(spec()) == plan
    assert plan.launcher == kind


def test_a_plan_is_plain_data(section):
    plan = section.plan(spec())
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan  # noqa: S301
    if plan.job is None:
        assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_has_the_target_and_its_arguments(section):
    plan = section.plan(spec("--one", "x" * 30))
    words = f"{plan.argv} {plan.job}"
    assert all(word in words for word in ("train.py", "--one", "x" * 30))


def test_a_plan_has_a_job_if_the_processes_are_not_those_of_this_machine(launcher, section):
    plan = section.plan(spec())
    assert (plan.job is not None) == (launcher.location in {"hosts", "job"})


def test_the_world_sizes_of_a_plan_are_those_of_its_nodes_and_processes(section):
    plan = section.plan(spec(device="auto"))
    sizes = section.get_world_sizes(spec(), plan)
    assert all(size == plan.nnodes * plan.nproc_per_node for size in sizes)


def find_settings(plan):
    """Return the variables of the processes; a job of SageMaker gets its settings with its files."""
    return plan.env if plan.launcher != "sagemaker" else {**plan.env, **plan.job.run["settings"]}


def test_the_environment_has_the_settings_and_the_variables_of_the_profile(section):
    options = {"mixed_precision": "bf16", "process_group_timeout": 77, "resume": True}
    given = spec(env={"NCCL_DEBUG": "INFO"}, **options)
    environment = find_settings(section.plan(given))
    # A launcher may decide on the device, on shared files and on SPMD.
    decided = {"ACCEL_DEVICE", "ACCEL_SHARED_FILES", "ACCEL_SPMD"}
    expected = {k: v for k, v in given.settings.to_env().items() if k not in decided}
    assert expected.items() <= environment.items()
    assert environment["NCCL_DEBUG"] == "INFO"


def test_a_variable_of_the_profile_does_not_override_one_that_the_processes_inherit(launcher, section):
    if launcher.location != "job":  # a job does not run in this environment
        plan = section.plan(spec(env={"NCCL_DEBUG": "INFO"}, environ={"NCCL_DEBUG": "WARN"}))
        # Other hosts inherit nothing, so the plan has the value.
        inherited = {} if launcher.location == "hosts" else {"NCCL_DEBUG": "WARN"}
        assert {**inherited, **plan.env}["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize(
    ("kind", "keys", "shared"),
    [
        ("single", {}, "1"),
        ("torchrun", {"nproc_per_node": 2}, "1"),
        ("torchrun", {"nnodes": 2, "rdzv_endpoint": "a:1"}, "1"),  # not known: checked when the run starts
        ("slurm", {"nnodes": 2}, "1"),
        ("ssh", {"hosts": ["a", "b"]}, "1"),
        ("ssh", {"hosts": ["a", "b"], "sync": True}, "0"),
        ("ssh", {"hosts": ["a"], "sync": True}, "1"),
        ("ssh", {"hosts": ["a", "b"], "nnodes": 1, "sync": True}, "1"),
        ("xla", {}, "1"),
        ("xla", {"nnodes": 2, "rdzv_endpoint": "a:1"}, "0"),
        ("sagemaker", {"instance_type": "ml.m5.large"}, "1"),
        ("sagemaker", {"instance_type": "ml.m5.large", "instance_count": 2}, "0"),
        ("kubernetes", {"image": "i", "nnodes": 2}, "0"),
        ("kubernetes", {"image": "i", "nnodes": 2, "volumes": {"/runs": "pvc/runs"}}, "1"),
        ("ray", {"nnodes": 2}, "0"),
        ("ray", {"nnodes": 2, "source": "shared"}, "1"),
    ],
)
def test_nodes_with_separate_files_write_checkpoints_on_the_first(kind, keys, shared):
    section = LAUNCHERS[kind](**keys)
    assert find_settings(planner.build_plan(section, spec(device="auto")))["ACCEL_SHARED_FILES"] == shared
    separate = planner.build_plan(section, spec(device="auto", shared_files=False))
    assert find_settings(separate)["ACCEL_SHARED_FILES"] == "0"


def test_the_value_of_a_secret_is_in_no_command_and_no_message(section):
    try:
        plan = section.plan(spec(env={"WANDB_API_KEY": "s3cret"}))
    except UsageError as error:
        assert "env.WANDB_API_KEY looks like a secret" in str(error)
        assert "s3cret" not in str(error)
    else:
        assert plan.env["WANDB_API_KEY"] == "s3cret"
        assert "s3cret" not in f"{plan.argv} {plan.job}"


def test_only_the_option_detaches_a_job(launcher, section):
    if DETACH in launcher.launch_options:
        assert not section.plan(spec()).job.detach
        assert section.plan(replace(spec(), option_values={"detach": True})).job.detach


@pytest.mark.parametrize("kind", SENDING)
def test_a_job_carries_the_script_at_its_place_in_the_folder_that_is_sent(kind, cwd, monkeypatch):
    (cwd / "a b").mkdir()
    (cwd / "a b" / "x.py").touch()
    monkeypatch.chdir(cwd / "a b")

    def plan(target, **keys):
        return LAUNCHERS[kind](**SECTIONS[kind], **keys).plan(replace(spec(), target=target))

    for target in ("x.py", str(cwd / "a b" / "x.py")):
        planned = plan(target, source_dir="..")
        assert (planned.job.sent.cwd, planned.job.sent.script) == ("a b", "x.py")
        assert str(cwd) not in f"{planned.argv} {planned.env}"
    for keys, message in (
        ({"source_dir": str(cwd / "other")}, "The current directory is not in "),
        ({"source_dir": "..", "exclude": ["*.py"]}, "x.py is needed, but is not sent"),
    ):
        with pytest.raises(UsageError, match=message):
            plan("x.py", **keys).job.sent.select({})


# The command line -------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_the_preview_and_changes_nothing(
    kind, launcher, cwd, capfd, monkeypatch
):
    monkeypatch.setattr(launcher, "run", lambda *_: pytest.fail("it runs"))
    monkeypatch.setattr(launcher, "preview", lambda *_: "the preview")  # that of a job has its random name
    before = list_files(cwd.parent)
    options = [f"--set={text}" for text in assign(kind)]
    done = call_accel(capfd, "launch", "--dry-run", *options, "train.py", *ARGUMENTS)
    assert done.stdout == f"{format_plan(prepare(kind), None)}\nthe preview\n", done.stderr
    assert list_files(cwd.parent) == before


def test_a_rank_of_this_node_is_an_error_if_the_script_runs_on_others(kind, launcher):
    if launcher.location in {"hosts", "job"}:
        with pytest.raises(UsageError, match=f"Cannot use --node-rank with launcher.kind: {kind}"):
            prepare(kind, node_rank="1")


def test_a_process_group_library_is_an_error_without_an_image_that_has_it(kind, launcher):
    if "smddp" not in launcher.process_group_backends:
        message = r"'smddp': its library is not installed here, .*\. Use auto, or launcher\.kind: sagemaker"
        with pytest.raises(UsageError, match=message):
            prepare(kind, set=(*assign(kind), "process_group_backend=smddp"))


def test_the_launch_on_each_node_receives_the_keys_of_torchrun(kind, launcher):
    """Without them, advice to set one could not be followed. Launchers of other packages may have others."""
    if launcher.location in {"local", "pod"} or kind not in LAUNCHERS.names:
        return
    assert {*torchrun.PASSED_KEYS} <= launcher.model_fields.keys()
    keys = {
        "stall_timeout": 61,
        "stall_action": "fail",
        "startup_timeout": 62,
        "preflight": True,
        "progress_line": 63,
    }
    plan = prepare(kind, set=assign(kind, **keys, start_method="exec"))
    text = f"{plan!r} {plan.job and plan.job.preview()}"
    assert [key for key in torchrun.PASSED_KEYS if f"launcher.{key}=" not in text] == []


def test_an_option_of_other_launchers_is_an_error_that_names_both(kind):
    for option, kinds in list_options().items():
        if kind in kinds or (kind == "single" and "torchrun" in kinds):  # which then replaces it
            continue
        message = rf"Cannot use {option.flag} with launcher\.kind: {kind}: .*{kinds[0]}"
        with pytest.raises(UsageError, match=message):
            prepare(kind, **{option.name: option.const or "1"})


# Side effects -----------------------------------------------------------------------------

WATCH = """
import json, sys
from {module} import MACHINE, SECTIONS, page_launcher, spec
from accel_cli.launchers import LAUNCHERS

forbidden = {{"subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn", "os.mkdir", "os.remove", "os.rename",
             "socket.connect", "socket.bind", "os.putenv", "shutil.copyfile"}}
events, watched = [], None

def watch(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if watched and (event in forbidden or writes):
        events.append((watched, event, str(args)))

sys.dont_write_bytecode = True
sys.addaudithook(watch)
for kind, keys in SECTIONS.items():
    section, spec_ = LAUNCHERS[kind](**keys), spec()
    watched = kind
    section.plan(spec_)
    watched = None
print(json.dumps([events, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


@pytest.fixture(scope="module")
def planning(tmp_path_factory):
    """The side effects of plans by launcher, and the packages that plans import, in a new interpreter."""
    folder = tmp_path_factory.mktemp("planning")
    page_launcher.install(folder / "site")
    (folder / "train.py").write_text("pass")
    tests = Path(__file__).parents[2]
    folders = [folder / "site", Path(__file__).parent, tests, tests.parent]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", WATCH.format(module=Path(__file__).stem)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_plan_has_no_side_effects(kind, planning):
    events, _ = planning
    assert [event for event in events if event[0] == kind] == []


def test_planning_imports_neither_torch_nor_the_clients_of_services(planning):
    _, packages = planning
    assert {"torch", "boto3", "botocore", "sagemaker", "kubernetes", "ray"}.isdisjoint(packages)
