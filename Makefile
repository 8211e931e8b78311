# One entry for everything. Each target does the set-up it needs; `make help` lists them.
SHELL := /bin/bash
PY := .venv/bin/python
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help setup demo test test-rust test-python lint bench fuzz soak docs clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## install what is missing; build the package (release) into .venv
	@tools/setup.sh

demo: setup ## the main job on real data; DATA=folder imports your own images
	@$(PY) examples/demo.py $(if $(DATA),--data "$(DATA)")

test: setup ## all tests: layers, Rust, Python, README tour, demo
	@tools/test.sh

lint: setup ## formatting, clippy, ruff, mypy, layer table
	@tools/lint.sh

bench: setup ## measure against the machine and rivals; PHOTOS=folder of JPEGs
	@tools/setup.sh bench
	@tools/rivals.sh
	@$(PY) bench/run.py $(if $(PHOTOS),--photos "$(PHOTOS)")

fuzz: ## fuzz every parser, SECONDS=60 each
	@tools/fuzz.sh $(or $(SECONDS_EACH),60)

soak: setup ## the long proofs: 10,000 crashes, every bit flipped, 200 kills, planted errors (MUTANTS=40)
	@tools/soak.sh

docs: setup ## API pages of the Rust crates, doctests of Python
	@source tools/env.sh && cargo doc --no-deps --workspace --exclude penstock-python
	@$(PY) -m pytest --doctest-modules python/penstock -p no:cacheprovider

clean: ## remove everything that was built
	rm -rf target .venv .tools fuzz/target fuzz/corpus fuzz/artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
