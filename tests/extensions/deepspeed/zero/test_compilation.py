"""A real compiler that fails, and a library that is missing: one message with the cure, and the next start tries again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.processes.waits import limit

from accel_cli.errors import AccelError
from accel_cli.extensions.deepspeed.build_operators import compile_operators

pytest.importorskip(
    "deepspeed.runtime", reason="deepspeed is in an environment of its own: make test-deepspeed"
)

COMPILE = """
from accel_runtime.extensions.deepspeed.compiled_operators import OperatorError, build_operators, prepare_environment
try:
    build_operators(["CPUAdamBuilder"], prepare_environment("cpu"))
except OperatorError as error:
    raise SystemExit(str(error))
"""


def build_environment(tmp_path, **variables):
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    return environ | {"ACCEL_DEVICE": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache"), **variables}


@pytest.mark.full
def test_a_compiler_that_fails_is_quoted_with_the_operator(tmp_path):
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\n'
        "echo 'adam.cpp:3:1: error: this compiler is broken' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    environ = build_environment(tmp_path, CXX=str(compiler))
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", COMPILE],
            env=environ,
            capture_output=True,
            text=True,
            timeout=limit(300),
            check=False,
        )
        assert result.returncode == 1
        assert "operator CPUAdam: the compiler failed" in result.stderr
        assert result.stderr.rstrip().endswith("adam.cpp:3:1: error: this compiler is broken")


@pytest.mark.full
def test_a_launch_that_offloads_to_nvme_without_libaio_ends_with_the_reason(tmp_path):
    environ = build_environment(
        tmp_path,
        ACCEL_DEEPSPEED_STAGE="3",
        ACCEL_DEEPSPEED_OFFLOAD_OPTIMIZER="nvme",
        ACCEL_DEEPSPEED_NVME_PATH=str(tmp_path),
        # Without the header of libaio.
        CFLAGS="-nostdinc",
    )
    with pytest.raises(AccelError, match="operator AsyncIO"):
        compile_operators([sys.executable], environ)
