# make demo   sets up .venv, then learns weights on the embedded digits, compares, shows table and figures
# make test   sets up .venv, then lint, types, architecture, tests
# make bench  sets up .venv, then measures the engine beside others, and writes docs/benchmarks.md;
#             after make bench-others also beside FedJAX and pfl-research
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test bench bench-others lint figures clean
.DELETE_ON_ERROR:

# torch comes first and by itself: resolved together with the rest, pip may choose a build with CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedunfold needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) --editable '.[dev,vision,flower,report]'
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/fedunfold demo --out runs/demo

# The figure in the README, from the demo's own run.
figures: demo
	@cp runs/demo/accuracy.png docs/demo-accuracy.png

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest --numprocesses 2

OTHERS := .venv-others
bench: $(VENV)/.installed
	@if [ -e $(OTHERS)/.installed ]; then \
	  $(BIN)/fedunfold bench --page docs/benchmarks.md \
	    --other "FedJAX=$(OTHERS)/bin/python benchmarks/fedjax_simulation.py" \
	    --other "pfl-research=$(OTHERS)/bin/python benchmarks/pfl_simulation.py"; \
	else $(BIN)/fedunfold bench --page docs/benchmarks.md; fi

bench-others: $(OTHERS)/.installed

$(OTHERS)/.installed: benchmarks/requirements.txt
	@test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	@$(OTHERS)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.13.0
	@$(OTHERS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement benchmarks/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(OTHERS) build dist runs src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
