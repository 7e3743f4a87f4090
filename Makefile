# Everything a person does in this repository. `make demo` and `make test` need nothing but Python and pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Material for MkDocs advertises its successor at every build.
export NO_MKDOCS_2_WARNING := 1
READY := $(VENV)/.ready
# torch_xla needs a torch of its own: the newest are 2.9.0, so they are beside everything else.
XLA := .venv-xla
XLA_READY := $(XLA)/.ready
XLA_TESTS := tests/xla tests/runtime/backends/test_contract.py
# Ray brings many packages, which only its tests need.
RAY := .venv-ray
RAY_READY := $(RAY)/.ready
# Three tests at a time, also on two cores: much of what is tested waits.
AT_ONCE := -n 3 --dist worksteal --durations=40 --durations-min=5
# Which tests `make test` runs. CI runs fast and slow ones at once: importing all tests takes half a minute.
MARKS ?= not slow and not full

# A GPU may be on a machine without network: an interpreter that is given (`PYTHON=python3`) is used as it is.
GPU_READY := $(if $(filter-out undefined file default,$(origin PYTHON)),,$(READY))
GPU_PYTHON = $(if $(GPU_READY),$(BIN)/python,$(PYTHON))

.PHONY: help demo test test-slow test-full test-xla test-ray test-gpu bench-gpu check fmt docs bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## Set up, then train on real handwritten digits on 2 processes
	$(BIN)/accel launch --cpu --nproc-per-node 2 examples/digits.py --output $(VENV)/digits.safetensors
	@printf '\nThat was examples/digits.py: a plain training loop on 2 processes. Where to go next:\n'
	@printf '  source $(BIN)/activate         put accel on your PATH\n'
	@printf '  accel config                   say once how scripts run on this machine\n'
	@printf '  accel launch examples/digits.py --epochs 3\n'
	@printf '  docs/first-launch.md           the five lines that change in a script of yours\n'

test: $(READY)  ## Set up, then run the tests that a change is checked with
	$(BIN)/python -m pytest $(AT_ONCE) -m "$(MARKS)"

test-slow: $(READY)  ## Run those that need more: hosts, a Slurm cluster, an AWS, every page of the docs
	$(BIN)/python -m pytest $(AT_ONCE) -m "slow and not full"

test-xla: $(XLA_READY)  ## Set up torch_xla in an environment of its own, and test on its CPU device
	$(XLA)/bin/python -m pytest -n 2 --dist worksteal -m "not full" $(XLA_TESTS)

test-ray: $(RAY_READY)  ## Set up Ray in an environment of its own, and test on a cluster of this machine
	$(RAY)/bin/python -m pytest tests/ray_jobs

test-gpu: $(GPU_READY)  ## Run the tests that need a GPU; `PYTHON=python3` takes that interpreter as it is
	$(GPU_PYTHON) tests/gpu/__main__.py

test-full: $(READY) $(XLA_READY) $(RAY_READY)  ## Run all tests in random order, then break features and see tests fail
	$(BIN)/python -m pytest $(AT_ONCE) -p randomly
	$(XLA)/bin/python -m pytest -n 2 --dist worksteal $(XLA_TESTS)
	$(RAY)/bin/python -m pytest tests/ray_jobs
	$(BIN)/python tests/mutations.py

check: $(READY)  ## Lint, types, formatting, and the docs built strictly
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet

fmt: $(READY)  ## Format the sources and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## Serve the docs on http://127.0.0.1:8000
	$(BIN)/mkdocs serve

bench: $(READY)  ## Measure accel beside bare torch, torchrun and Accelerate, and write docs/benchmarks.md
	$(BIN)/python -m benchmarks

bench-gpu: $(GPU_READY)  ## Measure accel on a GPU beside bare torch and Accelerate, and write docs/benchmarks-gpu.md
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.gpu

clean:  ## Remove everything the other targets made
	rm -rf $(VENV) $(XLA) $(RAY) .venv-bench site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment for everything, made anew when what it is made from changes.
$(READY): pyproject.toml constraints.txt
	@echo 'Setting up $(VENV): a minute, or as long as torch takes to download'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(XLA_READY): pyproject.toml constraints.txt
	@echo 'Setting up $(XLA): two minutes, or as long as 4 GB take to download'
	@$(PYTHON) -m venv $(XLA)
	@sed '/^torch==/d' constraints.txt > $(XLA)/constraints.txt
	@$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check -c $(XLA)/constraints.txt -e '.[test,xla]'
	@touch $@

$(RAY_READY): pyproject.toml constraints.txt
	@echo 'Setting up $(RAY): a minute, or as long as torch takes to download'
	@$(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]' pytest
	@touch $@
