//! `tunnel ssh` and `tunnel ssh-config`: OpenSSH's client, with `tunnel connect` as its ProxyCommand.

mod include;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process;

use clap::ValueHint;
use serde_json::json;

use crate::command::client::ClientArgs;
use crate::command::{CommandError, CommandResult, shell_word};
use crate::config::Environment;

/// Arguments of `tunnel ssh`.
#[derive(Debug, Clone, clap::Args)]
pub struct SshArgs {
    /// Flags for `tunnel connect`.
    #[command(flatten)]
    pub client: ClientArgs,
    /// Arguments for ssh, as ssh takes them: options, NODE or USER@NODE, and a command.
    #[arg(value_name = "ARGS", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    #[arg(value_hint = ValueHint::Hostname)]
    pub args: Vec<OsString>,
}

/// Arguments of `tunnel ssh-config`.
#[derive(Debug, Clone, clap::Args)]
pub struct SshConfigArgs {
    /// Flags for `tunnel connect`.
    #[command(flatten)]
    pub client: ClientArgs,
    /// Nodes, or patterns of ssh such as `edge-*`.
    #[arg(value_name = "NODE", required_unless_present = "remove", value_hint = ValueHint::Hostname)]
    pub nodes: Vec<String>,
    /// Write the block into ~/.ssh/tunnel_config instead of printing it, and an Include into ~/.ssh/config. Replaces what
    /// an earlier --write wrote.
    #[arg(long)]
    pub write: bool,
    /// Undo --write.
    #[arg(long, conflicts_with_all = ["write", "nodes"])]
    pub remove: bool,
}

/// Replaces this process by ssh.
///
/// # Errors
///
/// Returns only if that fails.
pub fn run(ssh_arguments: &SshArgs) -> CommandResult {
    let cause = process::Command::new("ssh").args(ssh_args(ssh_arguments)?).exec();
    Err(CommandError::unavailable(format!("cannot run ssh: {cause}; install OpenSSH's client")))
}

/// Returns the block for ssh's config, or writes or removes the file with it. Returns lines for the terminal.
///
/// # Errors
///
/// Returns an error if a node's name or a path cannot be in such a file, or a file cannot be changed.
pub fn config(ssh_arguments: &SshConfigArgs, env: &Environment) -> CommandResult {
    if ssh_arguments.remove {
        return include::set(env, None);
    }
    let is_sound = |name: &&String| {
        let other = |c: char| matches!(c, '.' | '-' | '_' | ':' | '*' | '?' | '!');
        !name.starts_with('-') && name.chars().all(|c| c.is_ascii_alphanumeric() || other(c))
    };
    if let Some(wrong) = ssh_arguments.nodes.iter().find(|name| !is_sound(name)) {
        return Err(CommandError::usage(format!(
            "{wrong:?}: expected a node's name, or a pattern with * and ?"
        )));
    }
    let is_all = |name: &&String| name.contains('*') && name.chars().all(|c| matches!(c, '*' | '?'));
    let warning = ssh_arguments.nodes.iter().find(is_all).map_or_else(String::new, |all| {
        format!("# warning: {all} covers every host that ssh reaches, also those that are no nodes\n")
    });
    let hosts = ssh_arguments.nodes.join(" ");
    let block = format!("{warning}Host {hosts}\n  ProxyCommand {}\n", proxy_command(&ssh_arguments.client)?);
    if ssh_arguments.write { Ok(include::set(env, Some(&block))? + &warning) } else { Ok(block) }
}

/// Returns an inventory of these nodes for Ansible: group `tunnel`, with this program as ssh's ProxyCommand. The server
/// and the login there are found when ssh runs it.
///
/// # Errors
///
/// Returns an error if the path of this program cannot be in a ProxyCommand.
pub(crate) fn inventory<'n>(nodes: impl Iterator<Item = &'n str>) -> CommandResult {
    let hosts: BTreeMap<_, _> = nodes.map(|node| (node, json!({}))).collect();
    let option = format!("ProxyCommand={}", proxy_command(&ClientArgs::default())?);
    // Ansible splits these arguments like a shell.
    let vars = json!({ "ansible_ssh_common_args": format!("-o {}", shell_word(&option)) });
    Ok(format!("{:#}\n", json!({ "tunnel": { "hosts": hosts, "vars": vars } })))
}

/// Returns the arguments for ssh.
fn ssh_args(ssh_arguments: &SshArgs) -> CommandResult<Vec<OsString>> {
    let first = ssh_arguments.args.first().and_then(|first| first.to_str()).unwrap_or_default();
    // ssh has no such options, and would print only its own usage.
    if first.starts_with("--") && first != "--" {
        let expected = "a flag of tunnel ssh (see tunnel help ssh), then options of ssh, and [USER@]NODE";
        return Err(CommandError::usage(format!("{first:?}: expected {expected}")));
    }
    let (mut args, jump) = without_jump(&ssh_arguments.args);
    let command = match jump.or_else(|| configured_jump(&args)) {
        Some(jump) => jump_command(&ssh_arguments.client, &jump)?,
        None => proxy_command(&ssh_arguments.client)?,
    };
    args.splice(0..0, ["-o".into(), format!("ProxyCommand={command}").into()]);
    Ok(args)
}

/// Takes the value of `-J` out of ssh's arguments: ssh refuses it next to a ProxyCommand. Like ssh, finds it before and
/// after the node, but not in the command that follows.
fn without_jump(all: &[OsString]) -> (Vec<OsString>, Option<String>) {
    let mut args = Vec::new();
    let mut jump = None;
    let mut has_node = false;
    let mut rest = all.iter();
    while let Some(arg) = rest.next() {
        let text = arg.to_str().unwrap_or_default();
        let Some(flags) = text.strip_prefix('-').filter(|flags| !flags.is_empty() && !flags.starts_with('-'))
        else {
            args.push(arg.clone());
            if has_node || text == "--" {
                break;
            }
            has_node = true;
            continue;
        };
        // The first flag with a value ends the flags of this argument.
        match flags.find(VALUED_FLAGS) {
            Some(at) if flags[at..].starts_with('J') => {
                let value = Some(&flags[at + 1..]).filter(|value| !value.is_empty()).map(OsString::from);
                jump = value.or_else(|| rest.next().cloned()).and_then(|value| value.into_string().ok());
                args.extend((at > 0).then(|| format!("-{}", &flags[..at]).into()));
            }
            Some(at) if at + 1 == flags.len() => {
                args.extend([Some(arg), rest.next()].into_iter().flatten().cloned())
            }
            _ => args.push(arg.clone()),
        }
    }
    args.extend(rest.cloned());
    (args, jump.filter(|jump| jump != "none"))
}

/// Returns the `ProxyJump` that ssh's own config has for this node.
fn configured_jump(args: &[OsString]) -> Option<String> {
    let found = process::Command::new("ssh").arg("-G").args(args).output().ok()?;
    let text = String::from_utf8(found.stdout).ok()?;
    let jump = text.lines().find_map(|line| line.strip_prefix("proxyjump "))?;
    (jump != "none").then(|| jump.to_owned())
}

/// Returns the ProxyCommand for a node behind others: this command again for the last of them, over those before it.
fn jump_command(client: &ClientArgs, jump: &str) -> CommandResult {
    let (before, last) = jump.rsplit_once(',').map_or((None, jump), |(before, last)| (Some(before), last));
    let last = if last.starts_with("ssh://") { last.to_owned() } else { format!("ssh://{last}") };
    let before = before.map(|before| ["-J".to_owned(), before.to_owned()]);
    let words: Vec<_> =
        before.into_iter().flatten().chain(["-W".to_owned()]).map(|word| quoted(&word)).collect();
    let command = command_line("ssh", client)?;
    Ok(format!("{command} {} '[%h]:%p' {}", words.join(" "), quoted(&last)))
}

/// Returns the ProxyCommand, with the given flags. `tunnel connect` finds other values as this command would.
fn proxy_command(client: &ClientArgs) -> CommandResult {
    // A host's name may come from a URL, and older versions of ssh pass any character to the shell.
    Ok(format!("{} '%h' %p", command_line("connect", client)?))
}

/// Returns this program with a command and the given flags, quoted for ssh and its shell.
fn command_line(command: &str, client: &ClientArgs) -> CommandResult {
    let called = std::env::args_os().next().unwrap_or_default();
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let program = std::env::current_exe().ok().map(|exe| as_called(exe, Path::new(&called), &dirs));
    let program = program.and_then(|path| path.into_os_string().into_string().ok());
    let mut words = vec![program.unwrap_or_else(|| "tunnel".to_owned()), command.to_owned()];
    words.extend(client.server.iter().map(|server| format!("--server={server}")));
    words.extend(client.user.iter().map(|user| format!("--user={user}")));
    // ssh may run the line later, and in another folder, so paths become absolute.
    for (flag, path) in [
        ("password-file", &client.password_file),
        ("ca", &client.ca),
        ("cert", &client.cert),
        ("key", &client.key),
    ] {
        if let Some(path) = path {
            words.push(format!("--{flag}={}", absolute(path)?));
        }
    }
    words.extend(client.insecure.then(|| "--insecure".to_owned()));
    if let Some(wrong) = words.iter().find(|word| word.contains(char::is_control)) {
        return Err(CommandError::usage(format!(
            "{wrong:?}: control characters cannot be in a ProxyCommand"
        )));
    }
    let words: Vec<_> = words.iter().map(|word| quoted(word)).collect();
    Ok(words.join(" "))
}

/// Returns the path by which `exe` was `called`, in one of these directories unless that is absolute. A symbolic link
/// outlives an upgrade, which may remove what it leads to now.
fn as_called(exe: PathBuf, called: &Path, dirs: &OsStr) -> PathBuf {
    let is_exe = |at: &PathBuf| at.is_absolute() && at.canonicalize().is_ok_and(|at| at == exe);
    std::env::split_paths(dirs).map(|dir| dir.join(called)).find(is_exe).unwrap_or(exe)
}

/// Returns a path that does not depend on the working directory.
fn absolute(path: &Path) -> CommandResult {
    let wrong = |why: String| CommandError::usage(format!("{}: {why}", path.display()));
    let path = std::path::absolute(path).map_err(|cause| wrong(cause.to_string()))?;
    path.to_str().map(str::to_owned).ok_or_else(|| wrong("expected a path in UTF-8".to_owned()))
}

/// Quotes a word for the shell that runs a ProxyCommand, and for ssh, which replaces `%`.
fn quoted(word: &str) -> String {
    shell_word(&word.replace('%', "%%"))
}

/// Flags of ssh that have a value.
const VALUED_FLAGS: [char; 20] =
    ['b', 'c', 'e', 'i', 'l', 'm', 'o', 'p', 'B', 'D', 'E', 'F', 'I', 'J', 'L', 'O', 'Q', 'R', 'S', 'W'];

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::command::{Args, Command};

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct SshLine {
        #[command(flatten)]
        ssh: SshArgs,
    }

    #[derive(Debug, clap::Parser)]
    struct ConfigLine {
        #[command(flatten)]
        config: SshConfigArgs,
    }

    #[test]
    fn ssh_gets_the_proxy_command_first_and_all_other_arguments_unchanged() {
        let line =
            ["ssh", "--server=https://a:1", "--ca=c d", "root@node1", "-l", "x", "--", "ls -l", "--ca=y"];
        let ssh_arguments = SshLine::try_parse_from(line).unwrap().ssh;
        let args: Vec<String> =
            ssh_args(&ssh_arguments).unwrap().into_iter().map(|arg| arg.into_string().unwrap()).collect();
        let here = std::env::current_dir().unwrap();
        assert!(args[1].starts_with("ProxyCommand=/"), "{args:?}");
        let rest = format!(" connect --server=https://a:1 '--ca={}/c d' '%h' %p", here.display());
        assert!(args[1].ends_with(&rest), "{args:?}");
        assert_eq!(args[2..], ["root@node1", "-l", "x", "--", "ls -l", "--ca=y"]);
    }

    #[test]
    fn ssh_options_may_precede_the_node() {
        let after = |line: &[&str]| {
            let line = [&["tunnel", "ssh"], line].concat();
            let Command::Ssh(ssh_arguments) =
                Args::read(line.into_iter().map(OsString::from)).unwrap().command
            else {
                panic!()
            };
            let args = ssh_args(&ssh_arguments)?.into_iter().map(|arg| arg.into_string().unwrap());
            Ok::<_, CommandError>(args.skip(2).collect::<Vec<_>>().join(" "))
        };
        for line in
            ["-F cfg node1", "-o X=y -p 2200 root@node1 uptime", "-vN node1", "-V", "node1 -- ls --ca=x"]
        {
            let line: Vec<_> = line.split(' ').collect();
            assert_eq!(after(&line).unwrap(), line.join(" "));
            assert_eq!(after(&[&["--server=a:1"], &*line].concat()).unwrap(), line.join(" "));
        }
        // As with ssh, nothing after -- is an option.
        assert_eq!(after(&["--", "-oProxyCommand=evil"]).unwrap(), "-- -oProxyCommand=evil");
        assert_eq!(after(&["--server=a:1", "--", "node1", "--", "ls"]).unwrap(), "-- node1 -- ls");
        let message = after(&["--sever=a:1", "node1"]).unwrap_err();
        assert!(
            message.code == 64 && message.text.contains("\"--sever=a:1\": expected a flag of tunnel ssh"),
            "{message}"
        );
    }

    #[test]
    fn a_jump_goes_through_this_command_again() {
        let ssh_args = |line: &str| {
            let ssh_arguments = SshLine::try_parse_from(line.split(' ')).unwrap().ssh;
            let args = super::ssh_args(&ssh_arguments).unwrap();
            args.into_iter().map(|arg| arg.into_string().unwrap()).collect::<Vec<_>>()
        };
        for line in [
            "ssh --server=a:1 -J root@node1:2201 -p 22 root@inner ls -J x",
            "ssh --server=a:1 -p 22 -vJroot@node1:2201 root@inner ls -J x",
        ] {
            let args = ssh_args(line);
            assert!(args[1].ends_with(" ssh --server=a:1 -W '[%h]:%p' ssh://root@node1:2201"), "{args:?}");
            assert!(args[2..].join(" ").ends_with("root@inner ls -J x"), "{args:?}");
            assert!(!args[2..args.len() - 3].iter().any(|arg| arg.contains('J')), "{args:?}");
        }
        let args = ssh_args("ssh inner -J a,b:1,c");
        assert!(args[1].ends_with(" ssh -J a,b:1 -W '[%h]:%p' ssh://c"), "{args:?}");
        assert_eq!(args[2..], ["inner"]);
    }

    #[test]
    fn ssh_config_prints_a_host_block_with_the_proxy_command() {
        let block = |nodes: &[&str]| {
            let line = [&["ssh-config", "--user=100%", "--insecure"], nodes].concat();
            let config = ConfigLine::try_parse_from(line).unwrap().config;
            super::config(&config, &Environment::default())
        };
        let text = block(&["edge-*", "node1"]).unwrap();
        assert!(text.starts_with("Host edge-* node1\n  ProxyCommand /"), "{text}");
        assert!(text.ends_with(" connect --user=100%% --insecure '%h' %p\n"), "{text}");
        for all in ["*", "**", "?*"] {
            let text = block(&["node1", all]).unwrap();
            assert!(text.starts_with(&format!("# warning: {all} covers every host")), "{text}");
        }
        for wrong in ["a b", "a\nHost *", "#", "é"] {
            assert!(block(&[wrong]).unwrap_err().text.contains("expected a node's name"), "{wrong}");
        }
    }

    #[test]
    fn the_program_is_named_as_it_was_called_so_that_an_upgrade_keeps_the_config() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().canonicalize().unwrap().join(name);
        for dir in ["tunnel-1.2", "bin", "other"] {
            std::fs::create_dir(path(dir)).unwrap();
        }
        let exe = path("tunnel-1.2/tunnel");
        std::fs::write(&exe, "").unwrap();
        std::fs::write(path("other/tunnel"), "another version").unwrap();
        let link = path("bin/tunnel");
        std::os::unix::fs::symlink(&exe, &link).unwrap();
        let dirs = std::env::join_paths([path("other"), path("bin")]).unwrap();
        for called in ["tunnel".into(), link.clone()] {
            assert_eq!(as_called(exe.clone(), &called, &dirs), link);
        }
        // A working directory, and a name that a caller made up.
        for called in ["./tunnel", "-bash", "", "bin/tunnel"] {
            assert_eq!(as_called(exe.clone(), Path::new(called), OsStr::new("/nowhere")), exe, "{called}");
        }
    }

    #[test]
    fn proxy_command_words_are_quoted_for_the_shell_and_ssh() {
        for (word, expected) in
            [("a", "a"), ("it's", "'it'\\''s'"), ("$x", "'$x'"), ("[::1]:2", "'[::1]:2'"), ("50%h", "50%%h")]
        {
            assert_eq!(quoted(word), expected);
        }
    }
}
