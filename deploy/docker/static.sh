#!/usr/bin/env bash
# Builds the program with a static glibc, for images without any file beside it, and says so if it is not static.
set -euo pipefail
cd "$(dirname "$0")/../.."

host=$(rustc -vV | sed -n 's/^host: //p')
# With a target named, the flag is not for build scripts and macros, which have to be loaded.
RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static" \
  cargo build --locked --release --features kubernetes --target "$host"
program=target/$host/release/tunnel
if ldd "$program" 2>/dev/null | grep -q '=>'; then
  echo "$program needs libraries of the machine:" >&2
  ldd "$program" >&2
  exit 1
fi
ls -l "$program"
