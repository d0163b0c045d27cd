# Everything a contributor types. `make demo` and `make test` are the two to begin with.
SHELL := /bin/bash
CARGO ?= cargo
# One profile for demo, tests and benches: RocksDB and candle compile once.
PROFILE := --release
# Of `make soak`.
HOURS ?= 2
SEED ?= 1
TARGET := $(or $(CARGO_TARGET_DIR),target)

.PHONY: help build demo test soak bench verify audit fmt setup

help:
	@echo "make build    compile everything"
	@echo "make demo     a mesh of five processes trains, loses its leader, heals (about 5 minutes)"
	@echo "make test     all tests, with a Python environment of its own for the SDK test"
	@echo "make soak     hours of churn, cuts and kills, judged (HOURS=2 SEED=1); root, for the cuts"
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

soak: build
	$(TARGET)/release/soak --hours $(HOURS) --seed $(SEED) --log soak/$(shell date +%Y%m%d-%H%M%S)

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
