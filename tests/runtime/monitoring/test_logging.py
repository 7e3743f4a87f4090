"""Log records of several processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from support.cases.log_messages import collect_messages

from accel_runtime import Accelerator
from accel_runtime.environment.settings import SettingsError
from accel_runtime.monitoring.logging import get_logger


@pytest.fixture(autouse=True)
def _levels_as_they_were():
    before = logging.root.level
    yield
    logging.root.setLevel(before)
    logging.getLogger("a test").setLevel(logging.NOTSET)


def collect_records(several, function, *args):
    """Call a function with a logger on each rank, and return the messages of each."""

    def run(function, args):
        import logging

        from accel_runtime import Accelerator
        from accel_runtime.monitoring.logging import get_logger

        Accelerator()
        logger = logging.getLogger("ranks")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        with collect_messages("ranks") as messages:
            function(get_logger("ranks"), *args)
        return messages

    return several.run(run, function, args)


def test_only_the_first_process_logs_with_its_rank(several):
    actual = collect_records(several, lambda logger: logger.info("at %d", 3))
    assert actual == [["[RANK 0] at 3"]] + [[]] * (several.size - 1)


def test_every_process_logs_with_main_process_only_false(several):
    actual = collect_records(several, lambda logger: logger.warning("at %d", 3, main_process_only=False))
    assert actual == [[f"[RANK {rank}] at 3"] for rank in range(several.size)]


def test_in_order_logs_the_ranks_one_after_another(several, tmp_path):
    def speak(logger, folder):
        import time

        from accel_runtime import Topology

        class File(logging.Handler):
            def emit(self, record):
                with (folder / "all.log").open("a") as file:
                    file.write(record.getMessage() + "\n")

        file = File()
        logger.logger.addHandler(file)
        for line in range(3):
            time.sleep(
                0.02 * (3 - Topology.from_env(os.environ).rank)
            )  # without an order the last would be the first
            logger.info("line %d", line, in_order=True)
        logger.logger.removeHandler(file)

    collect_records(several, speak, tmp_path)
    expected = [f"[RANK {rank}] line {line}" for line in range(3) for rank in range(several.size)]
    assert (tmp_path / "all.log").read_text().splitlines() == expected


def test_in_order_waits_for_all_ranks_also_if_their_levels_differ(several):
    def speak(logger):
        from accel_runtime import Topology

        logger.setLevel(logging.INFO if Topology.from_env(os.environ).rank == 0 else logging.ERROR)
        logger.info("here", in_order=True)

    assert collect_records(several, speak) == [["[RANK 0] here"]] + [[]] * (several.size - 1)


def test_a_logger_works_before_an_accelerator_and_without_torch():
    code = (
        "import sys; from accel_runtime import get_logger\n"
        "logger = get_logger('x', 'info'); logger.info('hello'); logger.info('in turn', in_order=True)\n"
        "print('torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"


def test_in_order_is_rejected_before_processes_are_connected(monkeypatch):
    variables = {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "x",
        "MASTER_PORT": 1,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RuntimeError, match="Create the Accelerator before this call"):
        get_logger("a test").warning("x", in_order=True)


def test_warning_once_logs_each_message_with_its_arguments_once(caplog):
    logger = get_logger("a test")
    for _ in range(3):
        logger.warning_once("%s is slow", "a")
        logger.warning_once("%s is slow", ["b"])
    assert [record.message for record in caplog.records] == ["[RANK 0] a is slow", "[RANK 0] ['b'] is slow"]


def test_a_record_has_the_location_of_its_caller(caplog):
    logger = get_logger("a test", "info")
    logger.info("plain")
    logger.info("in turn", in_order=True)
    logger.warning_once("once")
    logger.log(logging.INFO, "log")
    assert {(record.filename, record.funcName) for record in caplog.records} == {
        ("test_logging.py", "test_a_record_has_the_location_of_its_caller")
    }
    assert len(caplog.records) == 4


def test_stacklevel_counts_frames_as_in_accelerate(caplog):
    logger = get_logger("a test", "info")

    def helper():
        for level in (1, 2, 3):
            logger.info("plain", stacklevel=level)
            logger.warning_once("once %d", level, stacklevel=level)
        logger.info("in turn", in_order=True, stacklevel=3)

    helper()
    name = "test_stacklevel_counts_frames_as_in_accelerate"
    assert [record.funcName for record in caplog.records] == ["helper"] * 4 + [name] * 3


def test_a_message_below_the_level_is_not_formatted(caplog):
    class Costly:
        def __str__(self):
            raise AssertionError("the message must not be formatted")

    get_logger("a test", "warning").info(Costly())
    assert not caplog.records


@pytest.mark.parametrize("level", ["debug", "DEBUG"])
def test_the_argument_sets_the_level(level):
    assert get_logger("a test", level).logger.level == logging.DEBUG
    assert logging.root.level == logging.DEBUG


def test_the_variable_sets_the_level_if_no_argument_does(monkeypatch):
    before = logging.root.level
    assert get_logger("a test").logger.level == logging.NOTSET
    assert logging.root.level == before
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "error")
    assert get_logger("a test").logger.level == logging.ERROR
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "loud")
    with pytest.raises(SettingsError, match="Invalid ACCEL_LOG_LEVEL 'loud': expected one of auto, debug"):
        get_logger("a test")


def test_an_unknown_level_is_rejected():
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("a test", "loud")


def test_the_profile_sets_the_level(accel, script):
    script("from accel_runtime import get_logger; print(get_logger('x').getEffectiveLevel())")
    process = accel("launch", "--cpu", "-q", "--set", "log_level=debug", "train.py")
    assert process.stdout == "10\n", process.stderr


def test_an_accelerator_does_not_change_the_level():
    before = logging.root.level
    Accelerator()
    assert logging.root.level == before
