#!/usr/bin/env bash
# What can be known without running the program: format, lints, docs, the arrows between modules, shell scripts.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/step.sh
. scripts/step.sh

shell() {
  local files
  mapfile -t files < <(find . -name target -prune -o -name .git -prune -o -type f \( -name '*.sh' -o -path ./.ci/run \) -print)
  shellcheck -x "${files[@]}"
}

step 'shellcheck' shell
step 'cargo fmt' cargo fmt --all --check
step 'cargo clippy' cargo clippy --quiet --workspace --all-targets -- -D warnings
step 'cargo doc' env RUSTDOCFLAGS=-Dwarnings cargo doc --quiet --no-deps
step 'layers' cargo test --quiet --test layers
