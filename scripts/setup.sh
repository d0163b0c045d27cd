#!/usr/bin/env bash
# Finds what the build needs beside cargo: a C++ compiler and libclang, both for RocksDB. Installs them with
# apt-get when it may, else prints the one line to run.
set -euo pipefail

missing=()
command -v cargo >/dev/null || { echo "setup: cargo is missing; install Rust 1.95 or newer with rustup" >&2; exit 1; }
command -v c++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
has_libclang() {
  [ -n "${LIBCLANG_PATH:-}" ] || ldconfig -p 2>/dev/null | grep -q 'libclang[-.]' ||
    compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null
}
has_libclang || missing+=(libclang-dev)
[ ${#missing[@]} -eq 0 ] && exit 0

line="apt-get install -y ${missing[*]}"
if command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ]; then
  echo "setup: $line"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive $line -qq >/dev/null
else
  echo "setup: missing: ${missing[*]}. Run: sudo $line" >&2
  exit 1
fi
