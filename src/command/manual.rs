//! What shells and `man` learn of the command line, from its own definition.

use std::io;
use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Args, Failure};

/// The script that completes `tunnel` in that shell.
pub fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), NAME, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes tunnel(1) and a page for each command into `dir`, which is made where it is missing. Pages that are there are
/// written anew.
///
/// # Errors
///
/// The directory, or a file in it, cannot be written.
pub fn man(dir: &Path) -> Result<String, Failure> {
    let written = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Args::command(), dir));
    let failed = |cause| format!("cannot write man pages into {}: {cause}", dir.display());
    written.map(|()| String::new()).map_err(|cause: io::Error| Failure::cannot_write(failed(cause)))
}

/// By which the program is called.
const NAME: &str = "tunnel";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_for_each_shell_knows_the_flags_and_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completions(shell);
            for word in ["log-dir", "demo", "completions"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn a_page_for_the_program_and_one_for_each_command_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("man1");
        for _ in 0..2 {
            man(&below).unwrap();
        }
        let page = std::fs::read_to_string(below.join("tunnel.1")).unwrap();
        assert!(page.contains(".TH tunnel 1") && page.contains("Exit codes"), "{page}");
        for command in Args::command().get_subcommands() {
            assert!(below.join(format!("tunnel-{}.1", command.get_name())).exists(), "{command}");
        }
    }
}
