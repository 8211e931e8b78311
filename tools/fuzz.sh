#!/usr/bin/env bash
# Fuzz every parser with libFuzzer: tools/fuzz.sh [SECONDS], 60 seconds per parser by default.
# Installs the nightly toolchain and cargo-fuzz if they are missing.
set -euo pipefail
source "$(dirname "$0")/env.sh"
unset CARGO_TARGET_DIR
rustup toolchain list | grep -q nightly || rustup toolchain install nightly --profile minimal
if ! command -v cargo-fuzz >/dev/null && [ ! -x .tools/bin/cargo-fuzz ]; then
  cargo install -q --locked --root .tools cargo-fuzz
fi
export PATH="$PWD/.tools/bin:$PATH"
for target in $(cd fuzz && ls fuzz_targets | sed 's/\.rs$//'); do
  echo "== $target"
  mkdir -p "fuzz/corpus/$target"
  cargo +nightly fuzz run "$target" -- -max_total_time="${1:-60}" -max_len=65536 -rss_limit_mb=2048 -print_final_stats=1 2>&1 | tail -n 6
done
