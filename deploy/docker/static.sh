#!/usr/bin/env bash
# Builds the program with a static glibc, for images without any file beside it, and says so if it is not static:
#   deploy/docker/static.sh [PROFILE]     the profile is release, or another one of Cargo.toml
set -euo pipefail
cd "$(dirname "$0")/../.."

profile=${1:-release}
host=$(rustc -vV | sed -n 's/^host: //p')
# With a target named, the flag is not for build scripts and macros, which have to be loaded.
RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static" \
  cargo build --locked --profile "$profile" --features kubernetes --target "$host" --bin tunnel
program=${CARGO_TARGET_DIR:-target}/$host/$profile/tunnel
# Neither a loader nor a library of the machine.
needs=$(readelf --program-headers --dynamic "$program" | grep -E 'INTERP|\(NEEDED\)' || true)
if [[ $needs ]]; then
  printf '%s needs files of the machine:\n%s\n' "$program" "$needs" >&2
  exit 1
fi
ls -l "$program"
# A pod, an edge and a request through them.
"$program" demo --check
