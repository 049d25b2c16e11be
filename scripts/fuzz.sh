#!/usr/bin/env bash
# Fuzzes every target of tests/fuzz/Cargo.toml, one per core at a time.
#
#   scripts/fuzz.sh [SECONDS for each, default 60] [TARGET...]
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
case ${1:-} in *[!0-9]*) wrong "$1" ;; esac
cd "$(dirname "$0")/.."

seconds=${1:-60}
shift || true
targets=("$@")
if ((${#targets[@]} == 0)); then
  mapfile -t targets < <(sed -n 's/^name = "fuzz-\(.*\)"$/\1/p' tests/fuzz/Cargo.toml)
fi

RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/fuzz-rustc.sh cargo build --quiet -p tunnel-fuzz
built=${CARGO_TARGET_DIR:-target}/debug

fuzz() {
  local target=$1 log corpus=tests/fuzz/corpus/$1 artifacts=tests/fuzz/artifacts/$1
  mkdir -p "$corpus" "$artifacts"
  log=$artifacts/log
  local command=("$built/fuzz-$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1
    -artifact_prefix="$artifacts/" "$corpus")
  # Initial inputs, written by hand.
  if [[ -d tests/fuzz/seeds/$target ]]; then command+=("tests/fuzz/seeds/$target"); fi
  # Words that random mutation would not find.
  if [[ -f tests/fuzz/$target.dict ]]; then command+=(-dict="tests/fuzz/$target.dict"); fi
  if ! "${command[@]}" >"$log" 2>&1; then
    tail -n 60 "$log"
    echo "$target: failed; the input is in $artifacts"
    return 1
  fi
  local runs found
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  found=$(grep -c . < <(ls "$corpus"))
  if ! grep -q ' cov: [1-9][0-9]' "$log"; then
    tail -n 20 "$log"
    echo "$target: no coverage reported, so this was not fuzzing"
    return 1
  fi
  echo "$target: $runs runs in $seconds s, $found inputs with new coverage, no failures"
}
export -f fuzz
export built seconds
printf '%s\0' "${targets[@]}" | xargs -0 -P "$(nproc)" -I{} bash -euo pipefail -c 'fuzz {}'
