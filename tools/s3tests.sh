#!/usr/bin/env bash
# Run ceph's s3-tests against `penstock serve` before a folder, and compare with tests/server/s3tests.txt.
# Usage: tools/s3tests.sh CHECKOUT   a checkout of github.com/ceph/s3-tests at 8f0ae7b404a3a2fcf7038bf1e6bf29544fe9b6a3.
# Fails if a test fails that is not listed there with a reason. Tests that pass now but are not listed as passed are printed.
set -euo pipefail
source "$(dirname "$0")/env.sh"
checkout=$(realpath "${1:?name a checkout of ceph/s3-tests}")
scratch=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$scratch"' EXIT
.venv/bin/uv venv -q "$scratch/venv" --python .venv/bin/python
VIRTUAL_ENV="$scratch/venv" .venv/bin/uv pip install -q PyYAML boto3 munch gevent isodate requests pytz httplib2 lxml pytest
port=$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# Every user of the sample configuration becomes a key of the server.
.venv/bin/python - "$checkout/s3tests.conf.SAMPLE" "$scratch" "$port" <<'PY'
import configparser, json, pathlib, sys
sample, scratch, port = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
config = configparser.RawConfigParser()
config.read(sample)
config.defaults().update({"host": "127.0.0.1", "port": port, "is_secure": "False"})
keys = {}
for section in config.sections():
    if config.has_option(section, "access_key"):
        keys[config.get(section, "access_key")] = config.get(section, "secret_key")
(scratch / "keys.json").touch(0o600)
(scratch / "keys.json").write_text(json.dumps({"keys": [{"access_key": key, "secret_key": secret} for key, secret in keys.items()]}))
with (scratch / "s3tests.conf").open("w") as out:
    config.write(out)
PY
mkdir "$scratch/data"
.venv/bin/penstock serve --cold "$scratch/data" --listen "127.0.0.1:$port" --keys "$scratch/keys.json" 2> "$scratch/server.log" & server=$!
sleep 2
# Whole parts of S3 that a folder does not have.
marks="not lifecycle and not bucket_logging and not encryption and not sse_s3 and not bucket_policy and not object_ownership and not tagging
  and not cloud_transition and not iam_account and not iam_tenant and not iam_user"
names="not acl and not versioning and not cors and not lock and not website and not logging and not post_object and not torrent and not policy
  and not public_block and not ownership and not grant and not kms and not sse and not notif"
(cd "$checkout" && S3TEST_CONF="$scratch/s3tests.conf" "$scratch/venv/bin/pytest" s3tests/functional/test_s3.py -q -p no:cacheprovider --tb=no -rA \
  -m "${marks//$'\n'/ }" -k "${names//$'\n'/ }" > "$scratch/log") || true
.venv/bin/python - "$scratch/log" tests/server/s3tests.txt <<'PY'
import re, sys
found = {name: word for word, name in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED)\b.*?::(test_\w+)", open(sys.argv[1]).read(), re.M)}
listed = {}
for line in open(sys.argv[2]):
    if line.strip() and not line.startswith("#"):
        word, name = line.split("\t")[:2]
        listed[name.strip()] = word
broken = sorted(name for name, word in listed.items() if word == "passed" and found.get(name) != "PASSED")
broken += sorted(name for name, word in found.items() if word in ("FAILED", "ERROR") and name not in listed)
new = sorted(name for name, word in found.items() if word == "PASSED" and listed.get(name) != "passed")
print(f"{sum(word == 'PASSED' for word in found.values())} passed of {len(found)} that ran; {len(broken)} broken, {len(new)} new")
for name in broken:
    print("broken:", name)
for name in new:
    print("new:", name)
sys.exit(bool(broken) or not found)
PY
