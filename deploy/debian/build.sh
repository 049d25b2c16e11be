#!/usr/bin/env bash
# Makes a Debian package of a built program: deploy/debian/build.sh [PROGRAM [DIR]]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
program=$(realpath "${1:-$root/target/dist/tunnel}")
to=$(realpath "${2:-.}")

version=$("$program" --version | cut -d' ' -f2)
arch=$(dpkg --print-architecture)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"

install -D -m 755 "$program" "$tree/usr/bin/tunnel"
for side in server edge; do
  install -D -m 644 "$root/deploy/systemd/tunnel-$side.service" "$tree/lib/systemd/system/tunnel-$side.service"
done
# Examples of /etc/tunnel/server.toml and edge.toml, and the description of every key.
install -D -m 644 "$root/conf/server.toml" "$tree/usr/share/doc/tunnel/server.toml"
install -D -m 644 "$root/conf/edge.toml" "$tree/usr/share/doc/tunnel/edge.toml"
install -D -m 644 -t "$tree/usr/share/doc/tunnel/reference" "$root"/docs/reference/*
install -D -m 644 "$root/LICENSE" "$tree/usr/share/doc/tunnel/copyright"
install -d -m 755 "$tree/usr/share/man/man1" "$tree/usr/share/bash-completion/completions" \
  "$tree/usr/share/zsh/vendor-completions" "$tree/usr/share/fish/vendor_completions.d"
"$program" man "$tree/usr/share/man/man1"
gzip -9n "$tree"/usr/share/man/man1/*.1
"$program" completions bash >"$tree/usr/share/bash-completion/completions/tunnel"
"$program" completions zsh >"$tree/usr/share/zsh/vendor-completions/_tunnel"
"$program" completions fish >"$tree/usr/share/fish/vendor_completions.d/tunnel.fish"
install -d -m 755 "$tree/etc/tunnel"

# The newest version of libc whose symbols the program uses; a static program has none.
libc=$(grep -aoE 'GLIBC_[0-9]+\.[0-9]+' "$program" | sort -uV | tail -n 1 || true)

mkdir "$tree/DEBIAN"
cat >"$tree/DEBIAN/control" <<END
Package: tunnel
Version: $version
Section: net
Priority: optional
Architecture: $arch
Depends: ${libc:+libc6 (>= ${libc#GLIBC_}), }adduser
Maintainer: tunnel <tunnel@example.org>
Description: cloud-edge reverse tunnel
 Reaches machines behind NAT by their name, with ssh, curl, kubectl or any program that speaks HTTP CONNECT. Sessions
 survive network failures, restarts of servers and rolling updates.
END
# Neither service is enabled: the operator chooses the service and its config.
cat >"$tree/DEBIAN/postinst" <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ]; then
  getent passwd tunnel >/dev/null || adduser --system --group --no-create-home --home /nonexistent --quiet tunnel
  if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
    # An upgrade restarts the services that run. It does not wait: the edge drains first, and the session in which dpkg
    # runs may be one of its own.
    [ -z "$2" ] || systemctl --no-block try-restart tunnel-server.service tunnel-edge.service || true
  fi
fi
END
cat >"$tree/DEBIAN/prerm" <<'END'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
  systemctl stop tunnel-server.service tunnel-edge.service || true
fi
END
chmod 755 "$tree/DEBIAN/postinst" "$tree/DEBIAN/prerm"
dpkg-deb -Zgzip --root-owner-group --build "$tree" "$to/tunnel_${version}_$arch.deb"
