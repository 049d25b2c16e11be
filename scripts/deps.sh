#!/usr/bin/env bash
# What the dependencies are held to: each is used, and licences, sources, bans and advisories are as deny.toml says.
# The two programs that look are installed once, beside other caches, with pinned versions and hashes (scripts/deps.txt).
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
tools=$cache/deps-$(sha256sum <scripts/deps.txt | cut -c1-16)
if [[ ! -d $tools ]]; then
  mkdir -p "$cache"
  # Under another name first: whoever sees the name sees all of it.
  rm -rf "$tools.$$"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --only-binary :all: \
    --require-hashes --requirement scripts/deps.txt --target "$tools.$$"
  mv -T "$tools.$$" "$tools"
fi
PATH=$tools/bin:$PATH

cargo-shear --locked
# The graph of crates is read from what cargo has fetched for the build; only the advisories come from elsewhere.
cargo fetch --quiet --locked
cargo-deny --offline --log-level error check licenses bans sources
if timeout 60 cargo-deny --log-level error fetch db 2>/dev/null; then
  cargo-deny --log-level error check advisories
else
  echo "advisories: their database cannot be reached from here, so they were not looked at"
fi
