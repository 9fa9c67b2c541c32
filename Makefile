# Sets up its own environment: every target works in a fresh clone with nothing but python3 and make.

PYTHON      ?= python3
WORKERS     ?= 2
VENV        := .venv
BIN         := $(VENV)/bin
INSTALL     := $(BIN)/python -m pip install -qq --disable-pip-version-check
CONSTRAINED := $(INSTALL) --constraint constraints.txt --build-constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test quick test-gpu check docs bench clean browser

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready  ## Train a translator on this machine, and see where each word came from
	@$(BIN)/regard demo

# Each worker has one thread, because two test processes with two threads each would wait for one another. The tests are
# divided among the workers, and one that is done takes tests of another. Bytecode is cached, because tests start many
# processes.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
LONG   := slow or browser or interpreted or installed or process or cuda

test: check browser  ## Lint, check types and run every test
	@$(PYTEST)

quick: check  ## Lint, types and the tests that take no second, no browser and no process of their own
	@$(PYTEST) -m "not ($(LONG))"

test-gpu: $(VENV)/.ready  ## The tests that need a GPU; WORKERS=8 runs eight at once
	@$(PYTEST) -m cuda

# The pages are tested in a real browser: an installed Chromium, or Debian's package if it can be installed.
browser:
	@command -v chromium >/dev/null 2>&1 || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && echo "Installing Chromium for the browser tests ..." && \
	  { apt-get install -y -qq chromium >/dev/null 2>&1 || \
	    { apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq chromium >/dev/null 2>&1; }; }; } || \
	  echo "NO CHROMIUM: the browser tests will be skipped (install Debian's chromium to run them)"

check: $(VENV)/.ready  ## Lint, formatting and types alone
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check

docs: $(VENV)/.docs  ## Build the documentation into site/
	@PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=tools $(BIN)/zensical build --clean --strict
	@$(BIN)/python tools/site_links.py site

bench: $(VENV)/.ready  ## Time ten typical calls on this machine, then regard beside its peers
	@$(BIN)/python benchmarks/attention.py
	@$(BIN)/regard bench attention

clean:  ## Remove everything that was built, the environment too
	rm -rf $(VENV) build dist site demo .pytest_cache .hypothesis .ruff_cache .cache
	find src tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "regard needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing)."; \
	  echo "Name another one: make PYTHON=python3.12"; exit 1; } >&2
	@echo "Creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The stamp has the time of the last complete install, so a changed pin or dependency causes a new one. pip is updated
# first, because older ones do not support dependency groups; then torch is installed alone, so that no other package
# selects its version.
$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing regard and its tools into $(VENV) (torch is large: the first time takes minutes) ..."
	@$(INSTALL) --constraint constraints.txt --upgrade pip
	@$(CONSTRAINED) "$$(grep '^torch==' constraints.txt)"
	@$(CONSTRAINED) --editable . --group dev
	@touch $@

$(VENV)/.docs: $(VENV)/.ready pyproject.toml
	@echo "Installing the documentation tools into $(VENV) ..."
	@$(CONSTRAINED) --group docs
	@touch $@
