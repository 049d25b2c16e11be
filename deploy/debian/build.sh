#!/usr/bin/env bash
# Makes a Debian package of a built program, and of the licences of its crates:
#   deploy/debian/build.sh PROGRAM DIR LICENCES
#
#   TARGET              the program's target (this machine's)
#   SOURCE_DATE_EPOCH   time of all files in it, in seconds since 1970
set -euo pipefail
umask 022
root=$(cd "$(dirname "$0")/../.." && pwd)
program=$(realpath "${1:?PROGRAM}")
to=$(realpath "${2:?DIR}")

version=$("$program" --version | cut -d' ' -f2)
case ${TARGET:-} in
  x86_64-*) arch=amd64 ;;
  aarch64-*) arch=arm64 ;;
  armv7-*) arch=armhf ;;
  *) arch=$(dpkg --print-architecture) ;;
esac
maintainer='tunnel <tunnel@example.org>'
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"

install -D -m 755 "$program" "$tree/usr/bin/tunnel"
for side in server edge; do
  unit=$tree/lib/systemd/system/tunnel-$side.service
  install -D -m 644 "$root/deploy/systemd/tunnel-$side.service" "$unit"
  sed -i 's/^RuntimeDirectory=/User=tunnel\nGroup=tunnel\n&/' "$unit"
done
install -D -m 644 -t "$tree/usr/lib/systemd/user" "$root/deploy/systemd/tunnel-proxy.service"
# The book, examples of /etc/tunnel/server.toml and edge.toml, schemas of them for editors, and channelz for grpcurl.
doc=$tree/usr/share/doc/tunnel
install -D -m 644 -t "$doc" "$root"/{README,CHANGELOG,SECURITY}.md "$root"/conf/* "$root/proto/channelz.proto"
install -m 644 "${3:?LICENCES}" "$doc/THIRD-PARTY-LICENSES.txt"
gzip -9n "$doc/THIRD-PARTY-LICENSES.txt"
# The licence itself is on every Debian.
seconds=${SOURCE_DATE_EPOCH:-$(date +%s)}
cat >"$doc/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: tunnel

Files: *
Copyright: $(date -u -d "@$seconds" +%Y) The contributors of tunnel
License: Apache-2.0
 The text of the license is in /usr/share/common-licenses/Apache-2.0.
Comment:
 The program contains other crates: THIRD-PARTY-LICENSES.txt.gz lists them.
END
# In Debian's format, as apt-listchanges reads it.
gzip -9n >"$doc/changelog.gz" <<END
tunnel ($version) unstable; urgency=medium

  * CHANGELOG.md in this directory lists the changes.

 -- $maintainer  $(date -u -R -d "@$seconds")
END
(cd "$root" && find docs -type f -exec install -D -m 644 {} "$doc/{}" \;)
install -d -m 755 "$tree/usr/share/man/man1" "$tree/usr/share/bash-completion/completions" \
  "$tree/usr/share/zsh/vendor-completions" "$tree/usr/share/fish/vendor_completions.d"
"$program" man "$tree/usr/share/man/man1"
gzip -9n "$tree"/usr/share/man/man1/*.1
install -d -m 755 "$tree/usr/share/man/man5"
(cd "$root" && awk -v version="$version" -f deploy/debian/tunnel.toml.awk docs/reference/config.md) |
  gzip -9n >"$tree/usr/share/man/man5/tunnel.toml.5.gz"
"$program" completions bash >"$tree/usr/share/bash-completion/completions/tunnel"
"$program" completions zsh >"$tree/usr/share/zsh/vendor-completions/_tunnel"
"$program" completions fish >"$tree/usr/share/fish/vendor_completions.d/tunnel.fish"
install -d -m 755 "$tree/etc/tunnel"

# A static program needs no libc. Any other needs the newest version of which it uses a symbol.
libc=
if readelf --dynamic "$program" | grep -q '(NEEDED)'; then
  libc=$(grep -aoE 'GLIBC_[0-9]+\.[0-9]+' "$program" | sort -uV | tail -n 1)
fi

# Findings of lintian that are intended.
overrides=$tree/usr/share/lintian/overrides/tunnel
install -d -m 755 "${overrides%/*}"
cat >"$overrides" <<'END'
# An upgrade must not wait for services that drain, and deb-systemd-invoke has no --no-block.
tunnel: maintainer-script-calls-systemctl *
END
if [[ ! $libc ]]; then
  cat >>"$overrides" <<'END'
# One program for each release of Debian and Ubuntu.
tunnel: statically-linked-binary *
END
fi

mkdir "$tree/DEBIAN"
(cd "$tree" && find usr lib -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum) >"$tree/DEBIAN/md5sums"
cat >"$tree/DEBIAN/control" <<END
Package: tunnel
Version: $version
Section: net
Priority: optional
Architecture: $arch
Depends: ${libc:+libc6 (>= ${libc#GLIBC_}), }adduser
Maintainer: $maintainer
Description: cloud-edge reverse tunnel
 Reaches machines behind NAT by their name, with ssh, curl, kubectl or any
 program that speaks HTTP CONNECT. Sessions survive network failures, restarts
 of servers and rolling updates.
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
cat >"$tree/DEBIAN/postrm" <<'END'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
  systemctl daemon-reload || true
fi
if [ "$1" = purge ]; then
  rm -rf /etc/tunnel /var/lib/tunnel
  rm -f /etc/systemd/system/multi-user.target.wants/tunnel-server.service \
    /etc/systemd/system/multi-user.target.wants/tunnel-edge.service
fi
END
chmod 755 "$tree"/DEBIAN/{postinst,prerm,postrm}
dpkg-deb -Zgzip --root-owner-group --build "$tree" "$to/tunnel_${version}_$arch.deb"
