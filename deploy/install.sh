#!/bin/sh
# Installs a release of the tunnel on a machine, or removes it. Verifies the checksum, and with a key the signature, before
# it changes anything.
#
#   install.sh [--from DIR|URL] [--version VERSION] [--key KEY] [--dir DIR]
#   install.sh --uninstall [--dir DIR]
#
#   --from        where the release's files are: a directory, or a URL with https (the directory of this script)
#   --version     version to install, if there are files of several
#   --key         public key (minisign) of those who made the release; needs openssl 3 or newer
#   --dir         where the program goes (/usr/local/bin); units for systemd go to ../lib/systemd from there
#   --uninstall   removes the program and its units; config and certificates stay
#
# The checksums come from the same place as the program. They reveal damage, but a forged release only with a key.
set -eu

fail() {
    echo "install.sh: $1" >&2
    exit "${2:-1}"
}

# The key of releases, once there is one: without a key, only the checksum is verified.
key=''
from='' version='' dir=/usr/local/bin uninstall=''
units='system/tunnel-server.service system/tunnel-edge.service user/tunnel-proxy.service'
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 0 ;;
        --uninstall) uninstall=1 ;;
        --from | --version | --key | --dir)
            [ $# -gt 1 ] || fail "$1 needs a value" 64
            case $1 in
                --from) from=$2 ;;
                --version) version=$2 ;;
                --key) key=$2 ;;
                --dir) dir=$2 ;;
            esac
            shift
            ;;
        *) fail "unknown argument $1; --help lists them" 64 ;;
    esac
    shift
done

if [ "$uninstall" ]; then
    [ -f "$dir/tunnel" ] || fail "there is no $dir/tunnel"
    rm "$dir/tunnel"
    for unit in $units; do
        rm -f "$(dirname "$dir")/lib/systemd/$unit"
    done
    echo "removed $dir/tunnel and its units"
    exit
fi

[ "$from" ] || from=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Not every shell runs the trap above after a signal.
trap 'exit 1' HUP INT TERM

# fetch FILE: puts a file of the release into $work.
fetch() {
    case $from in
        https://*) curl -fsSL --proto =https --proto-redir =https -o "$work/$1" "${from%/}/$1" ;;
        *://*) fail "$from is not safe: use https" 64 ;;
        *) cp "$from/$1" "$work/$1" ;;
    esac || fail "cannot fetch $1 from $from"
}

# verify KEY: verifies minisign's signature of the checksums, an Ed25519 signature of their BLAKE2b hash.
verify() {
    command -v openssl >/dev/null || fail "openssl is needed to verify the signature"
    {
        # What precedes the 32 bytes of a key in DER.
        printf '\060\052\060\005\006\003\053\145\160\003\041\000'
        echo "$1" | base64 -d | tail -c 32
    } >"$work/key"
    sed -n 2p "$work/SHA256SUMS.minisig" | base64 -d | tail -c 64 >"$work/signature"
    openssl dgst -blake2b512 -binary -out "$work/hash" "$work/SHA256SUMS" &&
        openssl pkeyutl -verify -pubin -keyform DER -inkey "$work/key" -rawin -in "$work/hash" \
            -sigfile "$work/signature" >/dev/null
}

fetch SHA256SUMS
if [ "$key" ]; then
    fetch SHA256SUMS.minisig
    verify "$key" || fail "signature of SHA256SUMS is wrong, or openssl is older than 3; nothing is installed"
fi
machine=$(uname -m)
# What 32-bit kernels and systems of ARM say.
case $machine in armv7* | armv8l) machine=armv7 ;; esac
# Lines of this machine's tarballs. A name with a slash is no name of a release.
awk -v version="$version" -v end="-$machine-linux.tar.gz" '
    NF == 2 && $2 !~ /\// && index($2, "tunnel-") == 1 && substr($2, length($2) - length(end) + 1) == end {
        if (version == "" || $2 == "tunnel-" version end) print
    }' "$work/SHA256SUMS" >"$work/chosen"
case $(wc -l <"$work/chosen") in
    1) ;;
    0) fail "$from has no release${version:+ $version} for $machine" ;;
    *) fail "$from has several releases; choose one with --version" ;;
esac
tarball=$(awk '{ print $2 }' "$work/chosen")
fetch "$tarball"
# Busybox has no long options.
(cd "$work" && sha256sum -c chosen >/dev/null) ||
    fail "checksum of $tarball is wrong; nothing is installed"

name=${tarball%.tar.gz}
tar -xzf "$work/$tarball" -C "$work" "$name"
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
[ ! -d "$dir/tunnel" ] || fail "$dir/tunnel is a directory; nothing is installed"
# A program that runs cannot be overwritten, but replaced.
new=$dir/.tunnel.$$
trap 'rm -rf "$work" "$new"' EXIT
cp "$work/$name/tunnel" "$new"
chmod 755 "$new"
said=$("$new" --version) || fail "the program does not run on this machine; nothing is installed"
mv -f "$new" "$dir/tunnel"
for unit in $units; do
    to=$(dirname "$dir")/lib/systemd/$unit
    mkdir -p "${to%/*}"
    sed "s|^ExecStart=tunnel |ExecStart=$dir/tunnel |" "$work/$name/${unit#*/}" >"$to"
done
echo "installed $said in $dir, and its units in $(dirname "$dir")/lib/systemd"
