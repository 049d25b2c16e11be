#!/usr/bin/env bash
# Checks the dependencies: each is used, and licences, sources, bans and advisories comply with deny.toml.
#
# scripts/deps.sh [--release]
#
#   --release   fails if the advisories cannot be fetched; otherwise they are not checked then
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
release=${1:-}
[[ $# -le 1 && ${release:---release} == --release ]] || wrong "$*"
cd "$(dirname "$0")/.."

# shellcheck source=scripts/tools.sh
. scripts/tools.sh

cargo-shear --locked
# The graph of crates comes from cargo's downloads for the build. Only the advisories are fetched separately.
cargo fetch --quiet --locked
cargo-deny --offline --log-level error check licenses bans sources
if timeout 60 cargo-deny --log-level error fetch db 2>/dev/null; then
  cargo-deny --log-level error check advisories
else
  echo "advisories: database not reachable, not checked" >&2
  [[ ! $release ]]
fi
