#!/usr/bin/env bash
# The long proofs, whole: 10,000 seeded crashes, 10,000 schedules of faults before MinIO, every bit of a dataset flipped, 200 kills, model tests at length.
set -euo pipefail
source "$(dirname "$0")/env.sh"
tools/servers.sh
PENSTOCK_SOAK=1 cargo test --release -p penstock-testkit --locked -- --nocapture
PENSTOCK_SOAK=1 .venv/bin/python -m pytest tests -m "soak" -p no:cacheprovider -rA
