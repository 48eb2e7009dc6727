# Two commands for everybody: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
N      ?= 200
SEED   ?= 0
# Where your index serves only CUDA builds of torch, give the address of PyTorch's CPU wheels: make demo TORCH_INDEX=…
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt

.PHONY: help demo test test-all laws lint format clean

help:
	@echo "make demo      train a small model on Python's own source code, about 3 minutes"
	@echo "make test      the test suite"
	@echo "make test-all  the slow tests too"
	@echo "make laws      every law on N=200 recipes of the whole space, from SEED=0 on"
	@echo "make lint      ruff, mypy --strict, the import contract"
	@echo "make format    rewrite the code in the house's format"
	@echo "make clean     remove .venv and caches; runs/ stays"

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "anyformer needs Python 3.11 or newer; $$($(PYTHON) --version 2>&1) is $(PYTHON). Try: make PYTHON=python3.12 …"; exit 2; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "this Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 2; }
	@touch $@

$(VENV)/.base: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "installing anyformer (torch is the large part)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	@echo "installing the test extra"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@echo "installing the development extra"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(VENV)/.base
	@$(BIN)/anyformer demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

laws: $(VENV)/.base
	@$(BIN)/python -m anyformer.laws $(N) --seed $(SEED)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
