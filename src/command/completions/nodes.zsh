_tunnel_node_names() {
    local -a names
    names=(${(f)"$(timeout 3 tunnel nodes -o name 2>/dev/null)"})
    compset -P '*@'
    compadd -a names
}
