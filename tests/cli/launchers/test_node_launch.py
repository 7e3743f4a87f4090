"""`accel launch` on a node: the files it unpacks, its process, and the node that failed first."""

import os
import shutil
import signal
import sys
from itertools import permutations

import pytest

from accel_cli.errors import AccelError
from accel_cli.launchers.node_launch import NodeEnd, NodeLaunch, find_problem, get_failure_order, unpack
from accel_cli.launchers.source_files import select_files, write_archive
from accel_runtime.environment import settings as env


def run(code, **options):
    """Run a program of Python as `accel launch`, and return its output and its end."""
    launch = NodeLaunch()
    process = launch.start([sys.executable, "-c", code], "/", os.environ, **options)
    output = process.stdout.read()
    process.stdout.close()
    return output, launch.wait()


def test_a_launch_ends_with_its_exit_code_and_the_reason_that_it_has_written():
    code = (
        f"import os; open(os.environ['{env.FAILURE_FILE}'], 'w').write('boom\\nline 1'); print('hi'); exit(3)"
    )
    output, end = run(code)
    assert (output, end) == (b"hi\n", NodeEnd(3, "boom\nline 1"))
    assert end.describe() == "boom"


def test_a_launch_that_a_signal_ended_has_the_exit_code_of_a_shell():
    _, end = run(f"import os; os.kill(os.getpid(), {signal.SIGKILL})")
    assert end == NodeEnd(128 + signal.SIGKILL)
    assert end.describe() == "accel launch ended with exit code 137"


def test_a_signal_is_sent_to_the_launch_until_it_has_ended(tmp_path):
    launch = NodeLaunch(tmp_path / "failure")
    launch.send_signal(signal.SIGTERM)  # it has not started
    code = f"import os, time; open(os.environ['{env.FAILURE_FILE}'], 'w'); print(flush=True); time.sleep(600)"
    process = launch.start([sys.executable, "-c", code], "/", os.environ)
    with process.stdout:
        process.stdout.readline()
        launch.send_signal(signal.SIGTERM)
        assert launch.wait() == NodeEnd(128 + signal.SIGTERM)
    launch.send_signal(signal.SIGTERM)
    assert (tmp_path / "failure").exists()


def test_the_first_node_inherits_the_socket_with_the_reserved_port():
    launch = NodeLaunch()
    port = launch.reserve_port()
    code = f"import os, socket; print(socket.socket(fileno=int(os.environ['{env.RDZV_SOCKET}'])).getsockname()[1])"
    process = launch.start([sys.executable, "-c", code], "/", os.environ, serves_rendezvous=True)
    with process.stdout:
        assert process.stdout.read() == b"%d\n" % port
    assert launch.wait().code == 0


def test_an_archive_is_unpacked_into_a_new_folder_with_its_links_and_modes(tmp_path):
    source, archive = tmp_path / "source", tmp_path / "source.tar.gz"
    (source / "jobs").mkdir(parents=True)
    (source / "jobs" / "run.sh").write_text("exit")
    (source / "jobs" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("jobs/run.sh")
    write_archive(select_files(source, [], []), archive)
    unpack(archive, tmp_path / "new")
    shutil.rmtree(source)
    assert (tmp_path / "new" / "link").read_text() == "exit"
    assert find_problem(tmp_path / "new", "jobs/run.sh") == ""
    assert os.access(tmp_path / "new" / "jobs" / "run.sh", os.X_OK)


@pytest.mark.parametrize("kept", [0, 1, 15, -20])
def test_a_damaged_archive_is_an_error_that_names_it(tmp_path, kept):
    (tmp_path / "train.py").write_text("pass")
    archive = tmp_path / "source.tar.gz"
    write_archive(select_files(tmp_path, [], []), archive)
    archive.write_bytes(archive.read_bytes()[:kept])
    with pytest.raises(AccelError, match=r"source\.tar\.gz is damaged: .*\. Launch again\."):
        unpack(archive, tmp_path / "new")


def test_the_node_that_was_lost_or_has_a_reason_failed_first():
    ended_elsewhere, cause, lost = (NodeEnd(1), 1.0), (NodeEnd(1, "boom"), 2.0), (None, 3.0)
    for nodes in permutations([ended_elsewhere, cause, lost]):
        assert min(nodes, key=lambda node: get_failure_order(*node)) == cause
    assert min([ended_elsewhere, lost], key=lambda node: get_failure_order(*node)) == lost
