# Needs python3.11 or later, make and git; everything else goes into .venv.
#
#   make demo    train a small GPT while its ranks are killed, and compare with an undisturbed run
#   make test    everything: format, lint, types, all tests
#   make check   the quick loop: format, lint, types, unit tests
#   make format  rewrite the sources in the project's format
#
# PYTHON=/path/to/python chooses the interpreter .venv is made from.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_FLAGS ?=

# Nothing of a caller's environment may reach into ours, and no step depends on a caller's having any.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := check
.PHONY: demo test check format lint clean

demo: $(STAMP)
	@$(BIN)/flashrec demo $(DEMO_FLAGS)

test: lint
	@$(BIN)/python -m pytest tests

check: lint
	@$(BIN)/python -m pytest -q tests/unit

lint: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Editable, so that a change of a source file needs no second installation; a change of what is
# installed (pyproject.toml, constraints.txt) makes this rule run again in the same .venv.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  found=''; \
	  for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      found=$$python; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'make: no Python 3.11 or later found; say which with PYTHON=/path/to/python' >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$found (once; PyTorch is large)"; \
	  if ! $$found -m venv --clear $(VENV); then \
	    echo "make: $$found cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 1; \
	  fi; \
	fi; \
	$(PIP) install --quiet --constraint constraints.txt pip; \
	PYTHONWARNINGS='ignore:Editable installation' \
	  $(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'; \
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
