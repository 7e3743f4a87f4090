"""Detection of TPUs: PCI bus, device files, environment variables, and the metadata server."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import pytest

from accel_cli import launchers
from accel_cli.extensions.xla import tpu as tpu_module
from accel_cli.extensions.xla.tpu import (
    Packages,
    Tpu,
    XlaDevices,
    detect_packages,
    detect_tpu,
    get_devices,
)
from accel_cli.planning import machine
from accel_cli.planning.machine import Machine

GOOGLE, NETWORK_CARD, DISK = "0x1ae0", "0x0042", "0x001f"
CHIP = Tpu(("TPU v4",), "PCI")
PAIR = Packages("2.9.0", "2.9.0+cu128", "0.0.21")


@pytest.fixture
def root(tmp_path):
    """The root folder of a machine without devices."""
    (tmp_path / "dev").mkdir()
    return tmp_path


@pytest.fixture
def add_pci_device(root):
    """Add a device to the PCI bus."""

    def add(slot, vendor, device):
        folder = root / "sys/bus/pci/devices" / f"0000:00:{slot:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")

    return add


class Metadata(BaseHTTPRequestHandler):
    """The metadata server of a Google machine, which rejects requests without its header."""

    attributes = {"worker-network-endpoints": "a:1:10.0.0.4,b:2:10.0.0.5", "agent-worker-number": "1"}  # noqa: RUF012

    def do_GET(self):
        text = self.attributes.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/"))
        has_header = self.headers.get("Metadata-Flavor") == "Google"
        self.send_response(200 if text and has_header else 404)
        self.end_headers()
        self.wfile.write((text or "").encode() if has_header else b"")

    def log_message(self, *_):
        """Do not print requests."""


@pytest.fixture
def metadata(monkeypatch):
    monkeypatch.setattr(tpu_module, "_METADATA_TIMEOUT_S", 60)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_no_tpu_is_detected_without_devices_and_variables(root):
    assert not detect_tpu({}, root=root).exists
    assert detect_tpu({}, root=root / "missing") == Tpu()


def test_chips_on_the_pci_bus_are_counted_and_named(root, add_pci_device):
    for slot in range(4):
        add_pci_device(slot, GOOGLE, "0x005e")
    tpu = detect_tpu({"TPU_SKIP_MDS_QUERY": "1"}, root=root)
    assert tpu == Tpu(("TPU v4",) * 4, "PCI")
    assert tpu.summary == "4 x TPU v4 (PCI)"


def test_other_pci_devices_are_not_detected_as_tpus(root, add_pci_device):
    add_pci_device(3, GOOGLE, NETWORK_CARD)
    add_pci_device(4, GOOGLE, DISK)
    add_pci_device(5, "0x10de", "0x0063")
    assert not detect_tpu({}, root=root).exists


def test_unreadable_pci_devices_are_ignored(root, add_pci_device):
    (root / "sys/bus/pci/devices/0000:00:09.0").mkdir(parents=True)
    add_pci_device(1, GOOGLE, "0x006f")
    assert detect_tpu({"TPU_SKIP_MDS_QUERY": "1"}, root=root).chips == ("TPU v6e",)


def test_a_tpu_is_detected_by_its_device_files_if_the_pci_bus_is_hidden(root):
    for number in range(2):
        (root / "dev" / f"accel{number}").touch()
    tpu = detect_tpu({"TPU_SKIP_MDS_QUERY": "1"}, root=root)
    assert (len(tpu.chips), tpu.source) == (2, "/dev/accel0, /dev/accel1")


def test_device_files_of_other_accelerators_are_not_detected_as_tpus(root):
    (root / "dev/accel").mkdir()
    (root / "dev/accel/accel0").touch()
    (root / "dev/vfio").mkdir()
    (root / "dev/vfio/0").touch()
    assert not detect_tpu({}, root=root).exists


@pytest.mark.parametrize(
    ("environ", "exists"),
    [
        ({"PJRT_DEVICE": "TPU"}, True),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-16"}, True),
        ({"PJRT_DEVICE": "CPU", "TPU_ACCELERATOR_TYPE": "v5litepod-16"}, False),
        ({"TPU_SKIP_MDS_QUERY": "1"}, False),
    ],
)
def test_environment_variables_show_a_tpu_or_exclude_it(root, environ, exists):
    assert detect_tpu(environ, root=root).exists == exists


def test_pjrt_device_cpu_hides_the_chips_on_the_pci_bus(root, add_pci_device):
    add_pci_device(1, GOOGLE, "0x0063")
    assert not detect_tpu({"PJRT_DEVICE": "CPU"}, root=root).exists


def test_the_hosts_of_a_slice_come_from_environment_variables(root):
    environ = {"PJRT_DEVICE": "TPU", "TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"}
    tpu = detect_tpu(environ, root=root)
    assert (tpu.hosts, tpu.worker, tpu.hosts_source) == (("t-0.svc", "t-1.svc"), "1", "TPU_WORKER_*")


def test_the_hosts_of_a_slice_come_from_the_metadata_server_without_variables(root, add_pci_device, metadata):
    add_pci_device(1, GOOGLE, "0x005e")
    tpu = detect_tpu({"GCE_METADATA_HOST": metadata}, root=root)
    assert (tpu.hosts, tpu.worker, tpu.hosts_source) == (("10.0.0.4", "10.0.0.5"), "1", "TPU metadata")


def test_the_metadata_server_is_not_queried_without_chips_or_if_a_variable_forbids_it(
    root, add_pci_device, metadata
):
    assert detect_tpu({"GCE_METADATA_HOST": metadata, "PJRT_DEVICE": "TPU"}, root=root).hosts == ()
    add_pci_device(1, GOOGLE, "0x005e")
    assert detect_tpu({"GCE_METADATA_HOST": metadata, "TPU_SKIP_MDS_QUERY": "1"}, root=root).hosts == ()


def test_a_missing_metadata_server_is_not_an_error(root, add_pci_device):
    add_pci_device(1, GOOGLE, "0x005e")
    assert detect_tpu({"GCE_METADATA_HOST": "127.0.0.1:1"}, root=root) == Tpu(("TPU v4",), "PCI")


@pytest.mark.parametrize(
    ("installed", "tpu", "expected"),
    [
        (PAIR, CHIP, ""),
        (Packages("2.9.0", "2.9.0"), Tpu(), ""),
        (Packages(None, "2.13.0"), CHIP, "install 'torch-xla[tpu]==2.9.0' torch==2.9.0"),
        (Packages(None, "2.13.0"), Tpu(), "install torch-xla==2.9.0 torch==2.9.0"),
        (
            Packages("2.9.0", "2.13.0"),
            Tpu(),
            "torch_xla 2.9.0 needs torch 2.9, but torch 2.13.0 is installed",
        ),
        (Packages("2.9.0", None), Tpu(), "torch none is installed"),
        (Packages("2.9.0", "2.9.0"), CHIP, "libtpu, the driver of the TPU, is not installed"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(installed, tpu, expected):
    problem = XlaDevices(tpu, installed).problem
    assert expected in problem
    assert bool(problem) == bool(expected)


def test_detected_versions_are_those_of_the_installed_packages():
    assert detect_packages({}).torch == version("torch")
    assert detect_packages({"TPU_LIBRARY_PATH": "/opt/libtpu.so"}).libtpu == "/opt/libtpu.so"


def test_detection_imports_neither_torch_nor_torch_xla():
    code = "import sys; from accel_cli.planning import machine; machine.detect_quickly({}); print({'torch', 'torch_xla'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_the_summary_names_the_tpu_and_the_problems_name_missing_packages():
    detected = machine.detect_quickly({"PJRT_DEVICE": "TPU"})
    assert get_devices(detected).tpu.source == "PJRT_DEVICE=TPU"
    assert detected.summary.startswith("TPU (PJRT_DEVICE=TPU), ")
    missing_torch_xla = Machine(8, others=(XlaDevices(CHIP, Packages(None, "2.13.0")),))
    assert missing_torch_xla.summary == "1 x TPU v4 (PCI), 8 CPU cores"
    assert any("torch-xla[tpu]==2.9.0" in problem for problem in missing_torch_xla.problems)
    assert Machine(8).problems == []


def test_the_xla_launcher_is_suggested_on_a_machine_with_a_tpu():
    assert launchers.suggest_launcher(Machine(8, others=(XlaDevices(CHIP),))) == "xla"
    assert launchers.suggest_launcher(Machine(8)) == "single"
