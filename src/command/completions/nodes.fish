function __tunnel_node_names
    set -l user (string match -r '^.*@' -- (commandline -ct))
    for name in (timeout 3 tunnel nodes -o name 2>/dev/null)
        echo "$user$name"
    end
end
complete -c tunnel -n "__fish_tunnel_using_subcommand connect" -f -a "(__tunnel_node_names)"
complete -c tunnel -n "__fish_tunnel_using_subcommand ssh" -f -a "(__tunnel_node_names)"
complete -c tunnel -n "__fish_tunnel_using_subcommand ssh-config" -f -a "(__tunnel_node_names)"
complete -c tunnel -n "__fish_tunnel_using_subcommand invitations; and __fish_seen_subcommand_from revoke" -f -a "(__tunnel_node_names)"
