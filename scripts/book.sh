#!/usr/bin/env bash
# Builds the book of docs/ into target/book, and checks that each of its links has a target and each diagram is drawn. The
# book needs no network: the library that draws the diagrams is part of it.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
# mdbook is compiled once, next to other caches: there is no prebuilt one in a package registry.
version=0.5.4
tools=$cache/mdbook-$version
if [[ ! -d $tools ]]; then
  # Unoptimised, which takes a quarter of the time to compile. Under a temporary name first: the final name then always
  # has the complete directory.
  rm -rf "$tools.$$"
  CARGO_TARGET_DIR=$tools.$$/target cargo install --debug --quiet --locked --no-default-features \
    --version "$version" --root "$tools.$$" mdbook
  rm -rf "$tools.$$/target"
  mv -T "$tools.$$" "$tools"
fi

# The library that draws diagrams, from npm's registry.
version=12.3.0
library=$cache/mermaid-$version.min.js
if [[ ! -f $library ]]; then
  made=$(mktemp -d)
  trap 'rm -rf "$made"' EXIT
  (cd "$made" && npm pack --silent "mermaid@$version" >/dev/null
    echo "be0684e8d20bfc874df12c0f04927a5c482f57f2200eec54cca52a4583fd4040  mermaid-$version.tgz" | sha256sum --check --quiet
    tar -xf "mermaid-$version.tgz" package/dist/mermaid.min.js)
  mv "$made/package/dist/mermaid.min.js" "$library"
fi

output=$("$tools/bin/mdbook" build 2>&1) || { echo "$output" >&2; exit 1; }
if grep -E 'WARN|ERROR' <<<"$output" >&2; then exit 1; fi
cp "$library" target/book/mermaid.min.js

# Links that leave docs/ belong to the repository, where tests/docs.rs checks them. So does that to docs/SUMMARY.md, which mdbook
# turns into its list of pages.
book=$PWD/target/book
broken=0
while IFS=: read -r page link; do
  link=${link#href=\"}
  link=${link%\"}
  file=${link%%#*}
  path=$page
  if [[ -n $file ]]; then path=$(realpath -m "${page%/*}/$file"); fi
  # The first page is README.md on GitHub, and the book redirects its name.
  if [[ $path == "$book/README.html" ]]; then path=$book/index.html; fi
  if [[ $path != "$book"/* || $path == "$book/SUMMARY.html" ]]; then continue; fi
  anchor=
  if [[ $link == *'#'* ]]; then anchor=${link#*#}; fi
  if [[ ! -e $path ]] || { [[ -n $anchor ]] && ! grep -qF "id=\"$anchor\"" "$path"; }; then
    echo "${page#"$book"/}: $link has no target" >&2
    broken=1
  fi
done < <(grep -roE 'href="[^":]+"' "$book" --include='*.html' --exclude=print.html --exclude=toc.html --exclude=404.html | sort -u)

# Diagrams are drawn by a browser that reaches no other host.
if command -v chromium >/dev/null; then
  while IFS=: read -r page expected; do
    drawn=$(chromium --headless --no-sandbox --disable-gpu --host-resolver-rules='MAP * ~NOTFOUND' \
      --virtual-time-budget=10000 --dump-dom "file://$page" 2>/dev/null | grep -c 'aria-roledescription="flowchart' || true)
    if ((drawn != expected)); then
      echo "${page#"$book"/}: $drawn of $expected diagrams are drawn" >&2
      broken=1
    fi
  done < <(grep -rc '<code class="language-mermaid' "$book" --include='*.html' --exclude=print.html | grep -v ':0$')
else
  echo "chromium is missing, diagrams are not checked"
fi
exit "$broken"
