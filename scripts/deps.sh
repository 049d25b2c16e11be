#!/usr/bin/env bash
# Checks the dependencies: each is used, and licences, sources, bans and advisories comply with deny.toml.
# The two programs for it are installed once, next to other caches, with pinned versions and hashes (scripts/deps.txt).
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
tools=$cache/deps-$(sha256sum <scripts/deps.txt | cut -c1-16)
if [[ ! -d $tools ]]; then
  mkdir -p "$cache"
  # Under a temporary name first: the final name then always has the complete directory.
  rm -rf "$tools.$$"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --only-binary :all: \
    --require-hashes --requirement scripts/deps.txt --target "$tools.$$"
  mv -T "$tools.$$" "$tools"
fi
PATH=$tools/bin:$PATH

cargo-shear --locked
# The graph of crates comes from cargo's downloads for the build. Only the advisories are fetched separately.
cargo fetch --quiet --locked
cargo-deny --offline --log-level error check licenses bans sources
if timeout 60 cargo-deny --log-level error fetch db 2>/dev/null; then
  cargo-deny --log-level error check advisories
else
  echo "advisories: database not reachable, not checked"
fi
