# Targets for development. `make demo` and `make test` need only Python and pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Material for MkDocs advertises its successor at every build.
export NO_MKDOCS_2_WARNING := 1
# Some machines set it. Each of a thousand processes would then compile accel, the tests and torch again.
unexport PYTHONDONTWRITEBYTECODE
# Tests write into temporary folders and the environment only.
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/$(VENV)/.hypothesis
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready
# torch_xla 2.9.0, the newest, needs torch 2.9.0, and so a separate environment.
XLA := .venv-xla
XLA_READY := $(XLA)/.ready
XLA_TESTS := tests/extensions/xla/device tests/runtime/backends/test_contract.py tests/runtime/parallel/test_strategy_contract.py
# Ray brings many packages, which only its tests need.
RAY := .venv-ray
RAY_READY := $(RAY)/.ready
# DeepSpeed changes torch.distributed when it is imported, and compiles its operators.
DEEPSPEED := .venv-deepspeed
DEEPSPEED_READY := $(DEEPSPEED)/.ready
DEEPSPEED_TESTS := tests/extensions/deepspeed/zero tests/runtime/parallel/test_strategy_contract.py tests/runtime/parallel/test_qlora.py
# Three tests at a time, also on two cores: many tests mostly wait.
AT_ONCE := -n 3 --dist worksteal --durations=40 --durations-min=5
# Tests that share a service, a library or replicas run in one process; those of services wait for most of their time.
SLOW_AT_ONCE := -n 3 --dist loadgroup --durations=40 --durations-min=5
SERVICES_AT_ONCE := -n 5 --dist loadgroup --durations=40 --durations-min=5
# A test that hangs ends its process after 15 minutes with the stacks of all threads, and the other tests still run. Not in
# pyproject.toml, as the pytest of a machine with a GPU may be too old for these options.
PYTEST = -m pytest -o cache_dir=$(VENV)/.pytest_cache -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

# A machine with a GPU may have no network: `PYTHON=python3` uses that interpreter without setting up.
GPU_READY := $(if $(filter-out undefined file default,$(origin PYTHON)),,$(READY))
GPU_PYTHON = $(if $(GPU_READY),$(BIN)/python,$(PYTHON))

.PHONY: help demo test test-slow test-services test-extensions test-full test-xla test-ray test-deepspeed test-gpu bench-gpu check fmt docs bench proof clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO_READY)  ## Set up, then train on real handwritten digits on 2 processes
	@echo '$$ accel launch --cpu --nproc-per-node 2 examples/digits.py'
	@$(BIN)/accel launch --cpu --nproc-per-node 2 examples/digits.py --output $(VENV)/digits.safetensors
	@printf '\nThat was examples/digits.py: a plain training loop with five changed lines, on 2 processes. Next:\n'
	@printf '  %-27s %s\n' \
	  'source $(BIN)/activate' 'put accel on your PATH' \
	  'docs/five-lines.md' 'convert a script of your own with five lines' \
	  'docs/launch.md' 'launch it on GPUs, machines and clusters, with a profile'

test: $(READY)  ## Set up, then run the tests of the core for every change, and a few of each extension
	$(BIN)/python $(PYTEST) $(AT_ONCE) -m "(service or not slow) and not full and (smoke or not extension)"

test-slow: $(READY)  ## Run the slow tests of the core: many launches, the first pages of the docs
	$(BIN)/python $(PYTEST) $(SLOW_AT_ONCE) -m "slow and not service and not full" tests --ignore=tests/extensions

test-services: $(READY)  ## Install Ceph, Slurm, sshd and Chromium, and run the tests that need them or root (Debian, as root)
	$(BIN)/python $(PYTEST) $(SERVICES_AT_ONCE) --services -m "service and not full"

test-extensions: $(READY)  ## Run all tests of the extensions, but those with an environment of their own
	$(BIN)/python $(PYTEST) $(AT_ONCE) -m "not full" tests/extensions $(addprefix --ignore=tests/extensions/,deepspeed/zero ray/cluster xla/device)

test-xla: $(XLA_READY)  ## Set up torch_xla in a separate environment, and test on its CPU device
	$(XLA)/bin/python $(PYTEST) -n 2 --dist loadgroup -m "not full" $(XLA_TESTS)

test-ray: $(RAY_READY)  ## Set up Ray in a separate environment, and test on a cluster on this machine
	$(RAY)/bin/python $(PYTEST) -m "not full" tests/extensions/ray/cluster

test-deepspeed: $(DEEPSPEED_READY)  ## Set up DeepSpeed in a separate environment, and test ZeRO on the CPU
	$(DEEPSPEED)/bin/python $(PYTEST) -n 2 --dist worksteal -m "not full" $(DEEPSPEED_TESTS)

test-gpu: $(GPU_READY)  ## Run the tests that need a GPU; `PYTHON=python3` uses that interpreter
	$(GPU_PYTHON) tests/gpu/__main__.py

test-full: $(READY) $(XLA_READY) $(RAY_READY) $(DEEPSPEED_READY)  ## Run all tests in random order, then the mutations
	$(BIN)/python $(PYTEST) $(AT_ONCE) --services -p randomly --hypothesis-profile search
	$(XLA)/bin/python $(PYTEST) -n 2 --dist loadgroup $(XLA_TESTS)
	$(RAY)/bin/python $(PYTEST) tests/extensions/ray/cluster
	$(DEEPSPEED)/bin/python $(PYTEST) -n 2 --dist worksteal $(DEEPSPEED_TESTS)
	$(BIN)/python tests/mutations.py

check: $(READY)  ## Lint, check types and formatting, and build the docs strictly
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/build_site.py

fmt: $(READY)  ## Format the sources, and apply the fixes of the linter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## Serve the docs on http://127.0.0.1:8000
	$(BIN)/mkdocs serve

bench: $(READY) $(XLA_READY)  ## Compare accel with bare torch, torchrun and Accelerate, and write docs/benchmarks.md
	$(BIN)/python -m benchmarks

bench-gpu: $(GPU_READY)  ## Compare accel with bare torch and Accelerate on a GPU, and write docs/benchmarks-gpu.md
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.gpu

proof: $(READY)  ## Measure the claims of the docs in about two hours, as root, and write docs/proof.md; PARTS and MINUTES choose
	PYTHONPATH=tests:. $(BIN)/python -m proof $(PARTS) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SCRIPTS),--scripts $(SCRIPTS))

clean:  ## Remove everything that the other targets create
	rm -rf $(VENV) $(XLA) $(RAY) $(DEEPSPEED) .venv-bench site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is made once. When its requirements change, pip installs what changed. Python compiles a module when it is
# imported first: compiling all of them beforehand doubles the CPU time of an installation.
INSTALL = -m pip install --disable-pip-version-check --no-compile

$(DEMO_READY): pyproject.toml constraints.txt
	@echo 'Setting up $(VENV) with accel and what examples/digits.py imports: about 40 packages; 1.2 GB on disk with torch for the CPU, more with CUDA'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@start=$$(date +%s); $(BIN)/python $(INSTALL) -c constraints.txt -e '.[demo]' >$(VENV)/install.log \
	  || { cat $(VENV)/install.log; exit 1; }; \
	  sed -n 's/^Successfully installed /Installed: /p' $(VENV)/install.log; \
	  echo "Set up in $$(($$(date +%s) - start)) s"
	@touch $@

$(READY): $(DEMO_READY)
	@echo 'Adding the packages of tests and checks to $(VENV): about 160 packages, 1.5 GB on disk'
	@$(BIN)/python $(INSTALL) --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(XLA_READY): pyproject.toml constraints.txt
	@echo 'Setting up $(XLA) with torch_xla: two minutes, or the time of a download of 4 GB'
	@test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	@sed '/^torch==/d' constraints.txt >$(XLA)/constraints.txt
	@$(XLA)/bin/python $(INSTALL) --quiet -c $(XLA)/constraints.txt -e '.[test-xla]'
	@touch $@

$(RAY_READY): pyproject.toml constraints.txt
	@echo 'Setting up $(RAY) with Ray: a minute, or the time of the download of torch'
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python $(INSTALL) --quiet -c constraints.txt -e '.[test-ray]'
	@touch $@

$(DEEPSPEED_READY): pyproject.toml constraints.txt
	@echo 'Setting up $(DEEPSPEED) with DeepSpeed: a minute, or the time of the download of torch'
	@test -x $(DEEPSPEED)/bin/python || $(PYTHON) -m venv $(DEEPSPEED)
	@# Its installation imports torch, so torch is installed first, and the build is not isolated.
	@$(DEEPSPEED)/bin/python $(INSTALL) --quiet -c constraints.txt torch setuptools wheel
	@$(DEEPSPEED)/bin/python $(INSTALL) --quiet -c constraints.txt --no-build-isolation deepspeed
	@$(DEEPSPEED)/bin/python $(INSTALL) --quiet -c constraints.txt -e '.[test-deepspeed]'
	@touch $@
