#!/usr/bin/env bash
# All tests. The last line is `N passed, N failed, N skipped`; the exit status is 0 only when nothing failed, and,
# with CI=true, when nothing was skipped but what tests/skips.txt lists.
set -uo pipefail
source "$(dirname "$0")/env.sh"
log=$(mktemp -d)
trap 'rm -rf "$log"; [ -z "${beside:-}" ] || kill -- "-$beside" 2>/dev/null' EXIT

passed=0 failed=0 skipped=0
step() { # step NAME COMMAND…: counts as one test
  echo "== $1"
  local name=$1; shift
  if "$@" > "$log/step" 2>&1; then passed=$((passed + 1)); tail -n "${SHOW:-3}" "$log/step"; else failed=$((failed + 1)); tail -n 60 "$log/step"; echo "FAILED: $name"; fi
}

step "layer table" .venv/bin/python tools/check_layers.py
tools/servers.sh || { failed=$((failed + 1)); echo "FAILED: no servers"; }
select="not soak"
[ -n "${PENSTOCK_TEST_DATA:-}" ] || select="not soak and not data"
start() { # start NAME ARGUMENT…: runs pytest; its output goes to a file
  local name=$1; shift
  .venv/bin/python -m pytest -p no:cacheprovider -rs "$@" > "$log/$name" 2>&1
}
count_of() { # count_of NAME: shows what ran, and adds its counts
  local name=$1 line p f e s
  echo "== python: $name"
  cat "$log/$name" 2>/dev/null | tee -a "$log/all"
  line=$(grep -E "^[0-9]+ (passed|failed|skipped|error).* in |^=+ .* in .*=+$|no tests ran" "$log/$name" | tail -n 1)
  count() { grep -oE "[0-9]+ $1" <<< "$line" | grep -oE "[0-9]+" | head -n 1; }
  p=$(count passed); f=$(count failed); e=$(count "errors?"); s=$(count skipped)
  passed=$((passed + ${p:-0})); failed=$((failed + ${f:-0} + ${e:-0})); skipped=$((skipped + ${s:-0}))
  [ "${p:-0}" -gt 0 ] || { failed=$((failed + 1)); echo "FAILED: no test of $name passed"; }
}
# The same suite with its datasets elsewhere: on MinIO, through the faulty proxy, on two other servers, and on disk without maps, through the page cache and past it.
stores() { for store in "$@"; do start "$store" tests --store "$store" -m "not soak and not data and not local"; done; }
# Two lanes, since most of these tests wait for servers and disks. Job control, as else what runs beside would not heed Ctrl-C, which tests send.
set -m
{
  start local tests python/penstock --doctest-modules -m "$select" --durations=5
  stores buffered direct
} &
beside=$!
set +m

echo "== rust"
cargo test --release --workspace --exclude penstock-python --locked 2>&1 | tee "$log/rust" | grep -E "^(test result|error|failures|---- )|FAILED|panicked" || true
while read -r p f i; do passed=$((passed + p)); failed=$((failed + f)); skipped=$((skipped + i)); done \
  < <(sed -nE 's/^test result: .* ([0-9]+) passed; ([0-9]+) failed; ([0-9]+) ignored.*/\1 \2 \3/p' "$log/rust")
grep -qE "^error|could not compile" "$log/rust" && { failed=$((failed + 1)); tail -n 40 "$log/rust"; }
grep -q "^test result" "$log/rust" || { failed=$((failed + 1)); echo "FAILED: no Rust test ran"; }

stores s3 proxy versity azure
wait "$beside"
beside=
for name in local s3 proxy versity azure buffered direct; do count_of "$name"; done

SHOW=40 step "demo" .venv/bin/python examples/demo.py

if [ "${CI:-}" = true ] && [ "$skipped" -gt 0 ]; then
  allowed=$(grep -cvE '^\s*(#|$)' tests/skips.txt || true)
  unlisted=$(grep -E "^SKIPPED" "$log/all" | grep -vFf <(grep -vE '^\s*(#|$)' tests/skips.txt | cut -f1 || true) || true)
  if [ "$allowed" -lt "$skipped" ] || [ -n "$unlisted" ]; then
    failed=$((failed + 1)); echo "FAILED: skipped tests that tests/skips.txt does not list"; echo "$unlisted"
  fi
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
