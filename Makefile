# The single entry point. Each target does the setup it needs; `make help` lists the targets.
SHELL := /bin/bash
PY := .venv/bin/python
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help setup demo test lint licences bench wheel fuzz soak docs clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## install what is missing; build the package (release) into .venv
	@tools/setup.sh

demo: setup ## run the demo on real data; DATA=folder imports your own images
	@$(PY) examples/demo.py $(if $(DATA),--data "$(DATA)")

test: setup ## run all tests: layers, Rust, Python, README tour, demo
	@tools/test.sh

lint: setup ## check formatting, lints, types, layers, sizes, unused dependencies and typing errors
	@tools/lint.sh

licences: ## check the licences of Rust dependencies
	@tools/licences.sh

wheel: setup ## build the wheel that users install, in dist/ (link-time optimised; about 5 minutes)
	@tools/wheel.sh

bench: ## benchmark against the machine's limits and rivals; PHOTOS=folder of JPEGs
	@PENSTOCK_PROFILE=dist tools/setup.sh bench
	@tools/rivals.sh
	@$(PY) bench/run.py $(if $(PHOTOS),--photos "$(PHOTOS)")

fuzz: ## fuzz every parser for SECONDS_EACH=60 seconds
	@tools/fuzz.sh $(or $(SECONDS_EACH),60)

soak: setup ## run the long tests: 200,000 orders of replies, 10,000 crashes, every bit flipped, 200 kills, storms, planted errors (MUTANTS=40)
	@tools/soak.sh

docs: setup ## build the Rust API docs and run the Python doctests
	@source tools/env.sh && cargo doc --no-deps --workspace --exclude penstock-python
	@$(PY) -m pytest --doctest-modules python/penstock -p no:cacheprovider

clean: ## remove all build products
	rm -rf target .venv .tools fuzz/target fuzz/corpus fuzz/artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
