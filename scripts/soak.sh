#!/bin/sh
# Attacks three pods and six edges for ten minutes while forty clients check every byte: scripts/soak.sh [flags].
# `cargo bench --profile fast --bench compare -- soak --help` shows the flags; `--seconds 60` is the short way while
# working on something, `--seed` repeats a run's draws.
set -eu
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
cd "$(dirname "$0")/.."

# This builds the program, too.
soak=$(cargo bench --profile fast --bench compare --no-run --message-format=json-render-diagnostics |
    sed -n 's/.*"name":"compare".*"executable":"\([^"]*\)".*/\1/p')
exec "$soak" soak --tunnel target/fast/tunnel "$@"
