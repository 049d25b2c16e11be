#!/usr/bin/env bash
# Static checks: format, lints, documents, dependencies, dependencies between modules, shell scripts, workflows.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."
# shellcheck source=scripts/step.sh
. scripts/step.sh

shell() {
  local files
  mapfile -t files < <(find . -name target -prune -o -name .git -prune -o -type f \( -name '*.sh' -o -path ./.ci/run \) -print)
  shellcheck -x "${files[@]}"
}

# With rustc only, as these tests need nothing but the sources: cargo would build everything first.
with_rustc() {
  local built=${CARGO_TARGET_DIR:-target}
  mkdir -p "$built"
  CARGO_MANIFEST_DIR=$PWD rustc --edition 2024 --test "tests/$1.rs" -o "$built/$1"
  "$built/$1" --quiet
}

# How many files there are, and how long the largest is without its tests: a reader has to find each idea in one place.
sizes() {
  find src crates/*/src -name '*.rs' ! -name 'tests.rs' ! -name '*_tests.rs' ! -name 'testing.rs' ! -path '*/tests/*' -print0 | xargs -0 awk '
    FNR == 1 && /@generated/ { nextfile }
    FNR == 1 { if (lines > most) { most = lines; largest = file }; files++; lines = 0; file = FILENAME; tests = marked = 0 }
    tests { next }
    marked && /^(pub\(crate\) )?mod .*\{$/ { tests = 1; lines--; next }
    { marked = /^#\[cfg\(test\)\]$/; lines++ }
    END { if (lines > most) { most = lines; largest = file }; printf "%d files, the largest %s: %d lines\n", files, largest, most }'
}

# The workflows of .github, and the shell scripts in them.
workflows() {
  local version=1.7.12 bin
  command -v go >/dev/null || { echo "Go is missing, workflows are not checked" && return; }
  bin=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests/actionlint-$version
  [[ -x $bin/actionlint ]] || GOBIN=$bin go install "github.com/rhysd/actionlint/cmd/actionlint@v$version"
  "$bin/actionlint"
}

step 'shellcheck' shell
step 'actionlint' workflows
step 'sizes' sizes
step 'layers' with_rustc layers
step 'documents' with_rustc docs
step 'translations' scripts/translations.sh
step 'book' scripts/book.sh
step 'dependencies' scripts/deps.sh
step 'cargo fmt' cargo fmt --all --check
step 'cargo clippy' cargo clippy --quiet --workspace --all-targets -- -D warnings
# Without optional parts only the program. scripts/features.sh compiles the combinations.
step 'cargo clippy, no features' cargo clippy --quiet --no-default-features -- -D warnings
step 'cargo doc' env RUSTDOCFLAGS=-Dwarnings cargo doc --quiet --no-deps --workspace --exclude tunnel-fuzz
