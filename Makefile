# make demo    three methods on the embedded digits and a report, in under two minutes
# make test    lint, types and tests
# make docs    the documentation site, into site/
# make dist    a wheel and an sdist, checked, into dist/
# make gpu-check  does it work on this machine's GPU? prints a block to paste into an issue
# make test-engines  tests of Ray and Flower, on clusters of this machine's own
# make torture  hundreds of kills, power cuts, damaged files, full disks, dead workers: tried and failed
# make fuzz    bad configurations, data files and run folders for about an hour (FUZZ=examples per property)
# Both create .venv if needed and install into it again only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
FUZZ   ?= 10000
ENGINES := tests/flower tests/engine/test_ray_backend.py
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo gpu-check test test-engines torture fuzz lint format docs dist clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make lint    what the tests check before they start"
	@echo "make format  let ruff rewrite the layout of the code"
	@echo "make clean   delete .venv, caches and runs/demo"

demo: $(VENV)/.demo
	@$(BIN)/fedflat demo

gpu-check: $(VENV)/.dev
	@$(BIN)/python benchmarks/gpu_check.py

test: lint
	$(BIN)/python -m pytest -n auto $(addprefix --ignore ,$(ENGINES))

test-engines: $(VENV)/.engines
	$(BIN)/python -m pytest $(ENGINES)

docs: $(VENV)/.docs
	$(BIN)/python docs/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/.docs
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

torture: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m torture

fuzz: $(VENV)/.dev
	FUZZ_EXAMPLES=$(FUZZ) $(BIN)/python -m pytest tests/fuzz
	PYTHONPATH=tests $(BIN)/python -c "import pathlib, tempfile; from fuzz.run_folders import folders; \
	  wrong = folders(pathlib.Path(tempfile.mkdtemp()), $(FUZZ)); print(*wrong, sep='\n'); exit(bool(wrong))"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# The demo needs matplotlib of the report extra; the rest of that extra would take longer than the demo.
$(VENV)/.demo: $(VENV)/.torch
	@echo "installing fedflat and matplotlib …"
	@$(PIP) install -c constraints.txt -e . 'matplotlib>=3.8'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	@echo "installing fedflat with the dev extra …"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.torch
	@echo "installing fedflat with the docs extra …"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.engines: $(VENV)/.dev
	@echo "installing the extras ray and flower …"
	@$(PIP) install -c constraints.txt -e '.[ray,flower]'
	@touch $@

$(VENV)/.torch: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing torch (some 200 MB; to spare several GB of CUDA point pip at an index of CPU builds) …"
	@$(PIP) install --no-deps -c constraints.txt torch
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "fedflat needs Python 3.11 or newer, and there is no '$(PYTHON)' here:" \
	  "install it, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedflat needs Python 3.11 or newer," \
	  "and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "'$(PYTHON)' has no venv module with pip:" \
	  "install it (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "creating $(VENV) …"
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis runs/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
