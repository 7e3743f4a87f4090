"""A real compiler that fails: one message with its last lines, and the next launch tries again."""

from __future__ import annotations

import json
import os
import sys

import pytest

from accel_cli.errors import AccelError
from accel_cli.runner.operators import compile_operators


@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted_with_the_operator(tmp_path):
    config = tmp_path / "ds.json"
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config.write_text(json.dumps({"zero_optimization": offload, "optimizer": {"type": "AdamW"}}))
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\n'
        "echo 'adam.cpp:3:1: error: this compiler is broken' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    variables = {
        "ACCEL_DEEPSPEED_STAGE": "auto",
        "ACCEL_DEEPSPEED_CONFIG_FILE": str(config),
        "ACCEL_DEVICE": "cpu",
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    for _ in range(2):
        with pytest.raises(AccelError, match="operator CPUAdam: the compiler failed") as raised:
            compile_operators([sys.executable], environ | variables)
        assert str(raised.value).endswith("adam.cpp:3:1: error: this compiler is broken")
