#!/usr/bin/env bash
# Run all tests. The last line is `N passed, N failed, N skipped`. The exit status is 0 only if nothing failed.
# With CI=true, a skipped test that tests/skips.txt does not list counts as a failure.
set -uo pipefail
source "$(dirname "$0")/env.sh"
log=$(mktemp -d)
trap 'rm -rf "$log"; for lane in "${lanes[@]:-}"; do [ -z "$lane" ] || kill -- "-$lane" 2>/dev/null; done' EXIT

passed=0 failed=0 skipped=0
step() { # step NAME COMMAND…: runs a command, which counts as one test
  echo "== $1"
  local name=$1; shift
  if "$@" > "$log/step" 2>&1; then passed=$((passed + 1)); tail -n "${SHOW:-3}" "$log/step"; else failed=$((failed + 1)); tail -n 60 "$log/step"; echo "FAILED: $name"; fi
}

step "layers" .venv/bin/python tools/check_layers.py
select="not soak"
[ -n "${PENSTOCK_TEST_DATA:-}" ] || select="not soak and not data"
# Each test runs locally and on one other store, or on three in tests/every_store. Seeded tests use different seeds in each run. The printed
# number reproduces both choices.
export PENSTOCK_ROTATION=${PENSTOCK_ROTATION:-$RANDOM}
echo "== PENSTOCK_ROTATION=$PENSTOCK_ROTATION"

start() { # start NAME ARGUMENT…: runs pytest and writes its output to a file
  local name=$1; shift
  .venv/bin/python -m pytest -p no:cacheprovider -rs "$@" > "$log/$name" 2>&1
}
count_of() { # count_of NAME: prints the output of a pytest run and adds its counts to the totals
  local name=$1 line p f e s
  echo "== python: $name"
  cat "$log/$name" 2>/dev/null | tee -a "$log/all"
  line=$(grep -E "^[0-9]+ (passed|failed|skipped|error).* in |^=+ .* in .*=+$|no tests ran" "$log/$name" | tail -n 1)
  count() { grep -oE "[0-9]+ $1" <<< "$line" | grep -oE "[0-9]+" | head -n 1; }
  p=$(count passed); f=$(count failed); e=$(count "errors?"); s=$(count skipped)
  passed=$((passed + ${p:-0})); failed=$((failed + ${f:-0} + ${e:-0})); skipped=$((skipped + ${s:-0}))
  [ "${p:-0}" -gt 0 ] || { failed=$((failed + 1)); echo "FAILED: no tests passed in $name"; }
}
# Run the same suite on other stores: MinIO, the faulty proxy, two other servers, and local disk without maps or without the page cache.
stores() { start "$1" tests --store "$1" -m "not soak and not data and not local"; }

# The servers are installed while Rust compiles.
tools/servers.sh > "$log/servers" 2>&1 &
installing=$!
rust=(--release --workspace --locked)
cargo build --release --workspace --bins --locked -q || { failed=$((failed + 1)); echo "FAILED: cannot build the test servers"; }
cargo test "${rust[@]}" --no-run -q > "$log/compile" 2>&1 || { failed=$((failed + 1)); tail -n 40 "$log/compile"; echo "FAILED: cannot build the Rust tests"; }
wait "$installing" || { failed=$((failed + 1)); tail -n 40 "$log/servers"; echo "FAILED: cannot install the test servers"; }
export PENSTOCK_BUILT=1

# Three parts of the tests run at a time. A single one would often wait for servers and disks; three keep two processors busy. The longest begin
# first. Job control is on because tests send Ctrl-C, which background jobs would otherwise ignore. Idle threads of NumPy and torch must not spin
# on processors that the parts share.
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
set -m
lane() { # lane COMMAND…: runs a command in the background, once fewer than three run
  while [ "$(jobs -rp | wc -l)" -ge 3 ]; do wait -n; done
  "$@" &
  lanes+=($!)
}
alone=(server dataset loader stores docs)
for part in server dataset; do lane start "$part" "tests/$part" -m "$select"; done
lane stores s3,proxy,versity,azure
lane start rest tests python/penstock "${alone[@]/#/--ignore=tests/}" --doctest-modules -m "$select"
for part in loader stores docs; do lane start "$part" "tests/$part" -m "$select"; done
lane cargo test "${rust[@]}" > "$log/rust" 2>&1
lane stores buffered,cached,direct
wait "${lanes[@]}"
lanes=()
set +m

echo "== rust"
grep -E "^(test result: [^o]|error|failures|---- )|FAILED|panicked" "$log/rust" || true
while read -r p f i; do passed=$((passed + p)); failed=$((failed + f)); skipped=$((skipped + i)); done \
  < <(sed -nE 's/^test result: .* ([0-9]+) passed; ([0-9]+) failed; ([0-9]+) ignored.*/\1 \2 \3/p' "$log/rust")
grep -qE "^error|could not compile" "$log/rust" && { failed=$((failed + 1)); tail -n 40 "$log/rust"; }
grep -q "^test result" "$log/rust" || { failed=$((failed + 1)); echo "FAILED: no Rust tests ran"; }
SHOW=40 step "demo" .venv/bin/python examples/demo.py
for name in "${alone[@]}" rest buffered,cached,direct s3,proxy,versity,azure; do count_of "$name"; done

if [ "${CI:-}" = true ] && [ "$skipped" -gt 0 ]; then
  # One reason may stand for several tests. Ignored Rust tests have no line, so they are never listed.
  shown=$(sed -nE 's/^SKIPPED \[([0-9]+)\].*/\1/p' "$log/all" | awk '{ sum += $1 } END { print sum + 0 }')
  unlisted=$(grep -E "^SKIPPED" "$log/all" | grep -vFf <(grep -vE '^\s*(#|$)' tests/skips.txt | cut -f1 || true) || true)
  if [ "$shown" != "$skipped" ] || [ -n "$unlisted" ]; then
    failed=$((failed + 1)); echo "FAILED: skipped tests that tests/skips.txt does not list"; echo "$unlisted"
  fi
fi
[ "$failed" = 0 ] || echo "replay with PENSTOCK_ROTATION=$PENSTOCK_ROTATION"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
