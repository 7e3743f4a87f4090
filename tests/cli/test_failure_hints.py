"""Hints for errors whose messages lack the cure."""

import sys

import pytest

from accel_cli.failure_hints import find_hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("AssertionError: Torch not compiled with CUDA enabled", "accelerator.device"),
        ("RuntimeError: No CUDA GPUs are available", "accelerator.device"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "page Out of memory"),
        ("OutOfMemoryError: reserved by PyTorch but unallocated memory is large", "page Out of memory"),
    ],
)
def test_an_error_of_a_device_leads_to_its_page(text, hint):
    assert hint in find_hint(text)


def test_a_second_process_group_of_the_script_leads_to_its_removal():
    error = "ValueError: trying to initialize the default process group twice!"
    assert "Remove init_process_group()" in find_hint(error)


@pytest.mark.parametrize(
    "error",
    [
        "TypeError: 'PreparedOptimizer' object is not iterable",
        "TypeError: 'PreparedLoader' object is not callable",
    ],
)
def test_a_result_of_prepare_that_is_used_as_another_leads_to_their_order(error):
    assert "in the order of its arguments" in find_hint(error)


def test_a_call_of_a_flag_of_the_process_leads_to_the_property():
    assert "are properties" in find_hint("TypeError: 'bool' object is not callable")


def test_a_copy_of_parameters_before_they_were_sharded_leads_to_its_place():
    error = "RuntimeError: aten.sub.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
    assert "make them after prepare()" in find_hint(error)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("RuntimeError: can't start new thread", ""),
        ("RuntimeError: Resource temporarily unavailable", ""),
        (
            "OpenBLAS blas_thread_init: pthread_create failed for thread 1: Resource temporarily unavailable",
            "",
        ),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "if os.fork() == 0:"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "self.pid = _fork_exec("),
    ],
)
def test_a_thread_or_process_that_cannot_be_started_leads_to_the_limit_on_processes(text, line):
    assert "the limit on processes is reached" in find_hint(text, line)


def test_a_pipe_without_data_is_not_taken_for_the_limit_on_processes():
    assert (
        find_hint("BlockingIOError: [Errno 11] Resource temporarily unavailable", "os.read(pipe, 1)") is None
    )


def test_a_missing_package_is_reported_with_the_python_that_lacks_it(tmp_path, monkeypatch):
    (tmp_path / "python").write_text("")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    hint = find_hint("ModuleNotFoundError: No module named 'cv2x.core'")
    assert f"{sys.executable}, not {tmp_path}/python of PATH" in hint
    assert hint.endswith("-m pip install cv2x")


def test_a_module_with_another_name_than_its_package_is_installed_by_that():
    assert find_hint("ModuleNotFoundError: No module named 'skimage'").endswith("install scikit-image")


def test_a_module_in_the_working_directory_is_found_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ourmodels").mkdir()
    assert "PYTHONPATH=." in find_hint("ModuleNotFoundError: No module named 'ourmodels'")


def test_other_errors_have_no_hint():
    assert find_hint("ValueError: boom") is None
    assert find_hint("ModuleNotFoundError: No module named 'json.nosuch'") is None


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "RuntimeError: basic_ios::clear: iostream error",
    ],
)
def test_an_incomplete_file_of_torch_leads_to_the_disk(error):
    assert "the disk is full" in find_hint(error)
