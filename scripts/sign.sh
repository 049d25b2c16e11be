#!/usr/bin/env bash
# Signs the checksums of a release with minisign:
#
#   scripts/sign.sh DIR KEY
#
#   DIR   the files of the release, with SHA256SUMS and install.sh
#   KEY   file of the secret key, without a password; if install.sh has a public key, it must be that of this one
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
dir=${1:?DIR} secret=${2:?KEY}

public=$(mktemp)
trap 'rm -f "$public"' EXIT
minisign -R -f -s "$secret" -p "$public" >/dev/null
made=$(tail -n 1 "$public")
expected=$(sed -n "s/^key='\(.*\)'$/\1/p" "$dir/install.sh")
if [[ $made != "${expected:-$made}" ]]; then
  echo "install.sh has the public key $expected, but that of $secret is $made" >&2
  exit 1
fi
minisign -S -s "$secret" -m "$dir/SHA256SUMS" >/dev/null
echo "signed; the public key is $made"
