# make demo   set up, then train a small language model with backstash
# make test   set up, then run the tests
# make lint   style and types       make bench  measure       make docs  build the pages
#
# Everything is installed into .venv. The stamp files in it remember what was installed, so
# that the second time costs nothing until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install -qq --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
WORKERS ?= 2

.PHONY: demo test lint bench docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(RUN) -m backstash train --preset demo

test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses $(WORKERS)

lint: $(VENV)/installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

bench: $(VENV)/installed
	$(RUN) -m backstash bench saving
	$(RUN) -m backstash bench moe

docs: $(VENV)/installed-docs
	$(RUN) -m mkdocs build --strict

clean:
	rm -rf $(VENV) runs build dist site .pytest_cache .ruff_cache .hypothesis

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "backstash needs Python 3.11 or newer, and '$(PYTHON)' is older or missing;" \
	         "name another one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make a virtual environment: its venv or ensurepip module is" \
	         "missing (Debian and Ubuntu keep them in the package python3-venv); install it," \
	         "or name another Python with: make PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV) (a few minutes at most, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@$(PIP) $(TORCH) --editable '.[dev]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@$(PIP) $(TORCH) --editable '.[docs]'
	@touch $@
