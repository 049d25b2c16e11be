#!/usr/bin/env bash
# Builds the program with a static glibc, which needs no file of a machine, and fails if it is not static:
#   deploy/docker/static.sh [PROFILE]     release, or another profile of Cargo.toml
#
#   TARGET    such as armv7-unknown-linux-gnueabihf (this machine's). This machine must be able to run its programs, as
#             Debian's qemu-user-static makes it.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/target.sh
. scripts/target.sh

profile=${1:-release}
target=${TARGET:-$(rustc -vV | sed -n 's/^host: //p')}
for_target "$target"
cargo build --locked --profile "$profile" --target "$target" --bin tunnel
program=${CARGO_TARGET_DIR:-target}/$target/$profile/tunnel
# It must need neither a loader nor a library of the machine.
needs=$(readelf --program-headers --dynamic "$program" | grep -E 'INTERP|\(NEEDED\)' || true)
if [[ $needs ]]; then
  printf '%s is not static, it needs files of the machine:\n%s\n' "$program" "$needs" >&2
  exit 1
fi
ls -l "$program"
# A server, an edge and a request through them.
"$program" demo --check
