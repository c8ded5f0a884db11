# make demo   sets up .venv with what a run needs, then learns weights on the embedded digits, compares, shows table
#             and figures
# make test   adds the rest to .venv, then lint, types, architecture, tests
# make bench  measures the engine beside others, and writes docs/benchmarks.md; after make bench-others also beside
#             FedJAX and pfl-research
# make docs   builds the documentation into site/; open site/index.html
# make dist   builds the wheel and the source distribution into dist/
# make fuzz   50,000 cases of files, messages and arguments that are made wrong
# make lock   hashes of all releases in constraints.txt; then make licences, audit: see supply/README.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
EXTRAS := dev,docs,vision,flower,tracking,tables,datasets,report

.PHONY: demo test bench bench-others docs dist lint figures fuzz lock audit licences clean
.DELETE_ON_ERROR:

# Everything but torch is held against the hashes of its release; torch, which has a build for every platform, against
# those of the builds that are known. The project itself comes last, and finds all it needs there. Bytecode is not made
# for all of torch, but for what is imported, and saved then.
export PYTHONDONTWRITEBYTECODE :=
$(VENV)/.core: pyproject.toml constraints.txt requirements-core.lock
	@echo "setting up $(VENV) (once): what a run needs"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedunfold needs Python 3.11 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --no-compile --require-hashes --no-deps --requirement requirements-core.lock
	@$(PIP) --no-compile --report $(VENV)/torch.json torch
	@$(BIN)/python supply/check_torch.py $(VENV)/torch.json
	@echo "building fedunfold"
	@$(PIP) --quiet --no-index --no-build-isolation --editable .
	@touch $@ $(VENV)/.built

$(VENV)/.installed: $(VENV)/.core requirements.lock
	@echo "adding to $(VENV) (once): extras, tests and documentation"
	@$(PIP) --no-compile --require-hashes --no-deps --requirement requirements.lock
	@$(PIP) --quiet --no-index 'fedunfold[$(EXTRAS)]'
	@touch $@

# After a change of the compiled local training.
$(VENV)/.built: $(wildcard src/fedunfold/engines/simulation/backends/cpu/*.?pp) | $(VENV)/.core
	@$(PIP) --quiet --no-index --no-build-isolation --no-deps --editable .
	@touch $@

demo: $(VENV)/.built
	@$(BIN)/fedunfold demo --out runs/demo

# The figure in the README, from the demo's own run, and figure and tables of docs/when.md, from the runs' records.
figures: demo $(VENV)/.installed
	@cp runs/demo/accuracy.png docs/demo-accuracy.png
	@$(BIN)/python docs/hooks/numbers_of_runs.py

# The variable keeps the theme from advertising its successor.
docs: $(VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the documentation is in site/index.html"

# In this environment and not in one made for the build, which would need a package index.
dist: $(VENV)/.installed
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint $(VENV)/.built
	$(BIN)/python -m pytest --numprocesses 2

fuzz: $(VENV)/.installed $(VENV)/.built
	$(BIN)/python -m tests.fuzz --cases 50000

$(VENV)/.supply: $(VENV)/.installed
	@$(PIP) --quiet --editable '.[supply]'
	@touch $@

lock: $(VENV)/.supply
	$(BIN)/python supply/lock.py

audit: $(VENV)/.supply
	$(BIN)/python supply/audit.py

licences: $(VENV)/.supply
	$(BIN)/python supply/licences.py

OTHERS := .venv-others
bench: $(VENV)/.installed $(VENV)/.built
	@if [ -e $(OTHERS)/.installed ]; then \
	  $(BIN)/python -m benchmarks engine --page docs/benchmarks.md \
	    --other "FedJAX=$(OTHERS)/bin/python benchmarks/fedjax_simulation.py" \
	    --other "pfl-research=$(OTHERS)/bin/python benchmarks/pfl_simulation.py"; \
	else $(BIN)/python -m benchmarks engine --page docs/benchmarks.md; fi

bench-others: $(OTHERS)/.installed

$(OTHERS)/.installed: benchmarks/requirements.txt
	@test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	@$(OTHERS)/bin/python -m pip --disable-pip-version-check install --quiet torch==2.13.0
	@$(OTHERS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement benchmarks/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(OTHERS) build dist runs site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
