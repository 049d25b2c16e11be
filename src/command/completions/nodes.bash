_tunnel_with_nodes() {
    _tunnel "$@"
    local end=
    case "${COMP_WORDS[1]} $3 $2" in
        connect\ connect\ *) end=: ;;
        *\ -*) [[ ${COMP_WORDS[1]} == sessions && $3 == --node && $2 != -* ]] || return 0 ;;
        ssh\ * | ssh-config\ * | invitations\ revoke\ *) ;;
        *) return 0 ;;
    esac
    local names
    names=$(compgen -S "$end" -W "$(timeout 3 "$1" nodes -o name 2>/dev/null)" -- "$2") || return 0
    [[ -z $end ]] || compopt -o nospace
    COMPREPLY=($names)
}
