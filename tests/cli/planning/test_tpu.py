"""A TPU is seen from outside: on the PCI bus, among the device files, in what Google's machines say."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import pytest

from accel_cli import launchers
from accel_cli.planning import machine
from accel_cli.planning.machine import Machine, Packages, Tpu

GOOGLE, NETWORK_CARD, DISK = "0x1ae0", "0x0042", "0x001f"
CHIP = Tpu(("TPU v4",), "PCI")
PAIR = Packages("2.9.0", "2.9.0+cu128", "0.0.21")


@pytest.fixture
def root(tmp_path):
    """The root of a machine with nothing in it."""
    (tmp_path / "dev").mkdir()
    return tmp_path


@pytest.fixture
def plug(root):
    """Puts a device on the PCI bus."""

    def put(slot, vendor, device):
        folder = root / "sys/bus/pci/devices" / f"0000:00:{slot:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")

    return put


class Metadata(BaseHTTPRequestHandler):
    """Answers as the metadata server of a Google machine does, which refuses who does not ask for metadata."""

    attributes = {"worker-network-endpoints": "a:1:10.0.0.4,b:2:10.0.0.5", "agent-worker-number": "1"}  # noqa: RUF012

    def do_GET(self):
        text = self.attributes.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/"))
        asked = self.headers.get("Metadata-Flavor") == "Google"
        self.send_response(200 if text and asked else 404)
        self.end_headers()
        self.wfile.write((text or "").encode() if asked else b"")

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def metadata(monkeypatch):
    monkeypatch.setattr(machine, "_METADATA_TIMEOUT_S", 60)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_machine_without_a_tpu_has_none(root):
    assert not machine.detect_tpu({}, root=root).exists
    assert machine.detect_tpu({}, root=root / "nowhere") == Tpu()


def test_chips_on_the_pci_bus_are_counted_and_named(root, plug):
    for slot in range(4):
        plug(slot, GOOGLE, "0x005e")
    found = machine.detect_tpu({"TPU_SKIP_MDS_QUERY": "1"}, root=root)
    assert found == Tpu(("TPU v4",) * 4, "PCI")
    assert found.summary == "4 x TPU v4 (PCI)"


def test_other_devices_of_google_and_of_others_are_no_tpu(root, plug):
    plug(3, GOOGLE, NETWORK_CARD)
    plug(4, GOOGLE, DISK)
    plug(5, "0x10de", "0x0063")
    assert not machine.detect_tpu({}, root=root).exists


def test_a_device_that_cannot_be_read_is_passed_over(root, plug):
    (root / "sys/bus/pci/devices/0000:00:09.0").mkdir(parents=True)
    plug(1, GOOGLE, "0x006f")
    assert machine.detect_tpu({"TPU_SKIP_MDS_QUERY": "1"}, root=root).chips == ("TPU v6e",)


def test_device_files_are_enough_where_the_bus_is_hidden(root):
    for number in range(2):
        (root / "dev" / f"accel{number}").touch()
    found = machine.detect_tpu({"TPU_SKIP_MDS_QUERY": "1"}, root=root)
    assert (len(found.chips), found.source) == (2, "/dev/accel0, /dev/accel1")


def test_device_files_of_other_accelerators_are_no_tpu(root):
    (root / "dev/accel").mkdir()
    (root / "dev/accel/accel0").touch()
    (root / "dev/vfio").mkdir()
    (root / "dev/vfio/0").touch()
    assert not machine.detect_tpu({}, root=root).exists


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"PJRT_DEVICE": "TPU"}, True),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-16"}, True),
        ({"PJRT_DEVICE": "CPU", "TPU_ACCELERATOR_TYPE": "v5litepod-16"}, False),
        ({"TPU_SKIP_MDS_QUERY": "1"}, False),
    ],
)
def test_variables_say_that_there_is_a_tpu_or_that_it_is_not_to_be_used(root, environ, found):
    assert machine.detect_tpu(environ, root=root).exists == found


def test_a_tpu_that_torch_xla_is_told_not_to_use_is_none(root, plug):
    plug(1, GOOGLE, "0x0063")
    assert not machine.detect_tpu({"PJRT_DEVICE": "CPU"}, root=root).exists


def test_hosts_of_a_slice_come_from_variables(root):
    said = {"PJRT_DEVICE": "TPU", "TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"}
    found = machine.detect_tpu(said, root=root)
    assert (found.hosts, found.worker, found.hosts_source) == (("t-0.svc", "t-1.svc"), "1", "TPU_WORKER_*")


def test_hosts_of_a_slice_come_from_the_metadata_server_where_no_variable_says_them(root, plug, metadata):
    plug(1, GOOGLE, "0x005e")
    found = machine.detect_tpu({"GCE_METADATA_HOST": metadata}, root=root)
    assert (found.hosts, found.worker, found.hosts_source) == (("10.0.0.4", "10.0.0.5"), "1", "TPU metadata")


def test_the_metadata_server_is_left_alone_without_chips_or_where_a_variable_says_so(root, plug, metadata):
    assert machine.detect_tpu({"GCE_METADATA_HOST": metadata, "PJRT_DEVICE": "TPU"}, root=root).hosts == ()
    plug(1, GOOGLE, "0x005e")
    assert (
        machine.detect_tpu({"GCE_METADATA_HOST": metadata, "TPU_SKIP_MDS_QUERY": "1"}, root=root).hosts == ()
    )


def test_a_metadata_server_that_is_not_there_is_no_error(root, plug):
    plug(1, GOOGLE, "0x005e")
    assert machine.detect_tpu({"GCE_METADATA_HOST": "127.0.0.1:1"}, root=root) == Tpu(("TPU v4",), "PCI")


@pytest.mark.parametrize(
    ("installed", "there", "said"),
    [
        (PAIR, CHIP, ""),
        (Packages("2.9.0", "2.9.0"), Tpu(), ""),
        (Packages(None, "2.13.0"), CHIP, 'pip install "accel-runtime[tpu]"'),
        (Packages(None, "2.13.0"), Tpu(), 'pip install "accel-runtime[xla]"'),
        (
            Packages("2.9.0", "2.13.0"),
            Tpu(),
            "torch_xla 2.9.0 needs torch 2.9, but torch 2.13.0 is installed",
        ),
        (Packages("2.9.0", None), Tpu(), "torch none is installed"),
        (Packages("2.9.0", "2.9.0"), CHIP, "libtpu, the driver of the TPU, is not installed"),
    ],
)
def test_what_is_missing_is_named_with_the_command_that_installs_it(installed, there, said):
    problem = Machine(1, tpu=there, packages=installed).xla_problem
    assert said in problem
    assert bool(problem) == bool(said)


def test_versions_are_those_of_the_installed_packages():
    assert machine.detect_packages({}).torch == version("torch")
    assert machine.detect_packages({"TPU_LIBRARY_PATH": "/opt/libtpu.so"}).libtpu == "/opt/libtpu.so"


def test_looking_loads_neither_torch_nor_torch_xla():
    code = "import sys; from accel_cli.planning import machine; machine.detect_quickly({}); print({'torch', 'torch_xla'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_machine_says_its_tpu_and_what_is_missing_to_use_it():
    here = machine.detect_quickly({"PJRT_DEVICE": "TPU"})
    assert here.tpu.source == "PJRT_DEVICE=TPU"
    assert here.summary.startswith("TPU (PJRT_DEVICE=TPU), ")
    without = Machine(8, tpu=CHIP, packages=Packages(None, "2.13.0"))
    assert without.summary == "1 x TPU v4 (PCI), 8 CPU cores"
    assert any("accel-runtime[tpu]" in problem for problem in without.problems)
    assert Machine(8).problems == []


def test_a_tpu_is_what_suits_a_machine_that_has_one():
    assert launchers.suggest(Machine(8, tpu=CHIP)) == "xla"
    assert launchers.suggest(Machine(8)) == "single"
