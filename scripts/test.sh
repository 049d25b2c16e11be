#!/usr/bin/env bash
# Installs what the tests require, and runs them:
#
#   scripts/test.sh         unit tests, servers and edges in one process, simulation, documents, and the program with
#                           Debian's sshd, nc, curl, nginx, systemd and others
#   scripts/test.sh --all   all of these, and with CoreDNS, etcd, Kubernetes, peers in Go and older programs; lints,
#                           features, book, fuzzing. CI runs this.
#
#   TUNNEL_FUZZ_SECONDS     how long each fuzz target runs, default 60
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
all=
case ${1:-} in
  --all) all=1 && shift ;;
esac
alone "$@"
cd "$(dirname "$0")/.."
# shellcheck source=scripts/step.sh
. scripts/step.sh
PATH=$PATH:/usr/sbin:/sbin

step 'programs for the tests' scripts/parts.sh
if [[ $all ]]; then
  # Programs in Go are built next to everything that compiles, but not next to tests, for which time matters.
  log=$(mktemp)
  nice -n 19 sh -c 'scripts/plainpeer.sh && scripts/goparts.sh' >"$log" 2>&1 &
  go=$!
  trap 'kill "$go" 2>/dev/null || true; rm -f "$log"' EXIT
  step 'checks' scripts/check.sh
fi
step 'build of the tests' cargo test --quiet --workspace --exclude tunnel-fuzz --no-run
export TUNNEL_TESTS=debian
if [[ $all ]]; then
  step 'features' scripts/features.sh
  step 'fuzzing' scripts/fuzz.sh "${TUNNEL_FUZZ_SECONDS:-60}"
  # No step, because only the shell that started them can wait for them.
  echo "-- plain peer, CoreDNS, etcd and Kubernetes"
  wait "$go" || { cat "$log" >&2 && exit 1; }
  echo "-- plain peer, CoreDNS, etcd and Kubernetes: ok, $SECONDS s after the start"
  TUNNEL_PLAINPEER=$(scripts/plainpeer.sh)
  export TUNNEL_PLAINPEER TUNNEL_TESTS=all
fi
# Most tests wait for other processes, so more of them than cores may run at once.
export RUST_TEST_THREADS=4
step 'tests' scripts/cargo-test.sh
if [[ $all ]]; then
  # The oldest version that the wire must still work with. A clone without its history has no such commit.
  oldest=131d769c
  if git cat-file -e "$oldest^{commit}" 2>/dev/null; then
    for versions in 4 4-5; do
      step "sessions with programs of $oldest, which speak 4, of programs that speak $versions" env PROFILE=dev \
        NEW="${CARGO_TARGET_DIR:-target}/debug/tunnel" TUNNEL_TEST_VERSIONS=$versions scripts/compat.sh "$oldest"
    done
  else
    echo "-- sessions with programs of $oldest: left out, as this clone does not have that commit"
  fi
  step 'example cluster' env TUNNEL="${CARGO_TARGET_DIR:-target}/debug/tunnel" scripts/cluster.sh --check
  step 'example Kubernetes cluster' scripts/kubernetes.sh --check
fi
echo "all passed in $SECONDS s"
