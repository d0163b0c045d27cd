#!/usr/bin/env bash
# All tests. The SDK test runs in a virtual environment that this script makes, once.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-target}"
mkdir -p "$target"
target="$(cd "$target" && pwd)"

venv="$target/venv"
stamp="$venv/.requirements"
if ! cmp -s examples/agents/python/requirements.txt "$stamp"; then
  echo "test: making a Python environment for the SDK test"
  rm -rf "$venv"
  if ! python3 -m venv "$venv" 2>/dev/null; then
    if command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ]; then
      apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
      python3 -m venv "$venv"
    else
      echo "test: python3 with venv is missing. Run: sudo apt-get install -y python3-venv" >&2
      exit 1
    fi
  fi
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r examples/agents/python/requirements.txt
  cp examples/agents/python/requirements.txt "$stamp"
fi
export STARLING_TEST_PYTHON="$venv/bin/python"
export STARLING_TEST_BIN="$target/release"
# Deadlines of the mesh tests are there to end a run that hangs, not to measure this machine: three times the usual.
export STARLING_TEST_PATIENCE="${STARLING_TEST_PATIENCE:-3}"
# One test binary at a time: several start whole meshes, and two cores are shared.
cargo test --release --locked --workspace -- --test-threads=2
