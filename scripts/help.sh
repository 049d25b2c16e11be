# shellcheck shell=sh
# To be sourced before the script leaves its folder: the comment at the head of a script is its help.

# helps "$@": if the first argument asks for help, prints it and ends the script.
helps() {
    case ${1:-} in -h | --help) head_comment && exit 0 ;; esac
}

# wrong ARGUMENT: the script knows no such argument; says so, and ends.
wrong() {
    echo "$0: what is $1?" >&2
    head_comment >&2
    exit 64
}

# alone "$@": as `helps`, for a script without arguments.
alone() {
    helps "$@"
    [ $# = 0 ] || wrong "$1"
}

head_comment() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
