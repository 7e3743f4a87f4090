"""Calls after an import: once, however the module is imported, and without a trace in the module."""

import importlib
import importlib.util
import inspect
import sys

import pytest

from accel_runtime.observe.import_hooks import call_after_import, call_after_torch_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package with a submodule, which this process has not imported."""
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "__init__.py").write_text("value = 1\ndef double(x):\n    return 2 * x\n")
    (folder / "part.py").write_text("import watched\nvalue = watched.value + 1\n")
    (folder / "broken.py").write_text("raise OSError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.name
    for name in [name for name in sys.modules if name.startswith("watched")]:
        del sys.modules[name]


@pytest.mark.parametrize("imported", ["watched", "watched.part"])
def test_the_function_is_called_once_with_the_executed_module(package, imported):
    seen = []
    finders = list(sys.meta_path)
    call_after_import(package, lambda module: seen.append((module, module.value)))
    importlib.import_module(imported)
    importlib.reload(sys.modules[package])
    assert seen == [(sys.modules[package], 1)]
    assert sys.meta_path == finders


def test_a_search_for_the_module_without_an_import_calls_nothing(package):
    """Libraries ask in this way which packages are installed."""
    seen = []
    call_after_import(package, seen.append)
    assert importlib.util.find_spec(package) is not None
    assert seen == []
    importlib.import_module(package)
    assert len(seen) == 1


def test_the_module_has_its_own_loader_spec_and_source(package):
    plain = importlib.import_module(package)
    loaders = type(plain.__loader__), type(plain.__spec__.loader)
    del sys.modules[package]
    call_after_import(package, lambda _: None)
    module = importlib.import_module(package)
    assert (type(module.__loader__), type(module.__spec__.loader)) == loaders
    assert inspect.getsource(module.double) == "def double(x):\n    return 2 * x\n"


def test_a_module_that_is_imported_already_is_passed_at_once(package):
    module = importlib.import_module(package)
    seen = []
    call_after_import(package, seen.append)
    assert seen == [module]


def test_several_functions_are_called_for_one_module_which_has_its_own_loader(package):
    finders, seen = list(sys.meta_path), []
    for number in range(3):
        call_after_import(package, lambda module, number=number: seen.append((number, module.value)))
    module = importlib.import_module(package)
    assert sorted(seen) == [(0, 1), (1, 1), (2, 1)]
    assert sys.meta_path == finders
    assert type(module.__loader__) is type(module.__spec__.loader) is type(pytest.__loader__)


def test_each_of_several_modules_is_passed_once(package):
    finders, seen = list(sys.meta_path), []
    call_after_import(["watched", "watched.part"], lambda module: seen.append(module.__name__))
    importlib.import_module("watched.part")
    importlib.reload(sys.modules["watched.part"])
    assert seen == ["watched", "watched.part"]
    assert sys.meta_path == finders


def test_an_import_that_fails_raises_its_own_error_and_calls_nothing(package):
    seen = []
    call_after_import("watched.broken", seen.append)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            importlib.import_module("watched.broken")
    assert seen == []
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_Finder"]


def test_another_module_named_torch_is_not_taken_for_pytorch(tmp_path, monkeypatch):
    seen = []
    call_after_torch_import(seen.append)
    assert seen == [sys.modules["torch"]]
    for name in ("torch", "torch._C"):
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torch.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    call_after_torch_import(seen.append)
    assert importlib.import_module("torch").value == 1
    assert len(seen) == 1
