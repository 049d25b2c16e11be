#!/bin/sh
# Builds the program as the README says and measures it: scripts/bench.sh [--profile fast] [flags of the benchmark].
# `cargo bench --profile fast --bench compare -- --help` lists these flags. During development use
# `--quick --only bulk,echo`.
#
# scripts/bench.sh --peers [flags] measures the program next to others, which scripts/peers.sh builds first. That needs
# root, for a network namespace: some of them listen on every address.
set -eu
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
cd "$(dirname "$0")/.."

profile=release
if [ "${1:-}" = --profile ]; then
    profile=$2
    shift 2
fi

peers=
if [ "${1:-}" = --peers ]; then
    shift
    peers=$(scripts/peers.sh | paste -sd , -)
    : "${peers:?none of the other programs can be built here}"
fi

# First the benchmark, then the program: building the benchmark also builds the program, but with the features that
# tests require.
bench=$(cargo bench --profile fast --bench compare --no-run --message-format=json-render-diagnostics |
    sed -n 's/.*"name":"compare".*"executable":"\([^"]*\)".*/\1/p')
cargo build --profile "$profile" --bin tunnel
set -- "$bench" --tunnel "target/$profile/tunnel" "$@"
# shellcheck disable=SC2016
[ -z "$peers" ] || set -- unshare --net sh -c 'ip link set lo up; exec "$@"' sh "$@" --peers "$peers"
exec "$@"
