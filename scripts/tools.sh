# shellcheck shell=bash
# To be sourced in the project's directory: puts the programs of scripts/deps.txt into PATH. They are installed once,
# next to other caches, with pinned versions and hashes.

tools=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests/deps-$(sha256sum <scripts/deps.txt | cut -c1-16)
if [[ ! -d $tools ]]; then
  mkdir -p "${tools%/*}"
  # Under a temporary name first: the final name then always has the complete directory.
  rm -rf "$tools.$$"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --only-binary :all: \
    --require-hashes --requirement scripts/deps.txt --target "$tools.$$"
  mv -T "$tools.$$" "$tools"
fi
PATH=$tools/bin:$PATH
