#!/usr/bin/env bash
# Cargo's RUSTC_WORKSPACE_WRAPPER for fuzzing: compiles our own crates so that libFuzzer sees which branches an input
# takes, and which constants it is compared with. Dependencies and build scripts are unchanged, so only our own code is
# built a second time, with the stable compiler.
set -euo pipefail
rustc=$1
shift
for argument in "$@"; do
  if [[ $argument == build_script_* ]]; then exec "$rustc" "$@"; fi
done
exec "$rustc" "$@" -Copt-level=2 -Cdebug-assertions=on -Coverflow-checks=on \
  -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing
