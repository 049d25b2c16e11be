# shellcheck shell=bash
# To be sourced: `for_target TARGET` prepares cargo for static programs of a target, also of one that this machine
# cannot run. For that one it names the linker, and qemu as the runner of tests. If rustup has no standard library of
# the target, cargo compiles Debian's sources of it (scripts/parts.sh --arm), which is for checks only.

for_target() {
  local target=$1 host linker gnu variable
  # With --target, the flag does not apply to build scripts and macros, which must be loadable.
  export RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static"
  # A list of addresses that the program adjusts at its start, packed: 24 bytes for each are 0.4 MB of an edge. glibc
  # knows it since 2.36. Without, the program does not start, which deploy/docker/static.sh notices.
  [[ $target != x86_64-* ]] || export RUSTFLAGS="$RUSTFLAGS -C link-arg=-Wl,-z,pack-relative-relocs"
  # Kernels of ARM have pages of 4, 16 or 64 KiB. The allocator does not start where they are larger than those it was
  # compiled for, and segments of 32-bit programs are aligned for 4 KiB unless the linker is told otherwise.
  case $target in
    aarch64-* | armv7-*)
      export JEMALLOC_SYS_WITH_LG_PAGE=16 RUSTFLAGS="$RUSTFLAGS -C link-arg=-Wl,-z,max-page-size=65536"
      ;;
  esac
  # Static programs of this architecture are at fixed addresses in any case. Position-independent code would need more
  # entries in the global offset table than libc.a, which is compiled with -fpic, can reach.
  [[ $target != aarch64-* ]] || export RUSTFLAGS="$RUSTFLAGS -C relocation-model=static"
  host=$(rustc -vV | sed -n 's/^host: //p')
  [[ $target != "$host" ]] || return 0
  # Of functions that a static program chooses at its start, such as memchr, GNU ld forgets that they are Thumb code if
  # callers are too far away for a branch. The linker that comes with rustc does not.
  linker=$(rustc --print sysroot)/lib/rustlib/$host/bin/gcc-ld
  [[ $target != armv7-* ]] || export RUSTFLAGS="$RUSTFLAGS -C link-arg=-fuse-ld=lld -C link-arg=-B$linker"
  gnu=${target/-unknown/}
  gnu=${gnu/armv7/arm}
  variable=${target//-/_}
  export "CARGO_TARGET_${variable^^}_LINKER=$gnu-gcc" "CARGO_TARGET_${variable^^}_RUNNER=qemu-${gnu%%-*}-static"
  if [[ ! -d $(rustc --print target-libdir --target "$target") ]]; then
    export PATH=/usr/bin:$PATH RUSTC_BOOTSTRAP=1 CARGO_UNSTABLE_BUILD_STD=std,panic_abort
  fi
}
