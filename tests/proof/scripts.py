"""Public training scripts under `accel launch` on two processes of the CPU, with tiny models and local data, and no network.

Scripts of installed packages run always. Others are taken at a commit from clones in a folder (`SCRIPTS=FOLDER`, with
`FOLDER/OWNER/NAME`), and are not kept.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof import ROOT, Options

__all__ = [
    "SCRIPTS",
    "TITLE",
    "Script",
    "compare_as_is",
    "compare_migrated",
    "headline",
    "render",
    "run",
    "run_script",
]

TITLE = "Public scripts"
OBSERVER = ROOT / "tests" / "support" / "runs" / "step_observer"
TIMEOUT_S = 600
PROCESSES = 2
TOLERANCE = 1e-6
"""The relative difference of losses and weights that two runs of the same script on two processes may have."""
Steps = list[dict[str, Any]]
"""The losses and the norm of the weights of each optimizer step of a rank."""


@dataclass(frozen=True)
class Script:
    """A public script, and how it is run.

    Attributes:
        library: The library that it is of.
        source: `OWNER/NAME` of its repository, or an installed package.
        pin: The commit, or the version of the package.
        path: The path of the script there.
        arguments: Its arguments.
        data: What is written before it runs, by path from its working folder: functions of `support.runs.script_data`.
        is_raw: It is converted by `accel migrate`, and compared with itself on one process. Others run as they are.
        files: Further paths that it needs of its repository.
        edits: Texts of the script that are replaced: constants without an argument, and what does not run on the CPU.
        packages: Packages that it needs beyond the environment, with versions.
        stop: The number of steps after which the run ends, for a script without such an argument.
    """

    library: str
    source: str
    pin: str
    path: str
    arguments: str = ""
    data: tuple[tuple[str, str], ...] = ()
    is_raw: bool = False
    files: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()
    stop: int | None = None

    @property
    def is_installed(self) -> bool:
        """Return whether it is of an installed package."""
        return "/" not in self.source


TRAINER = "--max_steps 4 --per_device_train_batch_size 2 --logging_steps 1 --report_to none --output_dir out"
TRL = f"{TRAINER} --bf16 False --gradient_checkpointing False --model_name_or_path llama"
VISION = ("torchvision==0.28.0",)
TEXT_MODEL = (("llama", "llama"),)
EXAMPLES = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
TRANSFORMERS = "4a42c1b083066a4ae212edd4bd8d28ff713c0088"
DIFFUSERS = "58eb52c0803ea9af3abec60841c2a093bdf1f951"
PEFT = "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"
EMBEDDINGS = "cad211983f36ce458e9b3360f3e11b29fc54cbd8"
RENAMED = (("DistributedType.TPU", "DistributedType.XLA"),)
"""The name that Accelerate has for it since 1.0."""
DIGITS = (("../data/MNIST/raw", "mnist"),)

SCRIPTS = (
    Script(
        "TRL",
        "trl",
        "1.16.0",
        "trl/scripts/sft.py",
        f"{TRL} --dataset_name texts",
        (*TEXT_MODEL, ("texts", "texts")),
    ),
    Script(
        "TRL",
        "trl",
        "1.16.0",
        "trl/scripts/dpo.py",
        f"{TRL} --dataset_name preferences",
        (*TEXT_MODEL, ("preferences", "preferences")),
    ),
    Script(
        "TRL",
        "trl",
        "1.16.0",
        "trl/scripts/reward.py",
        f"{TRL} --dataset_name preferences",
        (*TEXT_MODEL, ("preferences", "preferences")),
    ),
    Script(
        "TRL",
        "trl",
        "1.16.0",
        "trl/scripts/kto.py",
        f"{TRL} --dataset_name completions",
        (*TEXT_MODEL, ("completions", "labelled_completions")),
    ),
    Script(
        "TRL",
        "trl",
        "1.16.0",
        "trl/scripts/grpo.py",
        f"{TRL} --dataset_name prompts --num_generations 2 --max_completion_length 6 --reward_funcs rewards.count_words",
        (*TEXT_MODEL, ("prompts", "prompts"), ("rewards.py", "rewards")),
    ),
    Script(
        "Transformers",
        "macorisd/transformers-qwen3",
        TRANSFORMERS,
        "examples/pytorch/language-modeling/run_clm.py",
        f"{TRAINER} --model_name_or_path llama --train_file words.txt --do_train --block_size 32",
        (*TEXT_MODEL, ("words.txt", "text_file")),
        packages=("evaluate==0.4.6",),
    ),
    Script(
        "Transformers",
        "macorisd/transformers-qwen3",
        TRANSFORMERS,
        "examples/pytorch/language-modeling/run_clm_no_trainer.py",
        "--model_name_or_path llama --train_file words.txt --validation_file words.txt --block_size 32 --max_train_steps 4 "
        "--per_device_train_batch_size 2 --per_device_eval_batch_size 8 --output_dir out --seed 0",
        (*TEXT_MODEL, ("words.txt", "text_file")),
        edits=RENAMED,
    ),
    Script(
        "Transformers",
        "macorisd/transformers-qwen3",
        TRANSFORMERS,
        "examples/pytorch/language-modeling/run_mlm_no_trainer.py",
        "--model_name_or_path bert --train_file words.txt --validation_file words.txt --max_seq_length 32 --max_train_steps 4 "
        "--per_device_train_batch_size 2 --per_device_eval_batch_size 8 --output_dir out --seed 0",
        (("bert", "masking_bert"), ("words.txt", "text_file")),
        edits=RENAMED,
    ),
    Script(
        "Diffusers",
        "huggingface/diffusers",
        DIFFUSERS,
        "examples/unconditional_image_generation/train_unconditional.py",
        "--model_config_name_or_path unet --train_data_dir images --resolution 16 --train_batch_size 4 --num_epochs 2 "
        "--ddpm_num_steps 20 --ddpm_num_inference_steps 2 --save_images_epochs 99 --save_model_epochs 99 --output_dir out",
        (("unet", "unet"), ("images", "images")),
        packages=VISION,
    ),
    Script(
        "Diffusers",
        "huggingface/diffusers",
        DIFFUSERS,
        "examples/text_to_image/train_text_to_image_lora.py",
        "--pretrained_model_name_or_path pipeline --train_data_dir images --resolution 16 --train_batch_size 2 "
        "--max_train_steps 4 --seed 0 --rank 2 --output_dir out",
        (("pipeline", "stable_diffusion"), ("images", "images")),
        packages=VISION,
    ),
    Script(
        "Diffusers",
        "huggingface/diffusers",
        DIFFUSERS,
        "examples/dreambooth/train_dreambooth.py",
        "--pretrained_model_name_or_path pipeline --instance_data_dir photos --instance_prompt w1 --resolution 16 "
        "--train_batch_size 2 --max_train_steps 4 --seed 0 --output_dir out",
        (("pipeline", "stable_diffusion"), ("photos", "photos")),
        packages=VISION,
    ),
    Script(
        "PEFT",
        "huggingface/peft",
        PEFT,
        "examples/olora_finetuning/olora_finetuning.py",
        "--base_model llama --data_path instructions --batch_size 4 --num_epochs 1 --dtype float32 --seed 0 --lora_r 2 "
        "--device_map cpu",
        (*TEXT_MODEL, ("instructions", "instructions")),
    ),
    Script(
        "PEFT",
        "huggingface/peft",
        PEFT,
        "examples/miss_finetuning/miss_finetuning.py",
        f"{TRAINER} --bf16 False --gradient_checkpointing False --base_model_name_or_path llama --bits fp32 --miss_r 2 "
        "--data_path instructions --dataset_split train --dataset_field instruction output",
        (*TEXT_MODEL, ("instructions", "instructions")),
    ),
    Script(
        "sentence-transformers",
        "huggingface/sentence-transformers",
        EMBEDDINGS,
        "examples/sentence_transformer/training/sts/training_stsbenchmark.py",
        "",
        (("distilbert/distilbert-base-uncased", "bert"), ("sentence-transformers/stsb", "sentence_pairs")),
        edits=(("fp16=True", "fp16=False"),),
    ),
    Script(
        "sentence-transformers",
        "huggingface/sentence-transformers",
        EMBEDDINGS,
        "examples/cross_encoder/training/sts/training_stsbenchmark.py",
        "",
        (("distilbert/distilroberta-base", "bert"), ("sentence-transformers/stsb", "sentence_pairs")),
        edits=(("bf16=True", "bf16=False"), ("train_batch_size = 64", "train_batch_size = 8")),
    ),
    Script(
        "timm",
        "huggingface/pytorch-image-models",
        "aa4b5850c1543fa488abf260f18390eda46cf85d",
        "train.py",
        "--data-dir classes --device cpu --model resnet10t --num-classes 2 --img-size 32 -b 4 --epochs 1 --workers 1 "
        "--warmup-epochs 0 --output out",
        (("classes", "image_classes"),),
        files=("timm",),
        edits=(("device_ids=[device]", "device_ids=None"),),
        packages=VISION,
    ),
    Script(
        "lucidrains",
        "lucidrains/x-transformers",
        "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
        "train_copy.py",
        is_raw=True,
        files=("x_transformers",),
        edits=(("NUM_BATCHES = int(1e5)", "NUM_BATCHES = 5"), ("BATCH_SIZE = 32", "BATCH_SIZE = 4")),
        packages=(
            "einops==0.8.2",
            "loguru==0.7.3",
            "torch-einops-utils==0.2.0",
            "einx==0.4.3",
            "frozendict==2.5.1",
        ),
    ),
    Script(
        "lucidrains",
        "lucidrains/minGRU-pytorch",
        "38b26e119a2e85e70ea53825dc09b91b021afa06",
        "train.py",
        data=(("data/enwik8.gz", "enwik8"),),
        is_raw=True,
        files=("minGRU_pytorch",),
        edits=(
            ("NUM_BATCHES = int(1e5)", "NUM_BATCHES = 3"),
            ("SEQ_LEN = 512", "SEQ_LEN = 32"),
            ("GENERATE_LENGTH = 512", "GENERATE_LENGTH = 40"),
            ("PRIME_LENGTH = 128", "PRIME_LENGTH = 16"),
            ("dim = 512", "dim = 32"),
            (".cuda()", ""),
            # As the finding of `accel migrate` says.
            ("train_loader = cycle(train_loader)", "train_batches = cycle(train_loader)"),
            ("val_loader = cycle(val_loader)", "val_batches = cycle(val_loader)"),
            ("next(train_loader)", "next(train_batches)"),
            ("next(val_loader)", "next(val_batches)"),
        ),
        packages=("einops==0.8.2",),
    ),
    Script(
        "pytorch/examples",
        "pytorch/examples",
        EXAMPLES,
        "mnist/main.py",
        "--epochs 1 --batch-size 32",
        DIGITS,
        is_raw=True,
        packages=VISION,
    ),
    Script(
        "pytorch/examples",
        "pytorch/examples",
        EXAMPLES,
        "vae/main.py",
        "--epochs 1 --batch-size 32",
        (*DIGITS, ("results", "empty_folder")),
        is_raw=True,
        packages=VISION,
    ),
    Script(
        "pytorch/examples",
        "pytorch/examples",
        EXAMPLES,
        "mnist_rnn/main.py",
        "--epochs 1 --batch-size 32",
        DIGITS,
        is_raw=True,
        packages=VISION,
    ),
    Script(
        "pytorch/examples",
        "pytorch/examples",
        EXAMPLES,
        "imagenet/main.py",
        "--dummy --arch squeezenet1_1 --batch-size 4 --workers 0 --epochs 1 --seed 0",
        is_raw=True,
        packages=VISION,
        stop=4,
    ),
)
"""The scripts, in the order of the table."""


class FailedError(Exception):
    """A run of a script failed; the text is its last error."""


# Running one script ------------------------------------------------------------------------


class Bench:
    """Folders that the runs share: packages, data and the states of libraries."""

    def __init__(self, options: Options):
        self.folder, self.clones = options.folder, options.scripts
        self.packages = options.folder / "packages"
        self.installed: set[str] = set()
        self.variables = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HOME": str(options.folder / "huggingface"),
            "ACCEL_HOME": str(options.folder / "accel"),
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "WANDB_MODE": "disabled",
            "PYTHONHASHSEED": "0",
        }

    def find_source(self, script: Script) -> str | None:
        """Return why the source of a script is missing, or None."""
        if script.is_installed:
            try:
                version = importlib.metadata.version(script.source)
            except importlib.metadata.PackageNotFoundError:
                return f"{script.source} is not installed"
            return None if version == script.pin else f"{script.source} {version} is installed"
        if self.clones is None or not (self.clones / script.source).exists():
            return f"no clone of {script.source} was given"
        return None

    def install(self, packages: Sequence[str]) -> None:
        """Install packages beside the environment."""
        for package in set(packages) - self.installed:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--target", str(self.packages), package]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise FailedError(f"{package} cannot be installed: {find_error(done.stderr)}")
            self.installed.add(package)

    def lay_out(self, script: Script, name: str) -> tuple[Path, Path]:
        """Create the working folder of a run with the script and its data; return the folder and the script."""
        root = self.folder / "runs" / name
        root.mkdir(parents=True)
        if script.is_installed:
            cwd = root
            path = importlib.metadata.distribution(script.source).locate_file(script.path)
            file = Path(shutil.copy(str(path), root))
        else:
            assert self.clones is not None
            extract(self.clones / script.source, script, root)
            file = root / script.path
            cwd = file.parent
        text = file.read_text(encoding="utf-8")
        for old, new in script.edits:
            if old not in text:
                raise FailedError(f"{old!r} is not in the script")
            text = text.replace(old, new)
        file.write_text(seed_script(text), encoding="utf-8")
        for path, kind in script.data:
            (link := cwd / path).parent.mkdir(parents=True, exist_ok=True)
            if kind == "empty_folder":
                link.mkdir(exist_ok=True)
            else:
                link.symlink_to(self.write_data(kind))
        return cwd, file

    def write_data(self, kind: str) -> Path:
        """Write data once; return its path."""
        from support.runs import script_data

        path = self.folder / "data" / kind
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            getattr(script_data, kind)(path)
        return path

    def execute(self, command: Sequence[str | Path], cwd: Path, script: Script) -> list[Steps]:
        """Run a command with the observer; return the steps of each rank."""
        observed = cwd / "observed"
        shutil.rmtree(observed, ignore_errors=True)
        observed.mkdir()
        path = [OBSERVER, *([self.packages] if script.packages else []), ROOT]
        variables = self.variables | {"OBSERVE": str(observed), "PYTHONPATH": os.pathsep.join(map(str, path))}
        if script.stop:
            variables["OBSERVE_STEPS"] = str(script.stop)
        options = {"cwd": cwd, "env": {**os.environ, **variables}}
        errors = cwd / "stderr.txt"
        with (
            errors.open("w") as file,
            subprocess.Popen(
                [*map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                **options,
            ) as process,
        ):
            try:
                code = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                process.terminate()  # both launchers end their ranks then
                process.wait()
                raise FailedError(f"no exit within {TIMEOUT_S} s") from error
        if code:
            raise FailedError(f"exit code {code}: {find_error(errors.read_text(errors='replace'))}")
        files = sorted(observed.glob("rank*.jsonl"))
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    def launch(self, processes: int, file: Path, cwd: Path, script: Script) -> list[Steps]:
        """Run a script by `accel launch`."""
        launch = [
            sys.executable,
            "-m",
            "accel_cli",
            "launch",
            "--no-profile",
            "-q",
            "--cpu",
            "--nproc-per-node",
            str(processes),
        ]
        return self.execute([*launch, file, *shlex.split(script.arguments)], cwd, script)


def extract(clone: Path, script: Script, target: Path) -> None:
    """Write the folder of a script at its commit."""
    parent = str(Path(script.path).parent)
    wanted = [script.path if parent == "." else parent, *script.files]
    listed = subprocess.run(
        ["git", "-C", str(clone), "ls-tree", "-r", "--name-only", script.pin, "--", *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    # A clone without its largest files lacks data, not scripts.
    names = [name for name in listed.stdout.splitlines() if name.endswith((".py", ".json", ".yaml", ".toml"))]
    done = subprocess.run(
        ["git", "-C", str(clone), "archive", script.pin, *names], capture_output=True, check=False
    )
    if not names or done.returncode:
        raise FailedError(
            f"{script.path} of {script.pin[:12]} is not in the clone: {find_error(done.stderr.decode())}"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(target, filter="data")


def seed_script(text: str) -> str:
    """Return a script that seeds all generators first: processes of torch begin with random seeds."""
    seeds = "import random; random.seed(0)\nimport numpy; numpy.random.seed(0)\nimport torch; torch.manual_seed(0)\n"
    imports = (
        node.lineno - 1
        for node in ast.parse(text).body
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__"
    )
    lines = text.splitlines(keepends=True)
    lines.insert(next(imports, 0), seeds)
    return "".join(lines)


def find_error(text: str) -> str:
    """Return the line of an output that names the error."""
    lines = [line.strip(" │") for line in text.splitlines() if line.strip(" │")]
    errors = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: ?)?([\w.]+(Error|Exception|Interrupt)\b|error: )", line)
    ]
    named = [line for line in errors if "ChildFailedError" not in line]
    return (named or errors or lines or ["no output"])[-1].partition(". ")[0][:300]


def run_script(script: Script, bench: Bench) -> dict[str, Any]:
    """Run a script; return its row of the table."""
    row: dict[str, Any] = {**describe(script), "passed": False, "skipped": False, "why": "", "seconds": 0.0}
    if missing := bench.find_source(script):
        return row | {"skipped": True, "why": missing}
    start = time.monotonic()
    name = re.sub(r"\W+", "-", f"{script.source}-{script.path}")
    try:
        bench.install(script.packages)
        row |= (compare_raw if script.is_raw else compare_unchanged)(script, bench, name)
        row["passed"] = True
    except FailedError as error:
        row["why"] = str(error)
    return row | {"seconds": round(time.monotonic() - start, 1)}


def describe(script: Script) -> dict[str, Any]:
    """Return the fields of a script that the record has."""
    fields = dataclasses.asdict(script)
    return {
        key: fields[key]
        for key in ("library", "source", "pin", "path", "arguments", "is_raw", "edits", "stop")
    }


def compare_unchanged(script: Script, bench: Bench, name: str) -> dict[str, Any]:
    """Run a script as it is, by torchrun and by `accel launch`."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={PROCESSES}",
    ]
    expected: list[Steps] = []
    for attempt in (
        1,
        2,
    ):  # gloo's threads can stop a process of torchrun at its exit: docs/design/leaving-gloo.md
        cwd, file = bench.lay_out(script, f"{name}/torchrun-{attempt}")
        try:
            expected = bench.execute([*torchrun, file, *shlex.split(script.arguments)], cwd, script)
            break
        except FailedError as error:
            if attempt == 2:
                raise FailedError(f"torchrun: {error}") from error
    cwd, file = bench.lay_out(script, f"{name}/accel")
    return compare_as_is(bench.launch(PROCESSES, file, cwd, script), expected)


def compare_raw(script: Script, bench: Bench, name: str) -> dict[str, Any]:
    """Convert a script; run it before that by Python, and then by `accel launch` on one process and on two."""
    cwd, file = bench.lay_out(script, f"{name}/python")
    try:
        (expected,) = bench.execute([sys.executable, file, *shlex.split(script.arguments)], cwd, script)
    except FailedError as error:
        raise FailedError(f"python: {error}") from error
    results = []
    for processes in (1, PROCESSES):
        cwd, file = bench.lay_out(script, f"{name}/accel-{processes}")
        command = [sys.executable, "-m", "accel_cli", "migrate", "--write", file.name]
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, **bench.variables, "PYTHONPATH": str(ROOT)},
        )
        if "wrote" not in done.stdout + done.stderr:
            raise FailedError(f"accel migrate: {find_error(done.stderr)}")
        results.append(bench.launch(processes, file, cwd, script))
    return compare_migrated(results[0], results[1], expected)


# Comparisons -------------------------------------------------------------------------------


def compare_as_is(ranks: Sequence[Steps], expected: Sequence[Steps]) -> dict[str, Any]:
    """Compare two runs of the same script, each on two processes; return the steps and the difference.

    Raises:
        FailedError: A rank took no step, a loss is not finite, or steps, losses or weights differ.
    """
    check_steps(ranks)
    differences = [
        compute_difference(steps, others, f"rank {rank}")
        for rank, (steps, others) in enumerate(zip(ranks, expected, strict=True))
    ]
    if max(differences) > TOLERANCE:
        raise FailedError(f"losses or weights differ from torchrun's by {max(differences):.1e}")
    return {"steps": [len(steps) for steps in ranks], "difference": max(differences)}


def compare_migrated(one: Sequence[Steps], ranks: Sequence[Steps], expected: Steps) -> dict[str, Any]:
    """Compare a converted script on one process with the script before, and the ranks of two processes with each other.

    Raises:
        FailedError: One process differs from the script before, or ranks have other weights than each other.
    """
    check_steps(ranks)
    difference = compute_difference(one[0], expected, "one process") if one else math.inf
    if difference > TOLERANCE:
        raise FailedError(
            f"on one process, losses or weights differ from those before the conversion by {difference:.1e}"
        )
    first, *others = ([step["weights"] for step in steps] for steps in ranks)
    if any(weights != first for weights in others):
        raise FailedError("the ranks have different weights")
    return {"steps": [len(steps) for steps in ranks], "difference": difference}


def check_steps(ranks: Sequence[Steps]) -> None:
    """Check that every rank took steps with finite losses."""
    if len(ranks) != PROCESSES:
        raise FailedError(f"{len(ranks)} of {PROCESSES} ranks took a step")
    for rank, steps in enumerate(ranks):
        losses = [loss for step in steps for loss in step["losses"]]
        if not losses or not all(map(math.isfinite, [*losses, *(step["weights"] for step in steps)])):
            raise FailedError(f"rank {rank} has no finite loss")


def compute_difference(steps: Steps, expected: Steps, name: str) -> float:
    """Return the largest relative difference of losses and weights."""
    if len(steps) != len(expected):
        raise FailedError(f"{name}: {len(steps)} steps instead of {len(expected)}")
    difference = 0.0
    for step, other in zip(steps, expected, strict=True):
        if len(step["losses"]) != len(other["losses"]):
            raise FailedError(
                f"{name}: a step has {len(step['losses'])} losses instead of {len(other['losses'])}"
            )
        for a, b in [*zip(step["losses"], other["losses"], strict=True), (step["weights"], other["weights"])]:
            difference = max(difference, abs(a - b) / max(abs(b), 1e-12) if a != b else 0.0)
    return difference


# The part ----------------------------------------------------------------------------------


def run(options: Options) -> dict[str, Any]:
    """Run all scripts."""
    bench, rows = Bench(options), []
    for script in SCRIPTS:
        rows.append(row := run_script(script, bench))
        state = "skipped" if row["skipped"] else "passed" if row["passed"] else "FAILED"
        print(
            f"{state:8}{row['seconds']:6.1f} s  {script.source} {script.path} {row['why']}",
            file=sys.stderr,
            flush=True,
        )
    return {"scripts": rows, "processes": PROCESSES}


def render(results: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    rows = results["scripts"]
    run_rows = [row for row in rows if not row["skipped"]]
    passed = sum(row["passed"] for row in run_rows)
    table = [
        "| Script | Version | Run | Steps of each rank | Difference | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in run_rows:
        pin = row["pin"] if "/" not in row["source"] else f"`{row['pin'][:12]}`"
        what = "converted by `accel migrate`" if row["is_raw"] else "as it is"
        if row["edits"]:
            what = what.replace("as it is", "not converted")
            what += f", {len(row['edits'])} edit{'s' * (len(row['edits']) > 1)}"
        if row["stop"]:
            what += f", stopped after {row['stop']} steps"
        steps = ", ".join(map(str, dict.fromkeys(row.get("steps", []))))
        difference = f"{row['difference']:.0e}" if row.get("difference") else "0" if row["passed"] else ""
        table.append(
            f"| {_name(row)} | {pin} | {what} | {steps} | {difference} | {'passed' if row['passed'] else '**failed**'} |"
        )
    method = (
        f"{passed} of {len(run_rows)} public scripts train under `accel launch --cpu --nproc-per-node {results['processes']}`, with tiny "
        "models and local data; lines at their start seed the generators. A script that is not converted must take the same steps as under "
        f"`torchrun`, with equal losses and weights on each rank (relative difference at most {TOLERANCE:g}); a converted one must equal the "
        "script before the conversion on one process, and have finite losses and equal weights on both ranks of two."
    )
    parts = [method, re.sub(r"\| +(?=\|)", "| ", "\n".join(table))]
    if failures := [row for row in run_rows if not row["passed"]]:
        reasons = "\n".join(f"- {_name(row)}: {row['why']}" for row in failures)
        parts.append(f"Failed, and why:\n\n{reasons}")
    if skipped := [row for row in rows if row["skipped"]]:
        reasons = "\n".join(f"- {_name(row)}: {row['why']}" for row in skipped)
        parts.append(f"Not run:\n\n{reasons}")
    parts.append(
        "Scripts of repositories are read from clones: `make proof PARTS=scripts SCRIPTS=FOLDER`, with `FOLDER/OWNER/NAME`. "
        "The arguments of each script are in [the record](proof/scripts.json), with the edits, which make a script small or let it run on "
        "the CPU or with these versions at all, also by torchrun or Python."
    )
    return "\n\n".join(parts)


def _name(row: Mapping[str, Any]) -> str:
    """Return the repository and path of a script, or its package and path."""
    return (
        f"`{row['source']}/{row['path']}`" if "/" in row["source"] else f"`{row['path']}` of {row['source']}"
    )


def headline(results: Mapping[str, Any]) -> tuple[str, str]:
    """Return how many scripts train."""
    rows = [row for row in results["scripts"] if not row["skipped"]]
    return (
        f"{sum(row['passed'] for row in rows)} of {len(rows)}",
        "pinned public scripts train under accel launch",
    )
