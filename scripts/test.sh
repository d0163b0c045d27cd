#!/usr/bin/env bash
# All tests. The SDK tests run in virtual environments that this script makes, once, one a package.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-target}"
mkdir -p "$target"
target="$(cd "$target" && pwd)"

# environment NAME REQUIREMENTS: a virtual environment with what the file lists, made once.
environment() {
  local venv="$target/$1" stamp="$target/$1/.requirements"
  cmp -s "$2" "$stamp" && return
  echo "test: making the Python environment $1"
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
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$2"
  cp "$2" "$stamp"
}
environment venv examples/agents/python/requirements.txt
environment venv-anthropic tests/python/requirements-anthropic.txt
export STARLING_TEST_PYTHON="$target/venv/bin/python"
export STARLING_TEST_PYTHON_ANTHROPIC="$target/venv-anthropic/bin/python"
export STARLING_TEST_BIN="$target/release"
# Deadlines of the mesh tests are there to end a run that hangs, not to measure this machine: three times the usual.
export STARLING_TEST_PATIENCE="${STARLING_TEST_PATIENCE:-3}"
# The test that cuts real networks uses nft inside network namespaces of its own; without it that test says so and is skipped.
if ! command -v nft >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ]; then
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq nftables iproute2; } >/dev/null 2>&1 ||
    echo "test: nftables could not be installed" >&2
fi
# One test binary at a time: several start whole meshes, and two cores are shared.
cargo test --release --locked --workspace -- --test-threads=2
# The simulator's checkers, against bugs planted on purpose: a build of its own, so that no other binary has the bugs.
cargo test --release --locked -p starling-simulations --features planted-bugs --test planted
