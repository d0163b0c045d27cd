#!/usr/bin/env bash
# What must hold of the sources, without running them. Writes nothing but the target directory.
set -euo pipefail
cd "$(dirname "$0")/.."

echo "verify: formatting"
cargo fmt --all --check
echo "verify: lints"
cargo clippy --release --locked --workspace --all-targets -- -D warnings
echo "verify: docs"
RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --workspace --no-deps --document-private-items
echo "verify: purity of the protocol crate"
# The sans-IO core may know no runtime, network, disk or tensor library.
if cargo tree -p starling-protocol -e normal --prefix none | grep -E '^(tokio|libp2p|rocksdb|candle|axum|openraft)'; then
  echo "verify: starling-protocol must not depend on these" >&2
  exit 1
fi
echo "verify: only the mesh and its node know libp2p"
for crate in starling-core starling-gateway starling-agents starling-engine starling-storage; do
  if cargo tree -p "$crate" -e normal --prefix none | grep -qE '^libp2p '; then
    echo "verify: $crate must not depend on libp2p" >&2
    exit 1
  fi
done
echo "verify: ok"
