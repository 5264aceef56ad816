# make sft          set up, then the main job: an AFMoE model learns on this machine's CPU, experts in fp8
# make test         set up, then the tests (under 8 minutes on 2 cores)
# make test-all     the slow tests too
# make test-oldest  parity and checkpoints against the oldest transformers that pyproject.toml allows
# make check        lint, format, types
#
# Set-up is a .venv in this folder, made once. On Linux the public index serves torch as a CUDA build of several
# gigabytes; on a machine without a GPU point TORCH_INDEX at PyTorch's index of CPU wheels:
#   make sft TORCH_INDEX=<URL of that index>

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
PYTEST_ARGS ?=

# the first with AFMoE's experts as stacked tensors in memory; lower bound of pyproject.toml
OLDEST_TRANSFORMERS := 5.4.0

VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
TORCH := $(shell grep '^torch==' constraints.txt)
DEEPSPEED := $(shell grep '^deepspeed==' constraints.txt)
PIP_FLAGS := --quiet --disable-pip-version-check -c constraints.txt

.PHONY: sft setup test test-all test-oldest check clean

sft: setup
	$(BIN)/python recipes/sft.py model=afmoe_mini moe/compute=fp8 trainer.accelerator=cpu

setup: $(VENV)/.ready

# torch first, pinned: left to the other packages, pip would take the newest and largest
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/pip install $(PIP_FLAGS) -e '.[dev]' setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/pip install $(PIP_FLAGS) --no-build-isolation $(DEEPSPEED)
	touch $@

# Triton kernels are interpreted and compiled without a GPU. A CUDA build of torch brings the triton that it needs
$(VENV)/.kernels: $(VENV)/.ready
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[kernels]'
	touch $@

test: setup
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

test-all: $(VENV)/.kernels
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# in an environment of its own; what belongs to transformers is then as old as it asks for
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -m 'not slow' tests/model tests/checkpoint $(PYTEST_ARGS)

$(OLDEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	grep -v -E '^(transformers|tokenizers|huggingface_hub)==' constraints.txt >$(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt \
		transformers==$(OLDEST_TRANSFORMERS) -e '.[dev]'
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache
