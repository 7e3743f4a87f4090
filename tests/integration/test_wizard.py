"""The wizard on a real pseudo-terminal: its screen, its keys and its profiles."""

import pytest
from support.processes.commands import call_accel
from support.processes.terminal import WITH_PROBE

from accel_cli.profile.layers import read_file, resolve

ENTER, DOWN, CTRL_C = "\r", "\x1b[B", "\x03"
KIND, NNODES, NPROC = "How should scripts run?", "How many nodes?", "How many processes on each node?"
PRECISION, WRITE = "Mixed precision?", "default.yaml?"
FITS, LIBRARY = "fit on one device?", "Which library shards them?"


@pytest.mark.full
def test_enter_on_every_question_writes_a_profile_that_can_be_launched(terminal, read_profile, accel, script):
    screen = terminal(start=WITH_PROBE)
    for question in (KIND, PRECISION, WRITE):
        screen.answer(question, ENTER)
    assert screen.end() == 0
    assert "; next: accel launch train.py" in screen.text().replace("\n", "")
    assert read_profile().model_dump(exclude_unset=True) == {
        "launcher": {"kind": "single"},
        "mixed_precision": "no",
    }
    script("print('it ran')")
    assert accel("launch", "train.py").stdout == "it ran\n"


LOOKS_UNTIL_PROBED = """
import os, time
from accel_cli import main
from accel_cli.planning import machine

def probe(_):
    while not os.path.exists("probed"):
        time.sleep(0.02)
    return machine.Machine(machine.count_cpus())

machine._probe_torch = probe
main.main()
"""


def test_the_first_question_is_shown_while_the_hardware_is_detected(terminal, read_profile, cwd):
    """Keys that are pressed after it, before the next question, are ignored."""
    screen = terminal(start=["-c", LOOKS_UNTIL_PROBED])
    screen.answer(KIND, ENTER)
    screen.answer("Detecting hardware", ENTER + DOWN + "x" + ENTER)
    (cwd / "probed").touch()
    screen.see(PRECISION)
    assert "This machine: " in screen.text()
    assert screen.text().index(KIND) < screen.text().index("This machine: ")
    screen.answer(PRECISION, ENTER)
    screen.answer(WRITE, ENTER)
    assert screen.end() == 0
    assert (read_profile().launcher.kind, read_profile().mixed_precision) == ("single", "no")


@pytest.mark.slow
def test_torchrun_asks_five_questions_and_shows_the_yaml_before_writing(terminal, read_profile, home):
    screen = terminal()
    screen.answer(KIND, DOWN + ENTER)
    screen.answer(NNODES, ENTER)
    screen.answer(NPROC, "3" + ENTER)
    screen.answer(PRECISION, DOWN + ENTER)
    screen.answer(FITS, ENTER)
    screen.see(WRITE)
    assert "nproc_per_node: 3" in screen.text()
    assert not (home / "profiles").exists()
    screen.answer(WRITE, ENTER)
    assert screen.end() == 0
    assert (read_profile().launcher.nproc_per_node, read_profile().mixed_precision) == (3, "bf16")


@pytest.mark.slow
def test_deepspeed_asks_for_its_file_and_writes_a_path_that_the_profile_finds(terminal, read_profile, cwd):
    (cwd / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    screen = terminal(columns=120)
    screen.answer(KIND, DOWN + ENTER)
    screen.answer(NNODES, ENTER)
    screen.answer(NPROC, "2" + ENTER)
    screen.answer(PRECISION, ENTER)
    screen.answer(FITS, DOWN + ENTER)
    screen.answer(LIBRARY, 4 * DOWN + ENTER)
    screen.answer("JSON file of DeepSpeed?", ENTER)
    screen.see("expected the path of a JSON file")
    screen.answer("JSON file of DeepSpeed?", "ds.json" + ENTER)
    screen.answer(WRITE, ENTER)
    assert screen.end() == 0
    assert read_profile().data()["deepspeed"] == {"stage": "auto", "config_file": str(cwd / "ds.json")}


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "section"), [(ENTER, "parallel"), (DOWN + ENTER, "deepspeed")])
def test_import_asks_which_library_shards_a_model_of_deepspeed(terminal, read_profile, cwd, keys, section):
    (cwd / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    screen = terminal("import", "ds.json", columns=120)
    screen.answer("Which library shards models?", keys)
    assert screen.end() == 0
    assert section in read_profile().data()


@pytest.mark.full
def test_sharding_asks_further_questions(terminal, read_profile):
    screen = terminal()
    screen.answer(KIND, DOWN + ENTER)
    screen.answer(NNODES, ENTER)
    screen.answer(NPROC, "2" + ENTER)
    screen.answer(PRECISION, ENTER)
    screen.answer(FITS, DOWN + ENTER)
    screen.answer(LIBRARY, ENTER)
    screen.answer("in host memory?", ENTER)
    screen.answer("Recompute activations in the backward pass?", DOWN + ENTER)
    screen.see(WRITE)
    assert "dp_shard: auto" in screen.text()
    screen.answer(WRITE, ENTER)
    assert screen.end() == 0
    assert (read_profile().parallel.dp_shard, read_profile().fully_shard.activation_checkpointing) == (
        "auto",
        True,
    )
    assert not read_profile().fully_shard.cpu_offload


@pytest.mark.slow
def test_every_question_allows_to_go_back(terminal, read_profile):
    screen = terminal()
    screen.answer(KIND, DOWN + ENTER)
    screen.answer(NNODES, "<" + ENTER)
    screen.answer(KIND, ENTER)  # what was answered is what Enter keeps
    screen.answer(NNODES, ENTER)
    screen.answer(NPROC, "4" + ENTER)
    screen.answer(PRECISION, DOWN * 3 + ENTER)  # Back
    screen.see("4")
    screen.answer(NPROC, "2" + ENTER)
    screen.answer(PRECISION, ENTER)
    screen.answer(FITS, ENTER)
    screen.answer(WRITE, DOWN + ENTER)  # Back
    screen.answer(FITS, "<")
    screen.answer(PRECISION, DOWN + ENTER)
    screen.answer(FITS, ENTER)
    screen.answer(WRITE, ENTER)
    assert screen.end() == 0
    assert (read_profile().launcher.nproc_per_node, read_profile().mixed_precision) == (2, "bf16")


@pytest.mark.parametrize(
    "at",
    [pytest.param(at, marks=pytest.mark.slow if at == 5 else pytest.mark.full) for at in range(6)],
)
def test_ctrl_c_at_any_question_writes_nothing(terminal, home, at):
    screen = terminal()
    keys = [(KIND, DOWN + ENTER), (NNODES, ENTER), (NPROC, ENTER), (PRECISION, ENTER), (FITS, ENTER)]
    keys.append((WRITE, ENTER))
    for question, answer in keys[:at]:
        screen.answer(question, answer)
    screen.answer(keys[at][0], CTRL_C)
    assert screen.end() == 130
    assert "nothing was written" in screen.text()
    assert "Traceback" not in screen.text()
    assert not home.exists()


@pytest.mark.slow
def test_no_at_the_end_writes_nothing(terminal, home):
    screen = terminal()
    screen.answer(KIND, ENTER)
    screen.answer(PRECISION, ENTER)
    screen.answer(WRITE, DOWN * 2 + ENTER)
    assert screen.end() == 0
    assert not home.exists()


@pytest.mark.slow
def test_an_invalid_answer_is_asked_again_with_the_expectation(terminal, read_profile):
    screen = terminal()
    screen.answer(KIND, DOWN + ENTER)
    screen.answer(NNODES, "2" + ENTER)
    screen.answer("Rendezvous address", "nowhere" + ENTER)
    screen.see("expected host:port")
    assert "for none" not in screen.question()  # several nodes need an address
    screen.process.send("\x15node0:29400" + ENTER)
    screen.answer(NPROC, "0" + ENTER)
    screen.see("expected at least 1 or auto")
    screen.process.send("\x7f2" + ENTER)
    screen.answer(PRECISION, ENTER)
    screen.answer(FITS, ENTER)
    screen.answer(WRITE, ENTER)
    assert screen.end() == 0
    assert (read_profile().launcher.nnodes, read_profile().launcher.rdzv_endpoint) == (2, "node0:29400")


@pytest.mark.slow
def test_enter_keeps_the_values_of_the_profile(terminal, read_profile, accel, home):
    accel(
        "config",
        "set",
        "launcher.kind=torchrun",
        "launcher.nproc_per_node=3",
        "mixed_precision=fp16",
        "env.A=1",
    )
    screen = terminal()
    for question in (KIND, NNODES, NPROC, PRECISION, FITS):
        screen.answer(question, ENTER)
        assert "Editing" in screen.text()
    screen.see("Replace")
    comment = home / "profiles" / "default.yaml"
    comment.write_text(f"{comment.read_text()}# mine\n")
    screen.answer("Replace", ENTER)
    assert screen.end() == 0
    assert "# mine\n" in comment.read_text()
    assert (
        "  # Number of nodes, or a range MIN:MAX within which nodes may join and leave\n  nnodes: 1\n"
        in comment.read_text()
    )
    profile = read_profile()
    assert (profile.launcher.nproc_per_node, profile.mixed_precision, profile.env) == (3, "fp16", {"A": "1"})


@pytest.mark.full
def test_a_file_without_values_keeps_its_comments(terminal, home):
    (home / "profiles").mkdir(parents=True)
    path = home / "profiles" / "default.yaml"
    path.write_text("# mine\nschema_version: 1\n")
    screen = terminal()
    screen.answer(KIND, ENTER)
    screen.answer(PRECISION, ENTER)
    screen.answer("Replace", ENTER)
    assert screen.end() == 0
    assert path.read_text().startswith("# mine\nschema_version: 1\nlauncher:\n")


@pytest.mark.full
def test_a_profile_that_this_machine_cannot_run_is_not_suggested(terminal, read_profile, accel):
    accel("config", "set", "device=xpu")
    screen = terminal()
    screen.answer(KIND, ENTER)
    screen.answer(PRECISION, ENTER)
    screen.answer("Replace", ENTER)
    assert screen.end() == 0
    assert "on this machine, so the wizard suggests defaults" in screen.text().replace("\n", "")
    assert read_profile().device == "auto"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 30])
def test_the_questions_work_in_a_narrow_window(terminal, read_profile, columns):
    screen = terminal(columns=columns, lines=60)
    screen.answer(KIND, DOWN + ENTER)
    screen.answer(NNODES, ENTER)
    screen.answer(NPROC, "2" + ENTER)
    screen.see("fp16: float16 with loss scaling; for older GPUs")  # wrapped, not cut
    screen.answer(PRECISION, ENTER)
    screen.answer(FITS, ENTER)
    screen.answer("Write", ENTER)
    assert screen.end() == 0
    assert read_profile().launcher.nproc_per_node == 2


@pytest.mark.full
def test_a_narrow_window_shows_the_whole_error(terminal):
    screen = terminal(columns=36)
    screen.answer(KIND, DOWN + ENTER)
    screen.answer(NNODES, "x" + ENTER)
    screen.see("expected a whole number of at least 1, or a range MIN:MAX such as 1:4")
    screen.process.send(CTRL_C)
    assert screen.end() == 130


@pytest.mark.slow
def test_an_unwritable_home_is_an_error_before_the_first_question(terminal, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "file"))
    screen = terminal(columns=200)
    assert screen.end() == 2
    assert screen.text().endswith("default.yaml: Not a directory.")
    assert "This machine" not in screen.text()


@pytest.mark.slow
def test_a_hyphen_clears_a_value_of_the_profile(terminal, read_profile, accel):
    accel("config", "set", "launcher.kind=slurm", "launcher.partition=long", "launcher.gpus_per_node=1")
    screen = terminal(columns=120)
    for question in (KIND, NNODES, "How many GPUs on each node?"):
        screen.answer(question, ENTER)
    screen.see("- for none")
    screen.answer("Which partition?", "-" + ENTER)
    screen.see("Which account?")
    assert "for none" not in screen.question()
    for question in ("Which account?", "Which time limit?", PRECISION, "Replace"):
        screen.answer(question, ENTER)
    assert screen.end() == 0
    assert (read_profile().launcher.partition, read_profile().launcher.gpus_per_node) == (None, 1)


@pytest.mark.slow
def test_a_hyphen_is_no_answer_for_a_required_value_after_going_back(terminal):
    screen = terminal(columns=120)
    screen.answer(KIND, DOWN * 5 + ENTER)
    screen.answer("Which image?", "mine:1" + ENTER)
    screen.answer(NNODES, "<" + ENTER)
    screen.see("Which image?")
    assert "for none" not in screen.question()
    screen.answer("Which image?", "-" + ENTER)
    screen.see("expected a value")
    screen.process.send(CTRL_C)
    assert screen.end() == 130


@pytest.mark.full
def test_a_named_profile_and_the_project_file_are_written_to_their_paths(terminal, read_profile, cwd):
    for options, path in ((("--profile", "gpu"), None), (("--project",), cwd / "accel.yaml")):
        screen = terminal(*options)
        screen.answer(KIND, ENTER)
        screen.answer(PRECISION, ENTER)
        screen.answer("Write", ENTER)
        assert screen.end() == 0
        profile = resolve([read_file(path, "file")]).profile if path else read_profile("gpu")
        launch = "accel launch train.py" if path else "accel launch --profile gpu train.py"
        assert f"; next: {launch}" in screen.text().replace("\n", "")
        assert profile.launcher.kind == "single"


def test_the_wizard_without_a_terminal_names_other_commands(cwd, home, capfd):
    result = call_accel(capfd, "config")
    assert result.returncode == 2
    assert "accel config default" in result.stderr
    assert "accel config set KEY=VALUE" in result.stderr
    assert not home.exists()


@pytest.mark.slow
def test_a_tpu_is_suggested_with_its_missing_packages_and_questions(terminal, read_profile, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    screen = terminal(columns=250)
    screen.see(KIND)
    assert "This machine: TPU (PJRT_DEVICE=TPU)" in screen.text()
    assert "torch-xla[tpu]==2.9.0" in screen.text()
    screen.answer(KIND, ENTER)
    screen.answer("On how many TPU cores?", ENTER)
    screen.answer("How do the cores share the work?", DOWN + ENTER)
    screen.see(PRECISION)
    assert "fp16" not in screen.text()
    screen.answer(PRECISION, ENTER)
    screen.answer(WRITE, ENTER)
    assert screen.end() == 0
    launcher = read_profile().launcher
    assert (launcher.kind, launcher.replicas, launcher.spmd) == ("xla", "all", True)
    assert read_profile().mixed_precision == "bf16"


@pytest.mark.full
def test_one_tpu_core_skips_the_question_of_spmd(terminal, read_profile, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    screen = terminal()
    screen.answer(KIND, ENTER)
    screen.answer("On how many TPU cores?", DOWN + ENTER)
    screen.answer(PRECISION, DOWN + ENTER)  # Back
    screen.answer("On how many TPU cores?", ENTER)  # what was answered is what Enter keeps
    screen.answer(PRECISION, ENTER)
    screen.answer(WRITE, ENTER)
    assert screen.end() == 0
    assert (read_profile().launcher.replicas, read_profile().launcher.spmd) == (1, False)


@pytest.mark.full
def test_xla_is_not_offered_without_a_tpu_and_torch_xla(terminal):
    screen = terminal()
    screen.see(KIND)
    assert "TPU" not in screen.question()
