"""Operators that deepspeed compiles with a C++ compiler and ninja: which ones a configuration needs, and their compilation.

deepspeed compiles an operator in the process that first uses it, and torch guards that with a file that a killed process
leaves behind, for which every later one waits. Here an operator is compiled once on a node, under a lock that ends with its
process, into a folder of its own for each combination of versions and processors. The module is run by `accel launch` before
it starts ranks (`python -m accel_runtime.extensions.deepspeed.compiled_operators`), and deepspeed is imported only if something is to be compiled.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accel_runtime.environment.installation import format_install
from accel_runtime.environment.layouts import SettingsError
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.text import print_note
from accel_runtime.extensions.deepspeed.settings import DeepSpeed, DeepSpeedConfig, read_deepspeed_config

__all__ = [
    "OperatorError",
    "build_operators",
    "check_installation",
    "list_operators",
    "prepare_environment",
    "provide_local_rank",
]

_EXTENSIONS = "TORCH_EXTENSIONS_DIR"
_OLDEST = (0, 19, 8)
_NOTE_S, _POLL_S = 5.0, 0.2
"""Seconds after which a waiting process says so, and between two attempts to lock."""
_LOADING_S = 60.0
"""Age of a lock of torch at which no process can be loading an operator that is compiled."""
_SHOWN = 12
"""Lines of the compiler's output in a message."""


class OperatorError(RuntimeError):
    """deepspeed cannot be used here, or an operator cannot be compiled; the message has the cure."""


def prepare_environment(
    device_type: str, environ: MutableMapping[str, str] = os.environ, packages: Sequence[str] = ()
) -> Path:
    """Set what deepspeed and torch read when an operator is compiled or loaded; return the folder of operators.

    Args:
        device_type: Type of the device, as torch names it.
        environ: The environment of this process; what the user has set stays.
        packages: Versions that are part of the name of the folder, instead of those that are installed.
    """
    environ.setdefault("DS_ACCELERATOR", device_type)
    # The executables of an environment that is not activated are not in PATH.
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=environ.get("PATH")) is None and Path(scripts, "ninja").is_file():
        environ["PATH"] = os.pathsep.join(part for part in (environ.get("PATH"), scripts) if part)
    if _EXTENSIONS not in environ:
        environ[_EXTENSIONS] = os.fspath(_find_folder(device_type, packages))
    return Path(environ[_EXTENSIONS])


@contextmanager
def provide_local_rank(environ: MutableMapping[str, str] = os.environ) -> Iterator[bool]:
    """Set the variable without which deepspeed builds no engine inside the context; yield True if it was missing."""
    if "LOCAL_RANK" in environ:
        yield False
        return
    environ["LOCAL_RANK"] = "0"
    try:
        yield True
    finally:
        environ.pop("LOCAL_RANK", None)


def _find_folder(device_type: str, packages: Sequence[str]) -> Path:
    """Return the folder for operators of these versions and processors, below the cache of the user."""
    import platformdirs  # noqa: PLC0415 - for those without TORCH_EXTENSIONS_DIR

    versions = packages or [f"{name}-{_get_version(name)}" for name in ("torch", "deepspeed")]
    python = f"python-{platform.python_version()}"
    processors = f"{platform.machine()}-{_hash_cpu()}"
    if device_type == "cuda":
        import torch  # noqa: PLC0415 - the ranks have imported it

        capability = "".join(map(str, torch.cuda.get_device_capability()))
        processors += f"-cuda-{torch.version.cuda}-sm{capability}"
    return Path(platformdirs.user_cache_path("accel"), "deepspeed", "-".join([*versions, python, processors]))


def _get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _hash_cpu() -> str:
    """Return a short name of the instruction set, for which operators are compiled: nodes may share the folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next(
        (line for line in lines if line.startswith(("flags", "Features"))), lines[0] if lines else ""
    )
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


def check_installation() -> None:
    """Raise OperatorError if deepspeed is not installed, or too old."""
    installed = _get_version("deepspeed")
    if installed == "none":
        raise OperatorError(
            f"deepspeed is not installed in the environment of {sys.executable}. Install it: "
            f"{format_install('deepspeed', 'ninja', extra='deepspeed')}"
        )
    numbers = tuple(int(part) for part in installed.split(".")[:3] if part.isdigit())
    if numbers < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise OperatorError(
            f"deepspeed {installed} is installed, and accel needs {oldest} or newer. Upgrade it: "
            f"{format_install('deepspeed', extra='deepspeed', options='--upgrade')}"
        )


def list_operators(config: DeepSpeedConfig, device_type: str) -> tuple[str, ...]:
    """Return the builders of the operators that a configuration uses, as deepspeed names them.

    Optimizers are torch's, those that the JSON file describes too, so that only offloading to a disk needs one. A script that
    creates an optimizer of deepspeed compiles it in its ranks.
    """
    devices = {
        config.get(f"zero_optimization.{name}.device") for name in ("offload_optimizer", "offload_param")
    }
    return ("AsyncIOBuilder",) if "nvme" in devices and device_type in {"cpu", "cuda"} else ()


def build_operators(names: Sequence[str], folder: Path, note: Callable[[str], None] = print_note) -> None:
    """Compile operators that are not in the folder yet; other processes of this node wait, and get the same error.

    Args:
        names: The names of their builders, as `list_operators` returns them.
        folder: The result of `prepare_environment`.
        note: Receives what is to be shown while this takes its time.

    Raises:
        OperatorError: One cannot be compiled; the message has the cure.
    """
    if all(_find_stamp(folder, name).exists() for name in names):
        # A process that loads what is compiled has torch's lock for a moment, and may be killed then.
        for lock in folder.glob("*/lock"):
            _remove_lock(lock, _LOADING_S, note)
        return
    began = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    with _lock_folder(folder, note):
        for name in names:
            stamp, failure = _find_stamp(folder, name), folder / f"{name}.error"
            if stamp.exists():
                continue
            if failure.exists() and failure.stat().st_mtime >= began:
                raise OperatorError(failure.read_text(encoding="utf-8"))
            try:
                _build(name, folder, note)
            except OperatorError as error:
                failure.write_text(str(error), encoding="utf-8")
                raise
            stamp.touch()
            failure.unlink(missing_ok=True)


def _find_stamp(folder: Path, name: str) -> Path:
    """Return the file that shows that an operator was compiled."""
    return folder / f"{name}.built"


@contextmanager
def _lock_folder(folder: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Wait for the other processes that compile into a folder; the lock ends with this process, however that ends."""
    path, began, is_noted = folder / "accel.lock", time.monotonic(), False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_noted and time.monotonic() - began > _NOTE_S:
                    note(f"waiting for another process that compiles DeepSpeed's operators in {folder}")
                    is_noted = True
                time.sleep(_POLL_S)
        yield


def _build(name: str, folder: Path, note: Callable[[str], None]) -> None:
    _require_tools()
    builder = _create_builder(name)
    # Who compiles holds the lock of the folder, so nobody does now.
    _remove_lock(folder / builder.name / "lock", 0, note)
    note("compiling DeepSpeed's operators (once, about half a minute)")
    try:
        builder.load(verbose=False)
    except Exception as error:
        raise _explain(name, builder, error) from error


def _remove_lock(lock: Path, age: float, note: Callable[[str], None]) -> None:
    """Remove the lock file of torch that a killed process has left, if it is older than `age` seconds."""
    try:
        is_stale = time.time() - lock.stat().st_mtime >= age
        if is_stale:
            lock.unlink()
            note(f"removed {lock}, which a process that was killed has left")
    except FileNotFoundError:
        pass


def _require_tools() -> None:
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        raise OperatorError(
            f"Cannot compile DeepSpeed's operators: the C++ compiler {compiler!r} was not found. Install g++, or set CXX to a compiler; "
            "or use an optimizer of torch, which needs none."
        )
    if shutil.which("ninja") is None:
        raise OperatorError(
            f"Cannot compile DeepSpeed's operators: ninja was not found. Install it: {format_install('ninja')}"
        )


def _create_builder(name: str) -> Any:
    check_installation()
    try:
        from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - after prepare_environment
    except Exception as error:
        raise OperatorError(
            f"Cannot import deepspeed: {error}. Reinstall it: "
            f"{format_install('deepspeed', extra='deepspeed', options='--force-reinstall')}"
        ) from error
    builder = get_accelerator().create_op_builder(name)
    if builder is None or builder.name == "deepspeed_not_implemented":
        raise OperatorError(
            f"deepspeed has no operator {name.removesuffix('Builder')} for {get_accelerator().device_name()}. Use an optimizer of torch."
        )
    return builder


def _explain(name: str, builder: Any, error: Exception) -> OperatorError:
    """Return the error for a compilation that failed."""
    operator, kind, text = name.removesuffix("Builder"), type(error).__name__, str(error)
    if kind == "MissingCUDAException" or "CUDA_HOME" in text:
        import torch  # noqa: PLC0415 - for errors only

        return OperatorError(
            f"Cannot compile DeepSpeed's operator {operator}: the CUDA toolkit was not found. Install the toolkit of CUDA {torch.version.cuda}, "
            "as torch was built with, and set CUDA_HOME; or use an optimizer of torch, which needs none."
        )
    if kind == "CUDAMismatchException":
        import torch  # noqa: PLC0415 - for errors only
        from deepspeed.ops.op_builder.builder import installed_cuda_version  # noqa: PLC0415

        found = ".".join(map(str, installed_cuda_version()))
        return OperatorError(
            f"Cannot compile DeepSpeed's operator {operator}: the CUDA toolkit is of version {found}, and torch was built with "
            f"{torch.version.cuda}. Install that toolkit and set CUDA_HOME, or use an optimizer of torch, which needs none."
        )
    if "not being compatible" in text:
        reason = builder.error_log or "it is not compatible with this machine"
        return OperatorError(
            f"Cannot compile DeepSpeed's operator {operator}: {reason}. Use an optimizer of torch."
        )
    lines = [line for line in text.splitlines() if line.strip()]
    reported = [line for line in lines if "error:" in line.lower()]
    shown = "\n".join(f"  {line}" for line in (reported or lines)[-_SHOWN:])
    return OperatorError(
        f"Cannot compile DeepSpeed's operator {operator}: the compiler failed. Correct what it reports, or use an optimizer of "
        f"torch, which needs none:\n{shown}"
    )


def main() -> int:
    """Compile what the settings of this environment need; return the exit code."""
    # deepspeed logs to standard output, which has the error alone.
    result = os.dup(1)
    os.dup2(2, 1)
    try:
        settings = Settings.from_env(os.environ)
        config = read_deepspeed_config(DeepSpeed.of(settings))
        check_installation()
        device = _choose_device(settings)
        if names := list_operators(config, device):
            build_operators(names, prepare_environment(device))
    except KeyboardInterrupt:
        return 130
    except (OperatorError, SettingsError) as error:
        os.write(result, str(error).encode())
        return 1
    return 0


def _choose_device(settings: Settings) -> str:
    if settings.device != "auto":
        return settings.device
    import torch  # noqa: PLC0415 - if the device is not set

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
