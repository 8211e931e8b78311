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

test: setup ## run all tests: layers, Rust, Python, pages of the site, demo
	@tools/test.sh

lint: setup ## check formatting, lints, types, layers, sizes, unused dependencies and typing errors
	@tools/lint.sh

licences: ## check the licences of Rust dependencies
	@tools/licences.sh

wheel: setup ## build the wheel that users install, in dist/ (link-time optimised; about 5 minutes)
	@tools/wheel.sh

bench: ## benchmark against the machine's limits and rivals; PHOTOS=folder of JPEGs, BENCH="--quick" or names of benchmarks
	@tools/servers.sh minio & server=$$!; PENSTOCK_PROFILE=dist tools/setup.sh bench && wait $$server
	@$(PY) tools/rivals.py & rivals=$$!; source tools/env.sh && cargo build --release --quiet --locked --workspace --bins && wait $$rivals
	@$(PY) bench/run.py $(if $(PHOTOS),--photos "$(PHOTOS)") $(BENCH); code=$$?; $(PY) bench/report.py; exit $$code

fuzz: ## fuzz every parser for SECONDS_EACH=60 seconds
	@tools/fuzz.sh $(or $(SECONDS_EACH),60)

soak: setup ## run the long tests: 200,000 orders of replies, 10,000 crashes, every bit flipped, 200 kills, storms, planted errors (MUTANTS=40)
	@tools/soak.sh

docs: ## build the site in target/site, look at its pages if there is a browser, and build the Rust API docs
	@tools/setup.sh docs
	@$(PY) docs/build.py
	@if command -v chromium >/dev/null; then $(PY) tools/look.py; else echo "no Chromium: pages were not opened"; fi
	@source tools/env.sh && cargo doc --no-deps --workspace --exclude penstock-python

clean: ## remove all build products
	rm -rf target .venv .tools fuzz/target fuzz/corpus fuzz/artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
