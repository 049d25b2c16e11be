#!/usr/bin/env bash
# Builds the program for ARM and tries it, under qemu on other machines: scripts/platforms.sh [MACHINE...]
#
#   MACHINE    aarch64 or armv7 (both)
#
# For each: a node's program starts with pages of 4, 16 and 64 KiB; the unit tests of the crates proto, base, net and link
# pass; an edge serves ssh and copies of 100 MB and more through servers of this machine, while its line is cut, stops
# responding and moves, and servers are killed and replaced. Checksums compare the copies. Then the whole program is
# built, and its demo passes.
#
# The first run compiles everything, which takes half an hour or more. It installs missing packages of Debian as
# scripts/parts.sh does.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
machines=("$@")
((${#machines[@]})) || machines=(aarch64 armv7)
for machine in "${machines[@]}"; do [[ $machine == aarch64 || $machine == armv7 ]] || wrong "$machine"; done
cd "$(dirname "$0")/.."
# shellcheck source=scripts/step.sh
. scripts/step.sh
# shellcheck source=scripts/target.sh
. scripts/target.sh

crates=(-p tunnel-proto -p tunnel-base -p tunnel-net -p tunnel-link)
# Tests of the program with real ssh and sshd.
sessions=(ssh::ssh_works_through_nc ssh::a_hundred_megabytes cut:: servers::)
# Unit tests that qemu's user mode cannot run: it opens no sock_diag, which also has TCP_INFO, knows no IP_MTU, and does
# not pass on announcements of addresses as the kernel makes them. Its /proc/self/stat has no memory.
beyond_qemu=(
  os::sockets::tests::unacknowledged os::announcement::tests::an_announcement_without
  os::announcement::tests::several_announcements_without os::announcement::tests::names_taken_by_another_user
  tcp_info::tests::tcp_info_reports link::pacing::tcp_info_tests::a_new_links path_mtu::tests::handshakes_that_stall_twice
  interfaces::changes::tests::a_repeated_kernel_announcement process::tests::memory_cpu_time
)
# Apart from this machine's files, as the compiler may be another one.
built=$(realpath -m "${CARGO_TARGET_DIR:-target}")/platforms
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# arm COMMAND...: runs cargo for the target, without debug info, which takes longer to compile.
arm() {
  for_target "$target"
  CARGO_TARGET_DIR=$built CARGO_PROFILE_DEV_DEBUG=none cargo "$1" --quiet --locked --target "$target" "${@:2}"
}

# Where pages are larger, neither segments that are aligned for smaller ones nor such an allocator can start.
starts() {
  local page aligned
  aligned=$(readelf -lW "$program" | awk '$1 == "LOAD" { print $NF }' | sort -u)
  [[ $aligned == 0x10000 ]] || { echo "segments are aligned for pages of $aligned" >&2 && return 1; }
  for page in "${pages[@]}"; do "${qemu[@]/%PAGE/$page}" "$program" --version; done
  [[ ${pages[-1]} == 65536 ]] || echo 'left out: pages of 64 KiB, as qemu-arm ends by an assertion with them'
}

unit_tests() {
  ((${#qemu[@]})) || beyond_qemu=()
  arm test "${crates[@]}" --lib -- "${beyond_qemu[@]/#/--skip=}"
}

serves() {
  printf '#!/bin/sh\nexec %s %s "$@"\n' "${qemu[*]/%PAGE/${pages[-1]}}" "$program" >"$work/edge"
  chmod 755 "$work/edge"
  TUNNEL_EDGE=$work/edge TUNNEL_TESTS=debian RUST_TEST_THREADS=2 cargo test --quiet --test real -- "${sessions[@]}"
}

# The demo starts the program again, so the kernel must run it with qemu. Since Linux 6.7 a user namespace can have that
# to itself.
demo() {
  # shellcheck disable=SC2016 # The inner shell expands these.
  local own='mount -t binfmt_misc none /proc/sys/fs/binfmt_misc && cat "$1" >/proc/sys/fs/binfmt_misc/register && shift && exec "$@"'
  local inside=()
  ((${#qemu[@]} == 0)) ||
    inside=(unshare --user --map-root-user --mount bash -c "$own" bash "/usr/lib/binfmt.d/${qemu[0]%-static}.conf")
  if "${inside[@]}" true; then
    "${inside[@]}" "$program" demo --check
  else
    echo 'left out: this kernel has no binfmt_misc in user namespaces'
  fi
}

scripts/parts.sh
for machine in "${machines[@]}"; do
  case $machine in
    aarch64) target=aarch64-unknown-linux-gnu qemu=(qemu-aarch64-static -p PAGE) pages=(4096 16384 65536) ;;
    armv7) target=armv7-unknown-linux-gnueabihf qemu=(qemu-arm-static -p PAGE) pages=(4096 16384) ;;
  esac
  if [[ $(uname -m) == "$machine" ]]; then qemu=(); else scripts/parts.sh --arm; fi
  program=$built/$target/debug/tunnel
  step "$machine: a node's program" arm build --no-default-features --features edge --bin tunnel
  ls -l "$program"
  step "$machine: pages of 4, 16 and 64 KiB" starts
  step "$machine: unit tests" unit_tests
  step "$machine: ssh, copies, cuts and killed servers" serves
  step "$machine: the whole program" arm build --bin tunnel
  step "$machine: demo" demo
done
