# Two commands do everything: `make demo` and `make test`. Both set up first, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
# Constraints also keep an open-ended torch from bringing several GB of CUDA.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
XDIST ?= -n 2

.PHONY: setup demo test check format lint types layers terraform bench clean
.DEFAULT_GOAL := check

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/s3kv demo

test: setup
	$(BIN)/python -m pytest $(XDIST) --dist loadgroup

format: setup
	$(BIN)/ruff format --check .

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy s3kv cli

layers: setup
	$(BIN)/lint-imports

# The module's checks need the terraform program; the tests that apply it are among `make test`.
terraform: setup
	@if command -v terraform >/dev/null; then $(MAKE) --no-print-directory tf-check PYTHON=$(abspath $(BIN)/python); \
	else echo "terraform is not installed: the checks of the module are left out"; fi

check: format lint types layers terraform test

include terraform/Makefile

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
