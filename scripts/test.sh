#!/usr/bin/env bash
# Installs what the tests require, and runs all tests; CI runs the same.
#
#   TUNNEL_FUZZ_SECONDS   how long each fuzz target runs, default 60
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."
# shellcheck source=scripts/step.sh
. scripts/step.sh
PATH=$PATH:/usr/sbin:/sbin

step 'programs for the tests' scripts/parts.sh
# Programs in Go are built on the cores that the Rust compiler leaves idle.
log=$(mktemp)
nice -n 19 sh -c 'scripts/plainpeer.sh && scripts/goparts.sh' >"$log" 2>&1 &
go=$!
trap 'kill "$go" 2>/dev/null || true; rm -f "$log"' EXIT
# The quickest checks come first.
step 'checks' scripts/check.sh
# With all features; the checks above also compile the program without them.
step 'build of the tests' cargo test --quiet --workspace --exclude tunnel-fuzz --no-run
# No step, because only the shell that started them can wait for them.
echo "-- plain peer, CoreDNS, etcd and Kubernetes"
wait "$go" || { cat "$log" >&2 && exit 1; }
echo "-- plain peer, CoreDNS, etcd and Kubernetes: ok, $SECONDS s after the start"
# With TUNNEL_TESTS_REQUIRE, a test whose program is missing fails instead of being skipped.
TUNNEL_PLAINPEER=$(scripts/plainpeer.sh)
# Most tests wait for other processes, so more of them than cores may run at once.
export TUNNEL_PLAINPEER TUNNEL_TESTS_REQUIRE=1 RUST_TEST_THREADS=4
SIM_SECONDS=60 step 'tests' scripts/cargo-test.sh
# Retries once, like scripts/cargo-test.sh.
again() { "$@" || { echo "-- FLAKY, unless it fails again: $*" && "$@"; }; }
step 'example cluster' again env TUNNEL="${CARGO_TARGET_DIR:-target}/debug/tunnel" scripts/cluster.sh --check
step 'example Kubernetes cluster' again scripts/kubernetes.sh --check
step 'fuzzing' scripts/fuzz.sh "${TUNNEL_FUZZ_SECONDS:-60}"
echo "all passed in $SECONDS s"
