#!/bin/sh
# Records `tunnel demo` in a terminal and writes it as the README's picture, an animated SVG. Then writes a still of the live
# page.
# Usage: scripts/record.sh [PROGRAM]. Requires python3 with venv, node, chromium, and for the first run a network.
set -eu
cd "$(dirname "$0")/.."
program=${1:-target/release/tunnel}
out=docs/images/demo.svg
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

python3 -m venv "$dir/python"
"$dir/python/bin/pip" -q install asciinema==2.4.0
ln -s "$(realpath "$program")" "$dir/tunnel"
# The demo runs until Ctrl-C. The last line makes the end of the picture last as long as one needs to read it.
cat > "$dir/session" <<'SESSION'
printf '$ tunnel demo\n'
timeout --foreground -s INT 12 tunnel demo
printf '\n'
SESSION
PATH="$dir:$PATH" TMPDIR=/tmp "$dir/python/bin/asciinema" rec -q --cols 100 --rows 36 \
    -c "sh $dir/session" "$dir/demo.cast"
mkdir -p "$(dirname "$out")"
npx -y svg-term-cli@2.1.1 --in "$dir/demo.cast" --out "$out" --window --no-cursor --width 100 --height 36
echo "$out: $(wc -c < "$out") bytes" >&2
cargo test --quiet --test real -- --ignored --exact page::the_still_of_the_live_page
