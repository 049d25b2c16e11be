# shellcheck shell=sh
# To be sourced before the script changes its directory. The comment at the top of a script is its help.

# helps "$@": if the first argument requests help, prints it and exits.
helps() {
    case ${1:-} in -h | --help) head_comment && exit 0 ;; esac
}

# wrong ARGUMENT: reports an invalid argument, prints the help, and exits.
wrong() {
    echo "$0: invalid arguments: $1" >&2
    head_comment >&2
    exit 64
}

# alone "$@": like `helps`, for a script without arguments.
alone() {
    helps "$@"
    [ $# = 0 ] || wrong "$1"
}

head_comment() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
