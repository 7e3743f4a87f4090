"""The command line: profiles, the wizard, and launchers that turn a profile into processes; `launch` starts it from Python."""

from accel_cli import start_time  # noqa: F401 - first, since it notes the time

TYPE_CHECKING = False  # without the module typing, which not every process needs
if TYPE_CHECKING:
    from accel_cli.errors import UsageError as UsageError
    from accel_cli.python_launch import LaunchError as LaunchError
    from accel_cli.python_launch import LaunchOptions as LaunchOptions
    from accel_cli.python_launch import LaunchResult as LaunchResult
    from accel_cli.python_launch import launch as launch

_LAUNCH_NAMES = ("LaunchError", "LaunchOptions", "LaunchResult", "UsageError", "launch")
"""The names of `accel_cli.python_launch`, which is imported at their first use."""


def __getattr__(name: str) -> object:
    if name in _LAUNCH_NAMES:
        import importlib  # noqa: PLC0415 - not for a rank

        importlib.import_module("accel_runtime")  # refuses Windows before a module of POSIX is missing
        return getattr(importlib.import_module("accel_cli.python_launch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAUNCH_NAMES})
