#!/bin/sh
# Injects faults into three servers and six edges for ten minutes while forty clients check every byte:
# scripts/soak.sh [flags]. `cargo bench --profile fast --bench compare -- soak --help` lists the flags. During
# development use `--seconds 60`. `--seed` repeats a run's random choices.
set -eu
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
cd "$(dirname "$0")/.."

# This also builds the program.
soak=$(cargo bench --profile fast --bench compare --no-run --message-format=json-render-diagnostics |
    sed -n 's/.*"name":"compare".*"executable":"\([^"]*\)".*/\1/p')
exec "$soak" soak --tunnel target/fast/tunnel "$@"
