#!/usr/bin/env bash
# Runs all tests, as scripts/test.sh does. What fails is run once more, alone: a busy machine can be too slow for a test
# with real programs. What passes then is named as flaky, which is a fault of that test and has to be mended.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() { cargo test --quiet --workspace --exclude tunnel-fuzz --features kubernetes "$@" 2>&1 | tee "$log"; }
# sum RESULT WORD: how many tests that is in all result lines of this kind.
sum() { awk -v word="$2;" "/^test result: $1/"' { for (i = 2; i <= NF; i++) if ($i == word) n += $(i - 1) } END { print n + 0 }' "$log"; }

if run --no-fail-fast; then exit 0; fi
# The last list of each program's failures has the names alone.
mapfile -t failed < <(sed -n '/^failures:$/,/^test result:/s/^    \([^ ]*::[^ ]*\)$/\1/p' "$log" | sort -u)
# What is no test of a module, or did not compile, has no second chance.
((${#failed[@]} > 0 && ${#failed[@]} == $(sum FAILED failed))) || exit 1
echo "-- once more, alone: ${failed[*]}"
RUST_TEST_THREADS=1 run -- --exact "${failed[@]}"
(($(sum ok passed) == ${#failed[@]})) || exit 1
echo "-- FLAKY: ${failed[*]}"
