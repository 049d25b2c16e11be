#!/bin/sh
# What it costs bulk that sessions can be resumed: scripts/resume-cost.sh [--profile fast] [flags of the benchmark].
# Builds the program once more with one line added, by which a session forgets what it has sent as soon as it has sent
# it, and measures both in 20 alternating pairs. That program works as long as no line is cut.
set -eu
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
half=$tree/src/tunnel/send.rs
mark='self.reached = self.reached.max(self.next);'
sed -i "s/^\( *\)$mark\$/&\n\1self.drop_before(self.next);/" "$half"
if [ "$(grep -A1 -F "$mark" "$half" | grep -c 'self.drop_before(self.next);')" != 1 ]; then
    echo "resume-cost.sh: src/tunnel/send.rs has no single line '$mark' any more" >&2
    exit 1
fi
# The libraries are those of this tree's own build.
(cd "$tree" && cargo build --target-dir "$here/target" --profile "$profile" --bin tunnel)
cp "target/$profile/tunnel" target/forgetful-tunnel
rm -rf "$tree"
exec scripts/bench.sh --profile "$profile" --only resume --against target/forgetful-tunnel "$@"
