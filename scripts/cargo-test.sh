#!/usr/bin/env bash
# Runs all tests, as scripts/test.sh does. Failed tests are run once more, one by one: a busy machine can be too slow
# for a test with real programs. Tests that pass then are reported as flaky, which is a bug of the test and must be
# fixed.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() { cargo test --quiet --workspace --exclude tunnel-fuzz "$@" 2>&1 | tee "$log"; }
# sum RESULT WORD: the number of tests before WORD, summed over all result lines with RESULT.
sum() { awk -v word="$2;" "/^test result: $1/"' { for (i = 2; i <= NF; i++) if ($i == word) n += $(i - 1) } END { print n + 0 }' "$log"; }

if run --no-fail-fast; then exit 0; fi
# The last list of each program's failures contains only the names.
mapfile -t failed < <(sed -n '/^failures:$/,/^test result:/s/^    \([^ ]*::[^ ]*\)$/\1/p' "$log" | sort -u)
# Tests outside of modules, and compile errors, are not retried.
((${#failed[@]} > 0 && ${#failed[@]} == $(sum FAILED failed))) || exit 1
echo "-- retrying one by one: ${failed[*]}"
RUST_TEST_THREADS=1 run -- --exact "${failed[@]}"
(($(sum ok passed) == ${#failed[@]})) || exit 1
echo "-- FLAKY: ${failed[*]}"
