//! `tunnel completions`: the scripts of shells, generated from the command line's definition. They complete names of
//! nodes with the output of `tunnel nodes -o name`. An argument that is a node's name has the hint of a host's name.

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::command::{Args, NAME};

/// Returns the completion script for a shell.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), NAME, &mut script);
    let script = String::from_utf8_lossy(&script);
    match shell {
        Shell::Bash => script.replace("complete -F _tunnel ", "complete -F _tunnel_with_nodes ") + BASH,
        Shell::Zsh => script.replacen('\n', ZSH, 1).replace(":_hosts", ":_tunnel_node_names"),
        Shell::Fish => script.replace("__fish_print_hostnames", "__tunnel_node_names") + FISH,
        _ => script.into_owned(),
    }
}

/// Added to the script. `$2` is the word to complete, after an `@` if there is one, and `$3` the word before it.
const BASH: &str = r#"
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
"#;

/// Follows the first line of the script.
const ZSH: &str = r#"

_tunnel_node_names() {
    local -a names
    names=(${(f)"$(timeout 3 tunnel nodes -o name 2>/dev/null)"})
    compset -P '*@'
    compadd -a names
}
"#;

/// Added to the script.
const FISH: &str = r#"
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
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_of_each_shell_contain_flags_and_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completions(shell);
            for word in ["log-dir", "demo", "completions"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn completions_of_each_shell_take_nodes_from_the_servers() {
        for (shell, called, uses) in [
            (Shell::Bash, "complete -F _tunnel_with_nodes ", 2),
            (Shell::Zsh, ":_tunnel_node_names", 5),
            (Shell::Fish, "(__tunnel_node_names)", 5),
        ] {
            let script = completions(shell);
            assert_eq!(script.matches(called).count(), uses, "{shell}: {script}");
            assert_eq!(script.matches("nodes -o name").count(), 1, "{shell}");
            assert!(!script.contains("_hosts") && !script.contains("hostnames"), "{shell}");
        }
        assert!(completions(Shell::Zsh).starts_with("#compdef tunnel\n\n_tunnel_node_names"));
    }
}
