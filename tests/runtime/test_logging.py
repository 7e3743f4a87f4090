"""Log records of several processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from log_messages import collect_messages

from accel_runtime import Accelerator
from accel_runtime.env import SettingsError
from accel_runtime.logging import get_logger


@pytest.fixture(autouse=True)
def _levels_as_they_were():
    before = logging.root.level
    yield
    logging.root.setLevel(before)
    logging.getLogger("a test").setLevel(logging.NOTSET)


def said(several, function, *args):
    """What each rank's handlers get when it calls a function with a logger."""

    def run(function, args):
        import logging

        from accel_runtime import Accelerator
        from accel_runtime.logging import get_logger

        Accelerator()
        logger = logging.getLogger("ranks")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        with collect_messages("ranks") as messages:
            function(get_logger("ranks"), *args)
        return messages

    return several.run(run, function, args)


def test_the_first_process_writes_and_says_who_it_is(several):
    got = said(several, lambda logger: logger.info("at %d", 3))
    assert got == [["[RANK 0] at 3"]] + [[]] * (several.size - 1)


def test_every_process_writes_if_it_is_told_to(several):
    got = said(several, lambda logger: logger.warning("at %d", 3, main_process_only=False))
    assert got == [[f"[RANK {rank}] at 3"] for rank in range(several.size)]


def test_in_order_they_write_one_after_the_other(several, tmp_path):
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

    said(several, speak, tmp_path)
    wanted = [f"[RANK {rank}] line {line}" for line in range(3) for rank in range(several.size)]
    assert (tmp_path / "all.log").read_text().splitlines() == wanted


def test_in_order_waits_for_all_also_where_levels_differ(several):
    def speak(logger):
        from accel_runtime import Topology

        logger.setLevel(logging.INFO if Topology.from_env(os.environ).rank == 0 else logging.ERROR)
        logger.info("here", in_order=True)

    assert said(several, speak) == [["[RANK 0] here"]] + [[]] * (several.size - 1)


def test_a_logger_works_before_an_accelerator_and_without_torch():
    code = (
        "import sys; from accel_runtime import get_logger\n"
        "logger = get_logger('x', 'info'); logger.info('hello'); logger.info('in turn', in_order=True)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_in_order_before_the_processes_are_connected_is_refused(monkeypatch):
    place = {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "x",
        "MASTER_PORT": 1,
    }
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RuntimeError, match="Create the Accelerator before this call"):
        get_logger("a test").warning("x", in_order=True)


def test_a_warning_is_written_once_for_its_message_and_arguments(caplog):
    logger = get_logger("a test")
    for _ in range(3):
        logger.warning_once("%s is slow", "a")
        logger.warning_once("%s is slow", ["b"])
    assert [record.message for record in caplog.records] == ["[RANK 0] a is slow", "[RANK 0] ['b'] is slow"]


def test_a_record_names_the_line_that_asked_for_it(caplog):
    logger = get_logger("a test", "info")
    logger.info("plain")
    logger.info("in turn", in_order=True)
    logger.warning_once("once")
    logger.log(logging.INFO, "log")
    assert {(record.filename, record.funcName) for record in caplog.records} == {
        ("test_logging.py", "test_a_record_names_the_line_that_asked_for_it")
    }
    assert len(caplog.records) == 4


def test_a_stacklevel_counts_as_in_accelerate(caplog):
    logger = get_logger("a test", "info")

    def helper():
        for level in (1, 2, 3):
            logger.info("plain", stacklevel=level)
            logger.warning_once("once %d", level, stacklevel=level)
        logger.info("in turn", in_order=True, stacklevel=3)

    helper()
    name = "test_a_stacklevel_counts_as_in_accelerate"
    assert [record.funcName for record in caplog.records] == ["helper"] * 4 + [name] * 3


def test_a_message_below_the_level_costs_nothing(caplog):
    class Costly:
        def __str__(self):
            raise AssertionError("nobody asked for it")

    get_logger("a test", "warning").info(Costly())
    assert not caplog.records


@pytest.mark.parametrize("level", ["debug", "DEBUG"])
def test_the_level_is_that_of_the_argument(level):
    assert get_logger("a test", level).logger.level == logging.DEBUG
    assert logging.root.level == logging.DEBUG


def test_else_it_is_that_of_the_variable_else_it_stays(monkeypatch):
    before = logging.root.level
    assert get_logger("a test").logger.level == logging.NOTSET
    assert logging.root.level == before
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "error")
    assert get_logger("a test").logger.level == logging.ERROR
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "loud")
    with pytest.raises(SettingsError, match="Invalid ACCEL_LOG_LEVEL 'loud': expected one of auto, debug"):
        get_logger("a test")


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("a test", "loud")


def test_the_level_comes_from_the_profile(accel, script):
    script("from accel_runtime import get_logger; print(get_logger('x').getEffectiveLevel())")
    done = accel("launch", "--cpu", "-q", "--set", "log_level=debug", "train.py")
    assert done.stdout == "10\n", done.stderr


def test_the_accelerator_changes_no_level():
    before = logging.root.level
    Accelerator()
    assert logging.root.level == before
