#!/bin/sh
# What it costs bulk that sessions can be resumed: scripts/resume-cost.sh [--profile fast] [flags of the benchmark].
# Builds the program once more with two lines changed, so that a session forgets what it has sent and its far end does
# not say what has arrived, and measures both in 20 alternating pairs. That program works as long as no line is cut.
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
# What stands in this tree now, committed or not.
git ls-files -z --cached --others --exclude-standard | tar --null -c -T - | tar -x -C "$tree"
# Without resume nobody needs to hear what has arrived, only what may be sent.
change() {
    file=$tree/crates/proto/src/halves.rs
    sed -i "s/$1/$2/" "$file"
    if [ "$(grep -c -F "$3" "$file")" != 1 ]; then
        echo "resume-cost.sh: crates/proto/src/halves.rs is not as this script knows it: no single line $1" >&2
        exit 1
    fi
}
change '^ *self.reached = self.reached.max(self.next);$' '& self.drop_before(self.next);' \
    'max(self.next); self.drop_before(self.next);'
change '^const MOST_UNHEARD: u64 = .*$' 'const MOST_UNHEARD: u64 = u64::MAX;' 'MOST_UNHEARD: u64 = u64::MAX;'
# The libraries are those of this tree's own build.
(cd "$tree" && cargo build --target-dir "$here/target" --profile "$profile" --bin tunnel)
cp "target/$profile/tunnel" target/forgetful-tunnel
rm -rf "$tree"
exec scripts/bench.sh --profile "$profile" --only resume --against target/forgetful-tunnel "$@"
