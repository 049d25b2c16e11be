#!/usr/bin/env bash
# Builds the book of docs/ into target/book, and checks that each of its links has a target.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."

# mdbook is compiled once, next to other caches: there is no prebuilt one in a package registry.
version=0.5.4
tools=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests/mdbook-$version
if [[ ! -d $tools ]]; then
  # Unoptimised, which takes a quarter of the time to compile. Under a temporary name first: the final name then always
  # has the complete directory.
  rm -rf "$tools.$$"
  CARGO_TARGET_DIR=$tools.$$/target cargo install --debug --quiet --locked --no-default-features \
    --version "$version" --root "$tools.$$" mdbook
  rm -rf "$tools.$$/target"
  mv -T "$tools.$$" "$tools"
fi

output=$("$tools/bin/mdbook" build 2>&1) || { echo "$output" >&2; exit 1; }
if grep -E 'WARN|ERROR' <<<"$output" >&2; then exit 1; fi

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
  if [[ $path != "$book"/* || $path == "$book/SUMMARY.html" ]]; then continue; fi
  anchor=
  if [[ $link == *'#'* ]]; then anchor=${link#*#}; fi
  if [[ ! -e $path ]] || { [[ -n $anchor ]] && ! grep -qF "id=\"$anchor\"" "$path"; }; then
    echo "${page#"$book"/}: $link has no target" >&2
    broken=1
  fi
done < <(grep -roE 'href="[^":]+"' "$book" --include='*.html' --exclude=print.html --exclude=toc.html --exclude=404.html | sort -u)
exit "$broken"
