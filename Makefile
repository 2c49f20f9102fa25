# `make help` lists what there is. Everything runs in .venv, which `make env` makes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Keyed on pyproject.toml: the environment is renewed when the requirements change.
HASH := $(shell cksum < pyproject.toml | tr -d ' ')
STAMP := $(VENV)/.made-from-$(HASH)
# Tests on real brokers mostly wait: a few more processes than cores pay.
JOBS ?= 6
BROKER ?=
MINUTES ?= 5
STORES ?= sqlite redis postgresql mysql
CELERY_VERSIONS ?= 5.5 5.6 5.7

.PHONY: help env servers lint format type unit test demo compat compat-smoke soak bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | \
		awk -F '\t' '{ printf "  %-14s %s\n", $$1, $$2 }'

env: $(STAMP) ## make .venv with everything that development needs

$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -qq -e '.[all]' --group dev
	@rm -f $(VENV)/.made-from-*
	@touch $@

servers: ## make sure that Redis, RabbitMQ, PostgreSQL and MariaDB are installed
	@scripts/need-servers

lint: env ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: env ## let ruff put right what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: env ## mypy --strict
	$(BIN)/mypy

unit: env ## the tests that need no server
	$(BIN)/pytest tests/unit -n 2

test: env servers lint type compat-smoke ## lint, types, the oldest Celery, all tests (own servers)
	$(BIN)/pytest -n $(JOBS) --dist worksteal

demo: env ## thousands of delayed tasks, a kill -9, a summary; no server (or BROKER=redis://…)
	@BROKER='$(BROKER)' $(BIN)/python -m celery_wheel.demo

compat-smoke: servers ## the marked worker tests on the oldest supported Celery
	@$(MAKE) --no-print-directory compat CELERY_VERSIONS=5.5

compat: servers ## the marked worker tests on every supported Celery
	@for version in $(CELERY_VERSIONS); do scripts/compat "$$version" || exit 1; done

soak: env servers ## workers and servers killed at random: MINUTES for each of STORES, and the books
	@failed=; for store in $(STORES); do \
		$(BIN)/python -m tests.crash.soak --minutes $(MINUTES) --store $$store --faults || failed=1; \
	done; \
	$(BIN)/python -m tests.crash.soak --minutes $(MINUTES) --broker redis --prefork --early || failed=1; \
	test -z "$$failed"

bench: env ## the benchmarks (minutes; leave the machine alone meanwhile)
	$(BIN)/python -m benchmarks

clean: ## remove what was built, environments included
	rm -rf .venv .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
