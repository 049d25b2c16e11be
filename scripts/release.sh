#!/usr/bin/env bash
# Makes the files of a release for one target:
#
#   tunnel-VERSION-MACHINE-linux.tar.gz    the static program, its units, licences and changes
#   tunnel_VERSION_ARCH.deb                Debian package
#   tunnel-VERSION-MACHINE-image.tar       OCI image, as an archive
#   tunnel-VERSION-MACHINE.cdx.json        list of its dependencies, in CycloneDX
#   install.sh, SHA256SUMS                 installation on any other machine
#
# scripts/release.sh [VERSION] [--binary FILE] [--out DIR]
#
#   VERSION         fails unless the program has this version
#   --binary FILE   a program that is already built; otherwise it is built, which takes minutes
#   --out DIR       an empty or new directory for the files (target/release-files, which is emptied)
#
#   TARGET              such as armv7-unknown-linux-gnueabihf (this machine's); see deploy/docker/static.sh
#   SOURCE_DATE_EPOCH   time of all files, in seconds since 1970 (that of the last commit). An equal program and an
#                       equal time give equal files.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"

version='' binary='' out=''
while (($#)); do
  case $1 in
    --binary) binary=$(realpath "${2:?--binary FILE}") && shift ;;
    --out) out=$(realpath -m "${2:?--out DIR}") && shift ;;
    [0-9]*) version=$1 ;;
    *) wrong "$1" ;;
  esac
  shift
done
cd "$(dirname "$0")/.."
[[ $out ]] || { out=$PWD/target/release-files && rm -rf "$out"; }
mkdir -p "$out"
[[ ! $(ls -A "$out") ]] || { echo "$out is not empty" >&2 && exit 1; }
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
TARGET=${TARGET:-$(rustc -vV | sed -n 's/^host: //p')}
export SOURCE_DATE_EPOCH TARGET

if [[ ! $binary ]]; then
  TUNNEL_REVISION=$(git rev-parse --short HEAD)
  export TUNNEL_REVISION
  deploy/docker/static.sh
  binary=${CARGO_TARGET_DIR:-target}/$TARGET/release/tunnel
fi
built=$("$binary" --version | cut -d' ' -f2)
[[ $built == "${version:-$built}" ]] || { echo "the program has version $built, not $version" >&2 && exit 1; }
name=tunnel-$built-${TARGET%%-*}

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
install -D -m 755 "$binary" "$tree/$name-linux/tunnel"
licences=$tree/$name-linux/THIRD-PARTY-LICENSES.txt
scripts/sbom.py "$licences" >"$out/$name.cdx.json"
chmod 644 "$licences"
install -m 644 -t "$tree/$name-linux" LICENSE README.md CHANGELOG.md deploy/systemd/*.service
tar --sort=name --format=ustar --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$tree" \
  -c "$name-linux" | gzip -n >"$out/$name-linux.tar.gz"
deploy/debian/build.sh "$binary" "$out" "$licences" >/dev/null
deploy/docker/archive.sh "$binary" "$out" "$licences"
install -m 755 deploy/install.sh "$out/install.sh"
(cd "$out" && sha256sum -- *.tar.gz *.deb *.tar *.json install.sh >SHA256SUMS)
ls -l "$out"
