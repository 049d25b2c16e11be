#!/usr/bin/env bash
# Compiles the program without optional parts, as the programs that people build, and with each pair of parts that has
# code in common. Run it before a release: it takes minutes, because some combinations compile dependencies again.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."
# shellcheck source=scripts/step.sh
. scripts/step.sh

# A warning is often the first sign that a part is used without its feature.
export RUSTFLAGS=-Dwarnings CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/features

# Compiles the program with these features, and prints the files of the project that the compiler has read.
compiled() {
  local artifacts
  artifacts=$(cargo check --quiet --locked --package tunnel --no-default-features --features "$1" \
    --message-format json-render-diagnostics | grep -o '"[^"]*/deps/libtunnel[^"]*\.rmeta"') || return
  # shellcheck disable=SC2001 # An expansion cannot replace in each line.
  sed 's|^"\(.*\)/lib\(.*\)rmeta"$|\1/\2d|' <<<"$artifacts" | xargs cat | tr ' ' '\n' | grep '\.rs$' | sort -u
}

# Compares them with the table of the architecture: the files of a part are compiled with its feature only.
combination() {
  local files feature paths path expected
  files=$(compiled "$1")
  # shellcheck disable=SC2016 # The backquotes are the table's.
  while read -r feature paths; do
    for path in $paths; do
      expected=$([[ ,$1, == *,$feature,* ]] && echo compiled || echo 'left out')
      if [[ $(grep -qE "^$path(\.rs)?(/|$)" <<<"$files" && echo compiled || echo 'left out') != "$expected" ]]; then
        echo "$path must be $expected with the features \"$1\": docs/architecture.md#optional-parts" >&2
        return 1
      fi
    done
  done < <(sed -n '/^## Optional parts/,/^## B/s/^| `\([a-z]*\)` .* | \(.*\) |$/\1 \2/p' docs/architecture.md | tr -d '`,')
}

for features in '' edge edge,kubernetes,superedge server server,edge,kubernetes server,edge,superedge; do
  step "features: ${features:-none}" combination "$features"
done
step 'what a build without parts says' cargo test --quiet --locked --no-default-features \
  --features server,edge --package tunnel --package tunnel-link --lib -- serve::tests::parts without_superedge
