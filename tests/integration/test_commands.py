"""What a person sees of `accel --help`, `accel config ...`, `accel env` and `accel test`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from accel_cli.main import app
from accel_cli.profile.layers import file, resolve

GROUP = typer.main.get_command(app)
COMMANDS = [
    (),
    *((name,) for name in GROUP.commands),
    *((group, name) for group in ("config", "jobs") for name in GROUP.commands[group].commands),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_and_shows_an_example(accel, command):
    environ = {**os.environ, "COLUMNS": "80"}
    done = accel(*command, "--help", env=environ)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert f"accel {' '.join(command)}".strip() in done.stdout.partition("Usage")[2].partition("\n")[2]


def test_help_is_grouped(accel):
    said = accel("--help").stdout
    assert said.index(" Run ") < said.index("launch") < said.index(" Set up ") < said.index("config")


def test_version_is_that_of_the_package(accel):
    from importlib.metadata import version

    assert accel("--version").stdout == f"accel {version('accel')}\n"


def test_the_console_script_and_the_module_are_the_same_command():
    script = Path(sys.executable).with_name("accel")
    said = [
        subprocess.run([*c, "--version"], capture_output=True, check=True).stdout
        for c in ([script], [sys.executable, "-m", "accel_cli"])
    ]
    assert said[0] == said[1]


def test_the_shell_completes_commands_profiles_and_keys(accel):
    accel("config", "set", "--profile", "gpu-box", "device=cuda")

    def complete(words):
        environ = {
            **os.environ,
            "_ACCEL_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split())),
        }
        program = "from accel_cli.main import app; app(prog_name='accel')"
        return subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
        ).stdout.split()

    assert {"launch", "config", "env", "test"} <= set(complete("accel "))
    assert complete("accel launch --profile ") == ["gpu-box"]
    assert "mixed_precision=" in complete("accel config set ")


def test_a_profile_is_made_changed_shown_listed_and_deleted(accel, home):
    path = home / "profiles" / "gpu.yaml"
    assert (
        accel(
            "config", "set", "--profile", "gpu", "launcher.kind=torchrun", "launcher.nproc_per_node=2"
        ).returncode
        == 0
    )
    assert accel("config", "set", "--profile", "gpu", "mixed_precision=bf16").returncode == 0
    assert accel("config", "path", "--profile", "gpu").stdout.strip() == str(path)
    assert accel("config", "list").stdout == f"gpu\t{path}\n"
    rows = dict(
        line.split("\t")[:2] for line in accel("config", "show", "--profile", "gpu").stdout.splitlines()
    )
    assert (rows["launcher.nproc_per_node"], rows["mixed_precision"], rows["device"]) == ("2", "bf16", "auto")
    assert (
        f"launcher.kind\ttorchrun\tprofile gpu: {path}:4"
        in accel("config", "show", "--profile", "gpu").stdout
    )
    assert accel("config", "validate", "--profile", "gpu").returncode == 0
    assert accel("config", "delete", "gpu").returncode == 0
    assert accel("config", "list").stdout == ""
    assert accel("config", "delete", "gpu").returncode == 2


def test_a_value_is_taken_out_by_an_empty_one(accel, home):
    accel("config", "set", "device=cpu", "env.A=1")
    accel("config", "set", "device=")
    assert "device" not in (home / "profiles" / "default.yaml").read_text()


def test_a_value_that_cannot_be_is_refused_and_the_file_stays(accel, home):
    accel("config", "set", "device=cpu")
    before = (home / "profiles" / "default.yaml").read_text()
    done = accel("config", "set", "device=gpu", "process_group_timeout=0")
    assert done.returncode == 2
    assert "device: expected auto, cpu, cuda, mps, xla or xpu, got 'gpu'" in done.stderr
    assert "process_group_timeout: expected at least 1, got 0" in done.stderr
    assert (home / "profiles" / "default.yaml").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("command", [("config", "default"), ("config", "--default")])
def test_what_suits_the_machine_is_written_without_questions_once(accel, home, command):
    assert accel(*command).returncode == 0
    profile = resolve([file(home / "profiles" / "default.yaml", "file")]).profile
    assert profile.launcher.kind == "single"
    again = accel(*command)
    assert again.returncode == 2
    assert "exists already; --force replaces it" in again.stderr
    assert accel(*command, "--force").returncode == 0


def test_the_project_file_holds_in_the_project(accel, cwd):
    assert accel("config", "set", "--project", "mixed_precision=bf16").returncode == 0
    assert f"mixed_precision\tbf16\tproject: {cwd}/accel.yaml:3" in accel("config", "show").stdout
    assert "(project)" in accel("config", "list").stdout


def test_every_mistake_of_a_file_is_reported_at_once_with_its_line(accel, cwd):
    (cwd / "x.yaml").write_text(
        "schema_version: 1\ndevise: cpu\nlauncher:\n  kind: torchrun\n  nproc_per_node: 0\n"
    )
    done = accel("config", "validate", "x.yaml")
    assert done.returncode == 2
    assert "x.yaml:2: devise: this key is not known (did you mean device?)" in done.stderr
    assert (
        "x.yaml:5: launcher.nproc_per_node: expected a whole number of at least 1, or auto, got 0"
        in done.stderr
    )


def test_the_schema_is_json_that_accepts_a_written_file(accel, home):
    schema = json.loads(accel("config", "schema").stdout)
    assert schema["required"] == ["schema_version"]
    accel("config", "default")
    assert json.loads((home / "profiles" / ".accel.schema.json").read_text()) == schema


def test_an_editor_changes_a_profile_only_to_one_without_mistakes(accel, home, script):
    accel("config", "set", "device=cpu")
    path = home / "profiles" / "default.yaml"
    editor = script(
        "import sys; p = sys.argv[2]; t = open(p).read().replace('cpu', sys.argv[1]); open(p, 'w').write(t)",
        "ed.py",
    )

    def edit(word):
        return accel(
            "config",
            "edit",
            env={**os.environ, "VISUAL": "", "EDITOR": f"'{sys.executable}' '{editor}' {word}"},
        )

    assert edit("cuda").returncode == 0
    assert "device: cuda" in path.read_text()
    accel("config", "set", "device=cpu")
    refused = edit("gpu")
    assert refused.returncode == 2
    assert "default.yaml:3: device: expected auto, cpu, cuda, mps, xla or xpu, got 'gpu'" in refused.stderr
    assert "left as it was" in refused.stderr
    assert "device: cpu" in path.read_text()
    assert "was left as it is" in edit("cpu").stderr


def test_an_editor_that_does_not_start_is_named(accel):
    accel("config", "set", "device=cpu")
    done = accel("config", "edit", env={**os.environ, "VISUAL": "no-such-editor -w"})
    assert done.returncode == 2
    assert "the editor 'no-such-editor -w' cannot be started" in done.stderr


def test_an_accelerate_file_is_imported_and_what_has_no_place_is_named(accel, cwd, home):
    (cwd / "old.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 1\n"
        "mixed_precision: bf16\nuse_cpu: true\ndynamo_config:\n  dynamo_backend: INDUCTOR\n"
    )
    done = accel("config", "import", "old.yaml", "--profile", "old")
    assert done.returncode == 0, done.stderr
    assert "num_processes: 4\tlauncher.nproc_per_node: 4" in done.stdout
    assert "dynamo_config.dynamo_backend: INDUCTOR" in done.stdout
    profile = resolve([file(home / "profiles" / "old.yaml", "file")]).profile
    assert (profile.launcher.nproc_per_node, profile.device, profile.mixed_precision) == (4, "cpu", "bf16")


def test_a_profile_of_ours_is_imported_with_its_comments(accel, home):
    source = Path(__file__).parents[2] / "configs" / "cpu.yaml"
    assert accel("config", "import", source, "--profile", "cpu").returncode == 0
    assert (home / "profiles" / "cpu.yaml").read_text() == source.read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("show", "--profile", "gone"), "asks for the profile 'gone'"),
        (("path", "--profile", "a/b"), "is no profile name"),
        (("path", "--profile", "a", "--project"), "mean different files"),
        (("validate",), "there is no profile at"),
        (("validate", "gone.yaml"), "there is no profile at gone.yaml"),
        (("edit",), "there is no profile at"),
        (("set", "nonsense"), "takes KEY=VALUE"),
        (("import", "gone.yaml"), "gone.yaml cannot be read: No such file or directory"),
        (("delete", "gone"), "there is no profile at"),
        (("--profile", "x", "show"), "options stand after the subcommand"),
        (("--force",), "--force belongs to --default"),
    ],
)
def test_bad_input_is_one_message_and_code_2(accel, home, args, said):
    done = accel("config", *args)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not home.exists()


def test_a_home_that_cannot_be_written_is_named(accel, tmp_path):
    (tmp_path / "file").write_text("")
    done = accel("config", "set", "device=cpu", env={**os.environ, "ACCEL_HOME": str(tmp_path / "file")})
    assert done.returncode == 2
    assert "cannot be written: Not a directory" in done.stderr


def test_env_says_what_a_bug_report_needs_and_no_secret(accel):
    environ = {**os.environ, "TORCH_API_TOKEN": "hunter2", "NCCL_DEBUG": "WARN"}
    facts = json.loads(accel("env", "--json", env=environ).stdout)
    assert set(facts) == {"system", "packages", "devices", "tpu", "aws", "profile", "variables"}
    assert facts["variables"]["NCCL_DEBUG"] == "WARN"
    assert facts["variables"]["TORCH_API_TOKEN"] == "***"
    assert facts["profile"]["launcher.kind"] == "single  [detected]"
    said = accel("env", env=environ)
    assert said.returncode == 0
    assert "hunter2" not in said.stdout


@pytest.mark.slow
def test_env_says_what_there_is_of_a_tpu_and_what_keeps_it_from_being_used(accel):
    hosts = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
    facts = json.loads(accel("env", "--json", env=os.environ | {"PJRT_DEVICE": "TPU"} | hosts).stdout)
    tpu = facts["tpu"]
    assert (tpu["chips"], tpu["PJRT_DEVICE"]) == ("TPU (PJRT_DEVICE=TPU)", "TPU")
    assert tpu["hosts"] == "2, this is number 1 (TPU_WORKER_*)"
    assert "accel[tpu]" in tpu["torch_xla"]
    assert facts["variables"]["TPU_WORKER_ID"] == "1"
    without = json.loads(accel("env", "--json").stdout)["tpu"]
    assert (without["chips"], without["PJRT_DEVICE"]) == ("none", "not set")


@pytest.mark.slow
def test_env_says_which_aws_would_be_used_and_no_key(accel, tmp_path):
    (tmp_path / "config").write_text("[profile team]\nregion = eu-central-1\n")
    (tmp_path / "keys").write_text(
        "[team]\naws_access_key_id = AKIAHUNTER\naws_secret_access_key = hunter2\n"
    )
    environ = {**{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
               "AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"),
               "AWS_SESSION_TOKEN": "hunter2"}  # fmt: skip
    said = accel("env", "--json", env={**environ, "AWS_PROFILE": "team"})
    assert json.loads(said.stdout)["aws"] == {"profile": "team", "region": "eu-central-1"}
    assert "hunter" not in said.stdout.lower()
    wrong = json.loads(accel("env", "--json", env={**environ, "AWS_PROFILE": "taem"}).stdout)["aws"]
    assert "did you mean team?" in wrong


def test_env_also_answers_when_the_profile_is_broken(accel, home):
    path = home / "profiles" / "default.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("schema_version: 1\ndevice: gpu\n")
    facts = json.loads(accel("env", "--json").stdout)
    assert "cannot be used" in facts["profile"]
    assert "default.yaml:2: device" in facts["profile"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_self_check_holds_here(accel, count, precision):
    accel("config", "set", f"mixed_precision={precision}")
    done = accel("test", "--nproc-per-node", count)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:5]] == ["ok"] * 5
    assert done.stdout.splitlines()[-1] == "everything works here"
