# Everything a contributor types. `make demo` and `make test` are the two to begin with.
SHELL := /bin/bash
CARGO ?= cargo
# One profile for demo, tests and benches: RocksDB and candle compile once.
PROFILE := --release
TARGET := $(or $(CARGO_TARGET_DIR),target)

.PHONY: help build demo test bench verify audit fmt setup

help:
	@echo "make build    compile everything"
	@echo "make demo     a mesh of five processes trains, loses its leader, heals (about 5 minutes)"
	@echo "make test     all tests, with a Python environment of its own for the SDK test"
	@echo "make bench    measure this machine"
	@echo "make verify   formatting, lints, docs, purity of the protocol crate"
	@echo "make audit    known vulnerabilities and licences of dependencies (needs cargo-deny)"

setup:
	@scripts/setup.sh

build: setup
	$(CARGO) build $(PROFILE) --locked --workspace

demo: build
	$(TARGET)/release/starling demo --report report

test: build
	scripts/test.sh

# The peer is a package of its own, so that nothing of it comes into our binaries.
bench: build
	$(CARGO) build $(PROFILE) --locked --manifest-path tests/peers/iroh-blobs/Cargo.toml --target-dir $(TARGET)/peers
	STARLING_LOG=error $(TARGET)/release/starling bench all

fmt:
	$(CARGO) fmt --all

verify: setup
	scripts/verify.sh

audit:
	$(CARGO) deny --locked check
