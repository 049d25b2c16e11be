#!/usr/bin/env bash
# Builds the program with a static glibc, which needs no file of a machine, and fails if it is not static:
#   deploy/docker/static.sh [PROFILE]     release, or another profile of Cargo.toml
set -euo pipefail
cd "$(dirname "$0")/../.."

profile=${1:-release}
host=$(rustc -vV | sed -n 's/^host: //p')
# The allocator does not start where pages are larger than those it was compiled for: up to 64 KiB on aarch64.
[[ $host != aarch64-* ]] || export JEMALLOC_SYS_WITH_LG_PAGE=16
# With --target, the flag does not apply to build scripts and macros, which must be loadable.
RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static" \
  cargo build --locked --profile "$profile" --target "$host" --bin tunnel
program=${CARGO_TARGET_DIR:-target}/$host/$profile/tunnel
# It must need neither a loader nor a library of the machine.
needs=$(readelf --program-headers --dynamic "$program" | grep -E 'INTERP|\(NEEDED\)' || true)
if [[ $needs ]]; then
  printf '%s is not static, it needs files of the machine:\n%s\n' "$program" "$needs" >&2
  exit 1
fi
ls -l "$program"
# A server, an edge and a request through them.
"$program" demo --check
