#!/usr/bin/env bash
# Install the servers that tests and benchmarks start into .tools: MinIO, Versity's S3 gateway, Azurite. Also installs a browser. Quick if nothing is missing.
# Usage: tools/servers.sh [minio | clients]   minio installs only MinIO; clients also installs the programs that use `penstock serve` in long tests: awscli, s3fs, minio-py, rclone.
set -euo pipefail
source "$(dirname "$0")/env.sh"
[ -x /usr/local/go/bin/go ] && export PATH="$PATH:/usr/local/go/bin"
mkdir -p .tools/bin

need() { # need COMMAND PACKAGE
  command -v "$1" >/dev/null || install_packages "$2"
}

go_tool() { # go_tool NAME PACKAGE VERSION
  [ -x ".tools/bin/$1" ] && [ "$(cat ".tools/bin/$1.version" 2>/dev/null)" = "$3" ] && return
  need go golang-go
  echo "building $1"
  # The modules need a newer Go than distributions ship; with GOTOOLCHAIN=auto the go command downloads it.
  GOTOOLCHAIN=auto GOBIN="$PWD/.tools/bin" go install "$2@$3"
  echo "$3" > ".tools/bin/$1.version"
}

go_tool minio github.com/minio/minio v0.0.0-20260212201848-7aac2a2c5b7c
[ "${1:-}" = minio ] && exit 0
# The status page of `penstock serve` is looked at in a browser.
command -v chromium >/dev/null || install_packages chromium
go_tool versitygw github.com/versity/versitygw/cmd/versitygw v1.8.0
azurite=3.35.0
if [ "$(cat .tools/azurite/version 2>/dev/null)" != "$azurite" ]; then
  need npm npm
  echo "installing azurite"
  rm -rf .tools/azurite && mkdir -p .tools/azurite
  echo '{"private": true}' > .tools/azurite/package.json
  (cd .tools/azurite && npm install --silent --no-audit --no-fund "azurite@$azurite" >/dev/null)
  echo "$azurite" > .tools/azurite/version
fi
if [ "${1:-}" = clients ]; then
  go_tool rclone github.com/rclone/rclone v1.76.0
  [ -x .tools/clients/bin/aws ] || { .venv/bin/uv venv -q .tools/clients && .venv/bin/uv pip install -q --python .tools/clients/bin/python awscli==1.46.3 s3fs==2026.9.0 minio==7.2.20; }
fi
