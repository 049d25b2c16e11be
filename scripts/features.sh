#!/usr/bin/env bash
# Compiles the program without optional parts, with each one alone, and with both. Run it before a release: it takes
# minutes, because most combinations compile some dependencies again.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."
# shellcheck source=scripts/step.sh
. scripts/step.sh
# shellcheck source=scripts/tools.sh
. scripts/tools.sh

# Without --no-dev-deps, which rewrites Cargo.toml meanwhile: a check does not use the features of dev-dependencies.
# A warning is often the first sign that a part is used without its feature.
export RUSTFLAGS=-Dwarnings CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/features
hack() { cargo hack check --quiet --locked --package tunnel "$@"; }

step 'none, each and both' hack --each-feature
step 'what a build without parts says' cargo test --quiet --locked --no-default-features --package tunnel \
  --package tunnel-link --lib -- serve::tests::parts plain::
