"""The entry point of `accel` and of `python -m accel_cli`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run `accel`; Ctrl-C while its modules are being imported ends it without a traceback."""
    try:
        from accel_cli.main import main as run  # noqa: PLC0415 - what may be interrupted
    except KeyboardInterrupt:
        sys.exit(128 + 2)
    run()


if __name__ == "__main__":
    main()
