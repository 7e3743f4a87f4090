"""The log of a training job has each line once and in order, whatever CloudWatch returns."""

import itertools
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_cli.extensions.sagemaker.aws import Account
from accel_cli.extensions.sagemaker.service import CloudWatchLog
from accel_cli.launchers.job_service import Job, UnreachableError

HOSTS = ("algo-1", "algo-2", "algo-12")


class Logs:
    """A stub of CloudWatch with small pages, empty pages before the last, and failures."""

    exceptions = SimpleNamespace(ClientError=ClientError)

    def __init__(self):
        self.streams, self.page, self.hollow, self.faults = {}, 3, 0, []
        self.hollows = itertools.count()  # a token comes again at the end only

    def write(self, stream, *lines, at=0):
        self.streams.setdefault(stream, []).extend((at, line) for line in lines)

    def get_paginator(self, operation):
        assert operation == "describe_log_streams"

        def paginate(*, logStreamNamePrefix, **_):  # noqa: N803 - as boto3 has them
            self._fail()
            if not self.streams:
                raise ClientError({"Error": {"Code": "ResourceNotFoundException"}}, operation)
            names = sorted(name for name in self.streams if name.startswith(logStreamNamePrefix))
            for name in names:
                yield {"logStreams": [{"logStreamName": name}]}

        return SimpleNamespace(paginate=paginate)

    def get_log_events(self, *, logStreamName, nextToken=None, startTime=None, **_):  # noqa: N803
        self._fail()
        events = self.streams[logStreamName]
        if nextToken is None:
            start = sum(at < (startTime or 0) for at, _ in events)
        else:
            start = int(nextToken.partition("/")[2].partition(".")[0])
        if self.hollow and start < len(events):
            self.hollow -= 1
            return {"events": [], "nextForwardToken": f"f/{start}.{next(self.hollows)}"}
        page = events[start : start + self.page]
        end = start + len(page)
        token = nextToken if nextToken and not page else f"f/{end}"
        return {
            "events": [{"timestamp": at, "message": text} for at, text in page],
            "nextForwardToken": token,
        }

    def _fail(self):
        if self.faults and self.faults.pop(0):
            raise EndpointConnectionError(endpoint_url="http://logs")


@pytest.fixture
def logs():
    return Logs()


@contextmanager
def speaking(_):
    try:
        yield
    except EndpointConnectionError:
        raise UnreachableError from None


def log_of(logs, *, colored=False, quick=False):
    account = Account("us-east-1")
    account.client = lambda _: logs
    if quick:
        account.translate_errors = speaking
    return CloudWatchLog(account, "job", colored=colored)


def all_of(log):
    data = b""
    while new := log.read():
        data += new
    return data.decode()


def job(hosts):
    return Job("job", "job", "Completed", finished=True, hosts=hosts)


def test_a_missing_log_group_is_an_empty_log(logs):
    assert log_of(logs).read() == b""


def test_lines_have_the_prefix_of_their_host_and_streams_can_appear_late(logs):
    log = log_of(logs)
    logs.write("job/algo-1-100", "one", at=1)
    assert log.read() == b"algo-1 | one\n"
    logs.write("job/algo-2-100", "two", at=2)
    logs.write("jobs/algo-1-100", "of another job", at=2)
    assert log.read() == b"algo-2 | two\n"
    assert log.read() == b""


def test_lines_of_hosts_are_ordered_by_time(logs):
    for at in range(3):
        logs.write("job/algo-1-1", f"a{at}", at=at * 2)
        logs.write("job/algo-2-1", f"b{at}", at=at * 2 + 1)
    assert re.findall(r"[ab]\d", all_of(log_of(logs))) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_special_characters_and_long_lines_are_kept(logs):
    long = "x" * 300_000
    logs.write("job/algo-1-1", "10 %\r20 %\r30 %", "two\nlines", "tab\t\x1b[1mé\udcff", long, "ended\n")
    output = all_of(log_of(logs))
    assert output == (
        "algo-1 | 10 %\r20 %\r30 %\nalgo-1 | two\nalgo-1 | lines\n"
        f"algo-1 | tab\t\x1b[1mé?\nalgo-1 | {long}\nalgo-1 | ended\n"
    )


def test_hosts_have_different_colours_on_a_terminal(logs):
    logs.write("job/algo-1-1", "x")
    logs.write("job/algo-2-1", "x")
    first, second = log_of(logs, colored=True).read().decode().splitlines()
    assert first == "\x1b[36malgo-1 |\x1b[0m x"
    assert second.startswith("\x1b[33m")


def test_a_log_is_complete_after_the_last_line_of_each_host(logs):
    log = log_of(logs)
    assert log.is_complete(job(0))
    logs.write("job/algo-1-1", "accel: algo-1 ended with exit code 0")
    logs.write("job/algo-2-1", "accel: algo-1 ended with exit code 0")  # what a script may print too
    all_of(log)
    assert not log.is_complete(job(2))
    logs.write("job/algo-2-1", "accel: algo-2 ended with exit code 143")
    all_of(log)
    assert log.is_complete(job(2))
    logs.write("job/algo-1-9", "again")
    all_of(log)
    assert not log.is_complete(job(2))


def test_a_network_failure_between_two_hosts_loses_no_line(logs):
    logs.write("job/algo-1-1", "one")
    logs.write("job/algo-2-1", "two")
    logs.faults = [False, False, True]
    log = log_of(logs)
    with pytest.raises(UnreachableError, match="Cannot read the log of job job"):
        log.read()
    assert sorted(all_of(log).splitlines()) == ["algo-1 | one", "algo-2 | two"]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(HOSTS), st.integers(1, 7)),
        st.tuples(st.just("read")),
        st.tuples(st.just("tick")),
        st.tuples(st.just("hollow"), st.integers(1, 3)),
        st.tuples(st.just("page"), st.integers(1, 4)),
        st.tuples(st.just("faults"), st.lists(st.booleans(), max_size=5)),
    ),
    max_size=40,
)


@given(steps)
@settings(max_examples=300)
def test_no_line_is_lost_or_duplicated(steps):
    logs, time, written, output = Logs(), 1, {}, ""
    log = log_of(logs, quick=True)
    for action, *arguments in steps:
        if action == "write":
            host, count = arguments
            lines = [f"{host}#{len(written.get(host, [])) + number}" for number in range(count)]
            written.setdefault(host, []).extend(lines)
            logs.write(f"job/{host}-1", *lines, at=time)
        elif action == "read":
            output += tried(log)
        elif action == "tick":
            time += 1
        else:
            setattr(logs, action, arguments[0])
    logs.faults = []
    output += all_of(log)
    for host, lines in written.items():
        assert re.findall(rf"^{host} \| (.*)$", output, re.MULTILINE) == lines
    assert output.count("\n") == sum(map(len, written.values()))


def tried(log):
    try:
        return log.read().decode()
    except UnreachableError:
        return ""
