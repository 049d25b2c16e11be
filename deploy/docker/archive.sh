#!/usr/bin/env bash
# Writes an OCI image of a built program, and of the licences of its crates, as an archive, without a daemon:
#   deploy/docker/archive.sh PROGRAM DIR LICENCES
#
# The image is the one of the Dockerfile's last stage. An equal program gives an equal archive.
#
#   TARGET              the program's target (this machine's)
#   SOURCE_DATE_EPOCH   time of all files in it, in seconds since 1970 (0)
#   TUNNEL_REVISION     revision of the sources, for a label (unknown)
set -euo pipefail
program=$(realpath "${1:?PROGRAM}")
to=$(realpath "${2:?DIR}")

version=$("$program" --version | cut -d' ' -f2)
machine=${TARGET:-$(uname -m)}
machine=${machine%%-*}
case $machine in
  x86_64) arch='"architecture":"amd64"' ;;
  aarch64) arch='"architecture":"arm64"' ;;
  armv7) arch='"architecture":"arm","variant":"v7"' ;;
  *) echo "$machine has no name in OCI images here" >&2 && exit 1 ;;
esac
seconds=${SOURCE_DATE_EPOCH:-0}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

# pack DIR: prints a tar archive of its files that depends only on their names, modes and contents.
pack() {
  (cd "$1" && tar --sort=name --format=ustar --owner=0 --group=0 --numeric-owner --mtime="@$seconds" -c -- *)
}

# blob TYPE FILE: moves a file to its place in the layout, and prints its descriptor.
blob() {
  local digest size
  digest=$(sha256sum <"$2" | cut -d' ' -f1)
  size=$(stat -c %s "$2")
  mv "$2" "$layout/blobs/sha256/$digest"
  printf '{"mediaType":"application/vnd.oci.image.%s","digest":"sha256:%s","size":%d' "$1" "$digest" "$size"
}

install -D -m 755 "$program" "$tree/root/usr/local/bin/tunnel"
install -D -m 644 -t "$tree/root/usr/local/share/doc/tunnel" "$(dirname "$0")/../../LICENSE" "${3:?LICENCES}"
mkdir -p "$tree/root/var/log/tunnel"
chmod -R u=rwX,go=rX "$tree/root"
chmod 1777 "$tree/root/var/log/tunnel"
layout=$tree/layout
mkdir -p "$layout/blobs/sha256"

pack "$tree/root" >"$tree/layer"
content=$(sha256sum <"$tree/layer" | cut -d' ' -f1)
gzip -n "$tree/layer"
layer="$(blob layer.v1.tar+gzip "$tree/layer.gz")}"
cat >"$tree/config" <<END
{"created":"$(date -u -d "@$seconds" +%Y-%m-%dT%H:%M:%SZ)",$arch,"os":"linux",
"config":{"User":"65532:65532","Entrypoint":["/usr/local/bin/tunnel"],"Labels":{
"org.opencontainers.image.title":"tunnel","org.opencontainers.image.licenses":"Apache-2.0",
"org.opencontainers.image.description":"A cloud-edge reverse tunnel: reach edge nodes behind NAT by name",
"org.opencontainers.image.version":"$version","org.opencontainers.image.revision":"${TUNNEL_REVISION:-unknown}"}},
"rootfs":{"type":"layers","diff_ids":["sha256:$content"]}}
END
config="$(blob config.v1+json "$tree/config")}"
cat >"$tree/manifest" <<END
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":$config,"layers":[$layer]}
END
manifest=$(blob manifest.v1+json "$tree/manifest")
cat >"$layout/index.json" <<END
{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[$manifest,
"platform":{$arch,"os":"linux"},"annotations":{"org.opencontainers.image.ref.name":"$version"}}]}
END
printf '{"imageLayoutVersion":"1.0.0"}' >"$layout/oci-layout"
chmod -R u=rwX,go=rX "$layout"
pack "$layout" >"$to/tunnel-$version-$machine-image.tar"
