#!/usr/bin/env bash
# Tries a user's program for macOS: scripts/macos.sh [VERSION]
#
#   VERSION   fails unless the program has this version, and makes the files of a release in target/release-files
#
# On a Mac it runs the tests of a user's commands, and the program. On Linux it compiles and links the program for
# aarch64-apple-darwin, with the C compiler of the Python package ziglang. If rustup lacks the target, that needs Debian's
# packages cargo-web and rust-web-src.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
version=${1:-}
cd "$(dirname "$0")/.."
# shellcheck source=scripts/step.sh
. scripts/step.sh
target=aarch64-apple-darwin

# Links without Apple's frameworks, which zig lacks: their functions are looked up when the program starts.
cross() {
  local tools zig
  tools=$(realpath -m "${CARGO_TARGET_DIR:-target}")/macos
  zig=$(python3 -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
  mkdir -p "$tools"
  cat >"$tools/cc" <<EOF
#!/usr/bin/env bash
arguments=()
while ((\$#)); do
  case \$1 in
    --target=* | -mmacosx-version-min=* | -liconv) ;;
    -arch | -framework) shift ;;
    *) arguments+=("\$1") ;;
  esac
  shift
done
exec "$zig" cc -target aarch64-macos "\${arguments[@]}"
EOF
  printf '#!/bin/sh\nexec "%s" ar "$@"\n' "$zig" >"$tools/ar"
  chmod 755 "$tools/cc" "$tools/ar"
  export CC_aarch64_apple_darwin=$tools/cc AR_aarch64_apple_darwin=$tools/ar CARGO_TARGET_DIR=$tools
  export CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER=$tools/cc CARGO_PROFILE_DEV_DEBUG=none
  export CARGO_TARGET_AARCH64_APPLE_DARWIN_RUSTFLAGS='-C link-arg=-Wl,-undefined,dynamic_lookup' CARGO_PROFILE_DEV_STRIP=none
  if [[ ! -d $(rustc --print target-libdir --target $target) ]]; then
    export PATH=/usr/bin:$PATH RUSTC_BOOTSTRAP=1 CARGO_UNSTABLE_BUILD_STD=std,panic_abort
  fi
  cargo build --quiet --locked --target $target --no-default-features --bin tunnel
  ls -l "$tools/$target/debug/tunnel"
}

tests() {
  cargo test --quiet --locked --no-default-features --lib -p tunnel -- command:: uplink:: invitations::
  # It has no TCP_INFO.
  cargo test --quiet --locked --lib -p tunnel-proto -p tunnel-link -- --skip tcp_info_tests
  cargo test --quiet --locked --lib -p tunnel-net -- os:: interfaces::changes:: tls:: websocket:: http_proxy::
}

# What needs no server.
commands() {
  local home
  home=$(mktemp -d)
  HOME=$home "$1" ssh-config --write node1
  ssh -F "$home/.ssh/config" -G node1 | grep proxycommand
  "$1" completions zsh >/dev/null
  if HOME=$home "$1" whoami; then return 1; fi
  "$1" --version
}

files() {
  local built name out=target/release-files sum
  TUNNEL_REVISION=$(git rev-parse --short HEAD)
  export TUNNEL_REVISION
  cargo build --locked --release --no-default-features --bin tunnel
  step 'commands of the release' commands target/release/tunnel
  built=$(target/release/tunnel --version | cut -d' ' -f2)
  [[ $built == "$version" ]] || { echo "the program has version $built, not $version" >&2 && exit 1; }
  name=tunnel-$version-aarch64-macos
  rm -rf "$out" "target/$name"
  mkdir -p "$out" "target/$name"
  cp target/release/tunnel deploy/macos/tunnel-proxy.plist LICENSE README.md CHANGELOG.md "target/$name"
  scripts/sbom.py "target/$name/THIRD-PARTY-LICENSES.txt" >"$out/$name.cdx.json"
  tar -C target -czf "$out/$name.tar.gz" "$name"
  sum=$(shasum -a 256 "$out/$name.tar.gz" | cut -d' ' -f1)
  sed "s|REPOSITORY|${GITHUB_REPOSITORY:-REPOSITORY}|g; s|VERSION|$version|g; s|CHECKSUM|$sum|" deploy/macos/tunnel.rb >"$out/tunnel.rb"
  (cd "$out" && shasum -a 256 -- * >../sums && mv ../sums SHA256SUMS)
}

if [[ $(uname -s) != Darwin ]]; then
  step 'a program for macOS' cross
else
  step 'tests' tests
  cargo build --quiet --locked --no-default-features --bin tunnel
  step 'commands' commands target/debug/tunnel
  [[ ! $version ]] || step 'files of the release' files
fi
