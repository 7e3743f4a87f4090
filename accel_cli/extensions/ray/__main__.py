"""The entry point of the driver, `python -m accel_cli.extensions.ray`."""

import os
import sys

if __name__ == "__main__":
    # `python -m` and PYTHONPATH of Ray put the folder of the job first: no module is imported from it.
    folder = os.getcwd()  # noqa: PTH109 - imports nothing
    sys.path[:] = [path for path in sys.path if path not in {"", folder}]
    from accel_cli.extensions.ray.driver import main

    main()
