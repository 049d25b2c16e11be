#!/bin/sh
# Builds the image for pods of the tests without a registry: busybox, and a command that does nothing. It is also used
# as the pause container. Usage: image.sh FILE
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root/bin" "$root/etc" "$root/tmp"
chmod 1777 "$root/tmp"
echo 'root:x:0:0:root:/:/bin/sh' >"$root/etc/passwd"
cp "$(command -v busybox)" "$root/bin/busybox"
"$root/bin/busybox" --list | grep -vx busybox | while read -r applet; do ln -s busybox "$root/bin/$applet"; done
tar -C "$root" -cf "$work/layer.tar" .
id=$(sha256sum <"$work/layer.tar" | cut -d ' ' -f 1)
case $(uname -m) in
  aarch64) arch=arm64 ;;
  *) arch=amd64 ;;
esac
cat >"$work/config.json" <<JSON
{
  "os": "linux", "architecture": "$arch",
  "config": {"Cmd": ["sleep", "2147483647"], "Env": ["PATH=/bin"]},
  "rootfs": {"type": "layers", "diff_ids": ["sha256:$id"]}
}
JSON
echo '[{"Config": "config.json", "RepoTags": ["localhost/busybox:1"], "Layers": ["layer.tar"]}]' >"$work/manifest.json"
tar -C "$work" -cf "$1" manifest.json config.json layer.tar
