#!/usr/bin/env bash
# Compares each page of docs/zh/ with the English page that it follows. Its first lines name that page and a commit:
# `<!-- follows FILE at COMMIT -->`. Its code blocks must be those of that commit, except for comments; a page that
# `follows part of FILE` may leave some out. Later commits of the English page are listed. They are no error.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/.."

if [[ $(git rev-parse --is-shallow-repository 2>/dev/null) != false ]]; then
  echo "git has no complete history here, translations are not checked"
  exit
fi

# Prints the code blocks of a page, one a line, without comments and without the indentation of lists.
blocks() {
  awk '/^ *```/ { if (open) print block; open = !open; match($0, /^ */); indent = RLENGTH + 1; block = substr($0, indent); next }
    open { sub(/(^| +)# .*/, ""); block = block "\\n" substr($0, indent) }'
}

complain() {
  echo "$1" >&2
  failed=1
}

failed=0
english=$(mktemp)
trap 'rm "$english"' EXIT
for page in docs/zh/*.md; do
  : >"$english"
  count=0 part=
  while IFS= read -r line && [[ $line =~ ^'<!-- follows '('part of ')?([^ ]+)' at '([0-9a-f]{8,40})' -->'$ ]]; do
    count=$((count + 1)) part=${BASH_REMATCH[1]} file=${BASH_REMATCH[2]} commit=${BASH_REMATCH[3]}
    if ! git merge-base --is-ancestor "$commit" HEAD 2>/dev/null || ! git cat-file -e "$commit:$file" 2>/dev/null; then
      complain "$page: there is no $file at commit $commit of this branch"
      continue 2
    fi
    git show "$commit:$file" | blocks >>"$english"
    git log --format="$page does not have: %h %s" "$commit..HEAD" -- "$file"
  done <"$page"
  if ((count == 0)); then
    complain "$page: the first line must be: <!-- follows FILE at COMMIT -->"
    continue
  fi
  different='^[<>]'
  [[ -z $part ]] || different='^>'
  if grep "$different" <(diff -d "$english" <(blocks <"$page")) >&2; then
    complain "$page: its code (>) differs from the English page (<) at the commit that it follows"
  fi
done
exit "$failed"
