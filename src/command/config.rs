//! `tunnel config`: checks config files, and prints the values in effect.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;
use toml::Table;
use toml::de::{DeTable, DeValue};

use crate::command::{CONFIG_DIR, CommandError, Format, Role, examples, json};
use crate::config::live::ConfigDiff;
use crate::config::{ConfigErrors, Environment, ParsedConfig};
use crate::edge::config::EdgeConfig;
use crate::server::config::{ListenerChange, ServerConfig};
use tunnel_base::files;

/// A command about config files.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum ConfigCommand {
    /// Check a config and the files that it names, and report all errors. Opens no port.
    #[command(after_help = examples([
        "tunnel config check                  # the file in /etc/tunnel",
        "tunnel config check new.toml --diff  # and what it changes if it replaces that file",
    ]))]
    Check {
        /// The file.
        #[command(flatten)]
        config: ConfigFileArgs,
        /// Output format of errors, warnings and changes: text lines, or one JSON object per line.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: Format,
        /// Also compare with another file, and list what changes at a reload and what only after a restart. [default:
        /// the one in /etc/tunnel]
        #[arg(long, value_name = "OLD", num_args = 0..=1, require_equals = true)]
        diff: Option<Option<PathBuf>>,
    },
    /// Print the values in effect, including defaults. Secrets are masked.
    #[command(after_help = examples([
        "tunnel config show                   # the file in /etc/tunnel",
        "tunnel config show edge.toml -o json",
    ]))]
    Show {
        /// The file.
        #[command(flatten)]
        config: ConfigFileArgs,
        /// Output format: TOML, or JSON with the same tables and keys.
        #[arg(short, long, value_name = "FORMAT", default_value = "toml")]
        output: ShowFormat,
    },
}

/// The format of the values in effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ShowFormat {
    /// TOML, as in a config file.
    Toml,
    /// JSON for programs.
    Json,
}

/// The config file of a command.
#[derive(Debug, Clone, clap::Args)]
pub struct ConfigFileArgs {
    /// Config file of a server or an edge. [default: the one in /etc/tunnel]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Kubeconfig file, as for the program that reads this config.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// A config file, and the roles that it has tables for.
#[derive(Debug)]
pub struct RoleConfigFile {
    /// The path.
    pub path: PathBuf,
    /// The roles, at least one.
    pub roles: BTreeSet<Role>,
    text: String,
}

impl ConfigFileArgs {
    /// Reads the file, and finds the roles in it.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read, has no table of a role, or is not named and not obvious.
    pub fn read(&self) -> Result<RoleConfigFile, CommandError> {
        let path = self.file.clone().map_or_else(|| only_file(Path::new(CONFIG_DIR)), Ok)?;
        let text = files::read_text(&path)
            .map_err(|cause| CommandError::unusable(format!("cannot read {}: {cause}", path.display())))?;
        let roles = roles(&text);
        if roles.is_empty() {
            let errors = ServerConfig::examine(&text, &Environment::default()).errors;
            // Only an error about text that is not TOML has no key.
            let why = errors.into_iter().find(|error| error.key.is_empty()).map_or_else(
                || "no table of a role; expected [server] or [edge], or a table below, such as [server.links]".to_owned(),
                |error| error.to_string(),
            );
            return Err(CommandError::unusable(format!("{}: {why}", path.display())));
        }
        Ok(RoleConfigFile { path, roles, text })
    }
}

/// Returns the values in effect of all roles in a file.
///
/// # Errors
///
/// Returns an error if the file cannot be read, or has errors.
pub fn show(args: &ConfigFileArgs, output: ShowFormat, env: &Environment) -> Result<String, CommandError> {
    let file = args.read()?;
    let env = Environment { kubeconfig: args.kubeconfig.clone(), ..env.clone() };
    let mut values = Table::new();
    for role in &file.roles {
        let (effective, errors) = match role {
            Role::Server => {
                let parsed = ServerConfig::examine(&file.text, &env);
                (parsed.effective, parsed.errors)
            }
            Role::Edge => {
                let parsed = EdgeConfig::examine(&file.text, &env);
                (parsed.effective, parsed.errors)
            }
        };
        if !errors.is_empty() {
            let errors = ConfigErrors(errors);
            return Err(CommandError::unusable(format!("{} has errors:\n{errors}", file.path.display())));
        }
        for (path, table) in effective {
            // Only the last part of a path can be a name that the user chose. It is in quotes.
            let (tables, name) = match path.strip_suffix('"').and_then(|path| path.split_once(".\"")) {
                Some((tables, name)) => (tables, Some(name)),
                None => (path.as_str(), None),
            };
            insert(&mut values, tables.split('.').chain(name), table);
        }
    }
    Ok(match output {
        ShowFormat::Toml => {
            format!("# Values in effect of {}. Secrets are masked.\n\n{values}", file.path.display())
        }
        ShowFormat::Json => json(&values),
    })
}

/// A difference between two config files.
#[derive(Debug, Serialize)]
struct ConfigChange {
    /// When it takes effect: at a `reload`, or after a `restart`.
    at: &'static str,
    /// What happens to it: `changes`; of a listener also `opens`, `closes` or `closes and opens again`.
    change: &'static str,
    /// The full key, or that of the listener's table.
    key: String,
}

/// Returns what changes if a program with the config of the file `old` gets that of `new`, which has no errors: one
/// line each. Values are never shown.
///
/// # Errors
///
/// Returns an error if the old file cannot be read, or has errors.
pub fn diff(
    new: &RoleConfigFile,
    old: &ConfigFileArgs,
    env: &Environment,
    output: Format,
) -> Result<String, CommandError> {
    let env = Environment { kubeconfig: old.kubeconfig.clone(), ..env.clone() };
    let old = old.read()?;
    let ConfigDiff { live, at_start, .. } = ConfigDiff::between(&old.text, &new.text, &env);
    let reload = |change, key| ConfigChange { at: "reload", change, key };
    let restart = |key| ConfigChange { at: "restart", change: "changes", key };
    let mut changes: Vec<_> = live.into_iter().map(|key| reload("changes", key)).collect();
    if old.roles.contains(&Role::Server) && new.roles.contains(&Role::Server) {
        let ParsedConfig { settings: before, errors, .. } = ServerConfig::examine(&old.text, &env);
        if !errors.is_empty() {
            let errors = ConfigErrors(errors);
            return Err(CommandError::unusable(format!("{} has errors:\n{errors}", old.path.display())));
        }
        let ParsedConfig { settings, spelling, .. } = ServerConfig::examine(&new.text, &env);
        for (change, key) in before.listener_changes(&settings) {
            changes.push(match change {
                ListenerChange::Opens => reload("opens", spelling.of(key)),
                ListenerChange::Closes => reload("closes", spelling.of(key)),
                ListenerChange::Reopens => reload("closes and opens again", spelling.of(key)),
            });
        }
        let dependent = before.dependent_changes(&settings).into_iter();
        let dependent = dependent.filter(|key| !at_start.iter().any(|changed| changed.starts_with(key)));
        changes.extend(dependent.map(|key| restart(spelling.of(key))));
    }
    changes.extend(at_start.into_iter().map(restart));
    Ok(match output {
        Format::Json => lines(changes.iter().map(|change| serde_json::json!(change).to_string())),
        Format::Text if changes.is_empty() => format!("no change compared with {}\n", old.path.display()),
        Format::Text => {
            lines(changes.iter().map(|ConfigChange { at, change, key }| format!("{at}: {change} {key}")))
        }
    })
}

fn lines(all: impl Iterator<Item = String>) -> String {
    all.map(|line| line + "\n").collect()
}

/// Inserts a table at a path, and creates the tables above it.
fn insert<'p>(parent: &mut Table, mut path: impl Iterator<Item = &'p str>, table: Table) {
    let Some(name) = path.next() else { return parent.extend(table) };
    let child = parent.entry(name).or_insert_with(|| Table::new().into());
    if let Some(child) = child.as_table_mut() {
        insert(child, path, table);
    }
}

/// Returns the roles that a file has tables for, also in SuperEdge's form.
fn roles(text: &str) -> BTreeSet<Role> {
    // Syntax errors are found again when the role's config is read.
    let (file, _) = DeTable::parse_recoverable(text);
    let mut roles = BTreeSet::new();
    for (name, value) in file.get_ref() {
        match (name.get_ref().as_ref(), value.get_ref()) {
            ("server", _) => _ = roles.insert(Role::Server),
            ("edge", _) => _ = roles.insert(Role::Edge),
            (mode, DeValue::Table(tables)) if mode.eq_ignore_ascii_case("mode") => {
                let is = |name: &str| tables.keys().any(|key| key.get_ref().eq_ignore_ascii_case(name));
                roles.extend(
                    is("cloud").then_some(Role::Server).into_iter().chain(is("edge").then_some(Role::Edge)),
                );
            }
            _ => {}
        }
    }
    roles
}

/// Returns the config file in a directory, if there is exactly one that a server or an edge reads by default.
fn only_file(dir: &Path) -> Result<PathBuf, CommandError> {
    let [server, edge] =
        [Role::Server, Role::Edge].map(|role| Some(role.config_in(dir)).filter(|path| path.exists()));
    match (server, edge) {
        (Some(path), None) | (None, Some(path)) => Ok(path),
        (Some(server), Some(edge)) => Err(CommandError::usage(format!(
            "there are {} and {}; name one of them",
            server.display(),
            edge.display()
        ))),
        (None, None) => Err(match dir.join("server.toml").try_exists() {
            Ok(_) => {
                CommandError::usage(format!("there is no config file in {}; name a file", dir.display()))
            }
            Err(cause) => CommandError::refused(format!(
                "cannot look into {}: {cause}; run this as root, or as the user of the program",
                dir.display()
            )),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_role_is_derived_from_the_config_files_tables() {
        let found = |text: &str| roles(text).into_iter().map(Role::name).collect::<Vec<_>>().join(",");
        for (text, expected) in [
            ("", ""),
            ("[other]", ""),
            ("[server.links]\nlisten = 1", "server"),
            ("[edge]", "edge"),
            ("[Mode.Cloud.stream]", "server"),
            ("[mode.edge]\n[server]", "server,edge"),
            ("[server.links]\nlisten = not toml", "server"),
        ] {
            assert_eq!(found(text), expected, "{text}");
        }
    }

    #[test]
    fn a_config_file_without_a_role_is_refused_without_quoting_it() {
        let dir = tempfile::tempdir().unwrap();
        for (text, reason) in [("x = 1", "no table of a role"), ("token = \"secret-1", "not TOML: ")] {
            let file = dir.path().join("x.toml");
            std::fs::write(&file, text).unwrap();
            let result = ConfigFileArgs { file: Some(file), kubeconfig: None }.read().unwrap_err();
            assert!(
                result.code == 78 && result.text.contains(reason) && !result.text.contains("secret-1"),
                "{result}"
            );
        }
    }

    #[test]
    fn the_config_file_of_a_directory_is_used_only_if_it_is_the_only_one() {
        let dir = tempfile::tempdir().unwrap();
        let result = |dir: &Path| only_file(dir).map(|path| path.file_name().unwrap().to_owned());
        assert!(result(dir.path()).unwrap_err().text.contains("no config file"));
        // A file in place of a directory cannot be searched by any user, not even by root.
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(result(file.path()).unwrap_err().text.contains("cannot look into"));
        for (name, expected) in [("cloud.toml", "cloud.toml"), ("server.toml", "server.toml")] {
            std::fs::write(dir.path().join(name), "").unwrap();
            assert_eq!(result(dir.path()).unwrap(), expected);
        }
        std::fs::write(dir.path().join("edge.toml"), "").unwrap();
        let result = result(dir.path()).unwrap_err();
        assert!(
            result.code == 64 && result.text.contains("server.toml") && result.text.contains("edge.toml"),
            "{result}"
        );
    }

    #[test]
    fn a_diff_tells_what_a_reload_changes_and_what_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let args = |name: &str, text: &str| {
            let file = dir.path().join(name);
            std::fs::write(&file, text).unwrap();
            ConfigFileArgs { file: Some(file), kubeconfig: None }
        };
        let old = "[server.connect]\nlisten = \"127.0.0.1:1\"\nallow_from = [\"10.0.0.0/8\"]\n\
            [server.http_proxy]\nlisten = \"127.0.0.1:2\"\n[server.session]\nmax_sessions = 7\n\
            [server.tcp]\n\"127.0.0.1:3\" = \"a/b:1\"\n\"127.0.0.1:4\" = \"a/b:1\"\n";
        // Defaults that are written out change nothing, and the inherited proxies concern all listeners.
        let new = "[server.connect]\nlisten = \"127.0.0.1:1\"\nallow_from = [\"10.0.0.0/9\"]\nauth = \"none\"\n\
            [server.session]\nmax_sessions = 8\n[server.intercept]\nnetworks = [\"10.0.0.0/8\"]\n\
            [server.tcp]\n\"127.0.0.1:3\" = { target = \"a/b:1\", send_proxy = false }\n\
            \"127.0.0.1:4\" = \"a/b:2\"\n\"127.0.0.1:7000-7099\" = \"a/b:1\"\n";
        let env = Environment { kubernetes_service_host: Some("10.0.0.1".into()), ..Environment::default() };
        let compare = |old: &str, new: &str, output| {
            let new = args("new.toml", new).read().unwrap();
            diff(&new, &args("old.toml", old), &env, output)
        };
        let expected = [
            "reload: changes server.connect.allow_from",
            "reload: closes and opens again server.tcp.\"127.0.0.1:4\"",
            "reload: opens server.tcp.\"127.0.0.1:7000-7099\"",
            "reload: closes server.http_proxy",
            "restart: changes server.session.max_sessions",
            "restart: changes server.intercept.networks",
        ];
        assert_eq!(compare(old, new, Format::Text).unwrap().lines().collect::<Vec<_>>(), expected);
        let socks =
            compare(new, &format!("{new}[server.egress]\nlisten = \"unix:/a\"\n"), Format::Json).unwrap();
        assert_eq!(socks, "{\"at\":\"reload\",\"change\":\"opens\",\"key\":\"server.egress\"}\n");
        assert!(compare(old, old, Format::Text).unwrap().starts_with("no change compared with "));
        let proxies = new.replace("[server.session]", "proxy_protocol = [\"10.0.0.5\"]\n[server.session]");
        assert_eq!(compare(new, &proxies, Format::Text).unwrap().matches("opens again").count(), 4);
        // The first listener that needs addresses starts their watch, which is made at the start.
        let plain = "[server.connect]\nlisten = \"127.0.0.1:1\"\n";
        let in_cluster =
            compare(plain, &format!("{plain}[server.http_proxy]\nlisten = \"127.0.0.1:2\"\n"), Format::Text);
        let expected = "reload: opens server.http_proxy\nrestart: changes server.addresses.kubernetes\n";
        assert_eq!(in_cluster.unwrap(), expected);
        let edge = "[edge.uplink]\nnode = \"n\"\nservers = [\"a:1\"]\ntoken = \"t\"\nca = \"/c\"\n";
        let proxy = format!("{edge}[edge.http_proxy]\nlisten = \"127.0.0.1:3128\"\n");
        let expected = "restart: changes edge.http_proxy.listen\n";
        assert_eq!(compare(edge, &proxy, Format::Text).unwrap(), expected);
        let error = compare("[server.connect]\nlisten = 7", plain, Format::Text).unwrap_err();
        assert!(error.code == 78 && error.text.contains("old.toml has errors"), "{error}");
    }

    #[test]
    fn config_show_prints_a_valid_config_without_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("edge.toml");
        let text = "[edge.uplink]\nnode = \"n\"\nservers = [\"a:1\"]\ntoken = \"secret-1\"\nca = \"/c\"\n";
        std::fs::write(&file, text).unwrap();
        let args = ConfigFileArgs { file: Some(file.clone()), kubeconfig: None };
        let shown = show(&args, ShowFormat::Toml, &Environment::default()).unwrap();
        let values: Table = toml::from_str(&shown).unwrap();
        assert_eq!(values["edge"]["uplink"]["node"].as_str(), Some("n"));
        assert_eq!(values["edge"]["uplink"]["token"].as_str(), Some("***"));
        assert!(values["edge"]["session"].is_table() && !shown.contains("secret-1"), "{shown}");
        let as_json = show(&args, ShowFormat::Json, &Environment::default()).unwrap();
        assert_eq!(serde_json::from_str::<Table>(&as_json).unwrap(), values);
        std::fs::write(&file, format!("{text}port = 1\n")).unwrap();
        let result = show(&args, ShowFormat::Toml, &Environment::default()).unwrap_err();
        assert!(result.code == 78 && result.text.contains("line 6: edge.uplink.port"), "{result}");
    }

    #[test]
    fn config_show_of_every_listener_reads_back_to_the_same_output() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("server.toml");
        let text = "[server.connect]\nlisten = \"127.0.0.1:1\"\nallow_from = [\"10.0.0.0/8\"]\n\
            rules = [{ nodes = [\"a\"], ports = [22] }]\n\
            [server.http]\nlisten_ip = \"127.0.0.1\"\nports = { \"10255\" = \"host\", \"2\" = \"127.0.0.1:3\" }\n\
            [server.https]\nclient_ca = \"/ca\"\nnames = [\"x\"]\nports = { \"10250\" = \"127.0.0.1:10250\" }\n\
            [server.tcp]\n\"127.0.0.1:5\" = \"node1/127.0.0.1:6443\"\n\
            [server.egress]\nlisten = \"127.0.0.1:8000\"\n[server.http_proxy]\nlisten = \"127.0.0.1:8080\"\n\
            [server.addresses.nodes]\n\"10.0.0.0/24\" = \"node1\"\n";
        std::fs::write(&file, text).unwrap();
        let show_file = || {
            let args = ConfigFileArgs { file: Some(file.clone()), kubeconfig: None };
            show(&args, ShowFormat::Toml, &Environment::default()).unwrap()
        };
        let shown = show_file();
        for line in [
            "10255 = \"host\"",
            "target = \"node1/127.0.0.1:6443\"",
            "[server.tcp.\"127.0.0.1:5\"]",
            "ports = [22]",
        ] {
            assert!(shown.contains(line), "{line}: {shown}");
        }
        std::fs::write(&file, &shown).unwrap();
        assert_eq!(show_file(), shown);
    }
}
