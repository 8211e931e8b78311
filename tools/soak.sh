#!/usr/bin/env bash
# Run all long tests: 200,000 orders of answers in the commit protocol, all runs of three writers with up to two faults, 10,000 seeded crashes, 10,000 fault schedules against MinIO, every
# bit of a dataset flipped, 200 kills, storms of writers, and long model tests.
# Then plant the errors of tests/planted, all of which must be caught, and MUTANTS others (default: 40) in dataset, loader and importers, for MUTANTS_MINUTES (default: 120). The tests must catch at least
# 85 % of them.
set -euo pipefail
source "$(dirname "$0")/env.sh"
tools/servers.sh clients
# The schedules of faults measure the memory of their process, so nothing else runs in it.
PENSTOCK_SOAK=1 cargo test --release -p penstock-testkit --locked -- --nocapture --skip remote::
PENSTOCK_SOAK=1 cargo test --release -p penstock-testkit --locked --test proofs remote:: -- --nocapture
PENSTOCK_SOAK=1 .venv/bin/python -m pytest tests -m "soak or long" -p no:cacheprovider -rA
PENSTOCK_SOAK=1 .venv/bin/python -m pytest tests/every_store/test_storms.py --store s3 -m "soak" -p no:cacheprovider -rA
PENSTOCK_ROTATION=all .venv/bin/python -m pytest tests/every_store --store azure,buffered,cached,direct,proxy,s3,versity -m "not soak and not data" -p no:cacheprovider
PENSTOCK_MODEL_SEEDS=2000 .venv/bin/python -m pytest tests/*/test_*_model.py -p no:cacheprovider -rA

[ -x .tools/bin/cargo-mutants ] || cargo install cargo-mutants --version 27.1.0 --locked --root .tools -q
.venv/bin/uv pip install -q --python .venv/bin/python "cosmic-ray>=8,<9"
.venv/bin/python tools/mutants.py --patches tests/planted --least 1
PATH="$PWD/.tools/bin:$PATH" .venv/bin/python tools/mutants.py --sample "${MUTANTS:-40}" --minutes "${MUTANTS_MINUTES:-120}"
