"""The entry point of `accel` and of `python -m accel_cli`."""

import os
import sys

from accel_cli import early_signals

__all__ = ["main"]


def main() -> None:
    """Run `accel`; a signal while its modules are being imported ends it without a traceback."""
    if sys.platform == "win32":
        try:
            import accel_runtime.environment  # noqa: F401, PLC0415 - the package refuses the platform
        except ImportError as error:
            print(f"accel: error: {error}", file=sys.stderr)  # noqa: T201 - the console is not imported yet
            sys.exit(2)
    early_signals.exit_on_signals()
    from accel_cli.main import main as run  # noqa: PLC0415 - what a signal may end

    early_signals.raise_on_ctrl_c()
    run()


if __name__ == "__main__":
    # `python -m` puts the working folder first, whose `yaml.py` would be imported instead of the package. The folder stays
    # if it is the source tree of accel.
    source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - imports nothing
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] != source:
        del sys.path[0]
    main()
