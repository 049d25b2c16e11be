#!/bin/sh
# Measures the cost of resumable sessions in bulk transfers: scripts/resume-cost.sh [--profile fast] [flags of the
# benchmark]. Builds the program again with two lines changed, so that a session drops the bytes it has sent, and its
# remote does not acknowledge them. Measures both in 20 alternating pairs. The changed program works while no connection
# fails.
set -eu
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
cd "$(dirname "$0")/.."

profile=release
if [ "${1:-}" = --profile ]; then
    profile=$2
    shift 2
fi

here=$PWD
tree=$here/target/forgetful
rm -rf "$tree"
mkdir -p "$tree"
# The current files of this tree, committed or not.
git ls-files -z --cached --others --exclude-standard | tar --null -c -T - | tar -x -C "$tree"
# Without resuming, no acknowledgements are required, only credit.
change() {
    file=$tree/crates/proto/src/halves.rs
    sed -i "s/$1/$2/" "$file"
    if [ "$(grep -c -F "$3" "$file")" != 1 ]; then
        echo "resume-cost.sh: crates/proto/src/halves.rs does not match this script: expected exactly one line $1" >&2
        exit 1
    fi
}
change '^ *self.reached = self.reached.max(self.next);$' '& self.drop_before(self.next);' \
    'max(self.next); self.drop_before(self.next);'
change '^const MAX_DELAYED_ACK: u64 = .*$' 'const MAX_DELAYED_ACK: u64 = u64::MAX;' 'MAX_DELAYED_ACK: u64 = u64::MAX;'
# The dependencies come from this tree's own build.
(cd "$tree" && cargo build --target-dir "$here/target" --profile "$profile" --bin tunnel)
cp "target/$profile/tunnel" target/forgetful-tunnel
rm -rf "$tree"
exec scripts/bench.sh --profile "$profile" --only resume --against target/forgetful-tunnel "$@"
