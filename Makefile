# Two commands on a fresh machine: `make t5` and `make test`. Everything is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: t5 test check clean

t5: $(VENV)/.installed
	$(BIN)/accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml recipes/t5.py --config recipes/configs/t5_docstrings.yaml

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(INSTALL) -e '.[test]'
	touch $@
