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
const BASH: &str = concat!("\n", include_str!("completions/nodes.bash"));

/// Follows the first line of the script.
const ZSH: &str = concat!("\n\n", include_str!("completions/nodes.zsh"));

/// Added to the script.
const FISH: &str = concat!("\n", include_str!("completions/nodes.fish"));

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
