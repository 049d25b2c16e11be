//! `tunnel config`: checks config files, and prints the values in effect.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use http::Method;
use toml::Table;
use toml::de::{DeTable, DeValue};

use crate::admin::CONFIG_PLAN;
use crate::command::admin_sockets::{AdminSocketState, ask, sockets};
use crate::command::{CONFIG_DIR, CommandError, CommandResult, Format, Role, examples, json};
use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::plan::ConfigPlan;
use crate::config::{ConfigErrors, Environment, ParsedConfig};
use crate::startup::daemon::DaemonConfig;
use tunnel_base::files;

/// A command about config files.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum ConfigCommand {
    /// Check a config and the files that it names, and report all errors. Opens no port.
    #[command(after_help = examples("tunnel config check"))]
    Check {
        /// The file.
        #[command(flatten)]
        config: ConfigFileArgs,
        /// Output format of errors, warnings and changes: text lines, or one JSON object per line.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: Format,
        /// Also list what this config would do: which sessions end and which listeners open at a reload, and what waits
        /// for a restart. Without OLD the running server is asked; if none runs, the file in /etc/tunnel is OLD.
        #[arg(long, value_name = "OLD", num_args = 0..=1, require_equals = true)]
        diff: Option<Option<PathBuf>>,
    },
    /// Print the values in effect, including defaults. Secrets are masked.
    #[command(after_help = examples("tunnel config show"))]
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
    pub fn read(&self) -> CommandResult<RoleConfigFile> {
        let path = self.file.clone().map_or_else(|| only_file(Path::new(CONFIG_DIR)), Ok)?;
        let text = files::read_text(&path)
            .map_err(|cause| CommandError::unusable(format!("cannot read {}: {cause}", path.display())))?;
        let roles = roles(&text);
        if roles.is_empty() {
            let mut report = ConfigDiagnostics::default();
            report.parse(&text);
            let why = report.finish(&text, ()).errors.into_iter().next().map_or_else(
                || {
                    "no table of a role; expected [server] or [edge], or a table below, such as [server.links]; \
                     `tunnel doctor client` checks a client.toml"
                        .to_owned()
                },
                |error| error.to_string(),
            );
            return Err(CommandError::unusable(format!("{}: {why}", path.display())));
        }
        Ok(RoleConfigFile { path, roles, text })
    }
}

impl RoleConfigFile {
    /// Returns what the program of this role reads in the file.
    ///
    /// # Errors
    ///
    /// Returns the errors in the file, or that this program was built without the role.
    fn examine(&self, role: Role, env: &Environment) -> CommandResult<ParsedConfig<Box<dyn DaemonConfig>>> {
        let parsed = role.examiner().map_err(CommandError::unusable)?(&self.text, env);
        if parsed.errors.is_empty() {
            return Ok(parsed);
        }
        let errors = ConfigErrors(parsed.errors);
        Err(CommandError::unusable(format!("{} has errors:\n{errors}", self.path.display())))
    }
}

/// Returns the values in effect of all roles in a file.
///
/// # Errors
///
/// Returns an error if the file cannot be read, or has errors.
pub fn show(args: &ConfigFileArgs, output: ShowFormat, env: &Environment) -> CommandResult {
    let file = args.read()?;
    let env = Environment { kubeconfig: args.kubeconfig.clone(), ..env.clone() };
    let mut values = Table::new();
    for role in &file.roles {
        for (path, table) in file.examine(*role, &env)?.effective {
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

/// Returns what the config in `new`, which has no errors, does if it replaces the present one.
/// A server that runs on this machine is asked, and counts the sessions that end. Otherwise the config is compared with
/// the file `old`, by default the one in /etc/tunnel. Values are never shown.
///
/// # Errors
///
/// Returns an error if a program answers with one, or the old file cannot be read or has errors.
pub async fn diff(
    new: &RoleConfigFile,
    old: Option<PathBuf>,
    env: &Environment,
    output: Format,
) -> CommandResult {
    let asked = if old.is_none() { ask_running(new, env).await? } else { None };
    let (plan, with) = match asked {
        Some((plan, socket)) => (plan, format!("the running server at {}", socket.display())),
        None => {
            let old = ConfigFileArgs { file: old, kubeconfig: None }.read()?;
            if old.path.canonicalize().ok() == new.path.canonicalize().ok() {
                return Err(CommandError::usage(
                    "--diff: the file would be compared with itself; name an earlier copy: --diff=OLD",
                ));
            }
            let with = old.path.display().to_string();
            (compare(&old, new, env)?, with)
        }
    };
    Ok(match output {
        Format::Json => json(&plan),
        Format::Text if plan == ConfigPlan::default() => format!("no change compared with {with}\n"),
        Format::Text => format!("compared with {with}:\n{plan}"),
    })
}

/// Asks the server that runs on this machine. Returns `None` if there is none.
async fn ask_running(
    new: &RoleConfigFile,
    env: &Environment,
) -> CommandResult<Option<(ConfigPlan, PathBuf)>> {
    let Ok(examine) = Role::Server.examiner() else { return Ok(None) };
    let settings = examine(&new.text, env).settings;
    let named = settings.admin_socket().filter(|path| path.exists());
    let known = sockets(named.map(Path::to_owned), &[Role::Server.name()], env).await;
    let mut running = known.into_iter().filter(|(state, _)| *state != AdminSocketState::Ended);
    let Some((_, socket)) = running.next().filter(|_| new.roles.contains(&Role::Server)) else {
        return Ok(None);
    };
    let (code, body) = ask(&socket, Method::POST, CONFIG_PLAN, new.text.clone()).await?;
    match serde_json::from_str(&body) {
        Ok(plan) if code == 200 => Ok(Some((plan, socket))),
        _ => Err(CommandError::unavailable(format!(
            "{}: {}; compare with a file: --diff=OLD",
            socket.display(),
            body.trim_end()
        ))),
    }
}

/// Returns what a program with the config of the file `old` does with that of `new`. Of files with both roles, that is a
/// server.
fn compare(old: &RoleConfigFile, new: &RoleConfigFile, env: &Environment) -> CommandResult<ConfigPlan> {
    let of_server = [old, new].iter().all(|file| file.roles.contains(&Role::Server));
    let role = if of_server { Role::Server } else { Role::Edge };
    let after = new.examine(role, env)?;
    let before = old.examine(role, env)?;
    Ok(before.settings.plan(&*after.settings).spelled(&after.spelling))
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
fn only_file(dir: &Path) -> CommandResult<PathBuf> {
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
    use crate::edge::config::EdgeConfig;

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
        let file = |name: &str, text: &str| {
            let file = dir.path().join(name);
            std::fs::write(&file, text).unwrap();
            ConfigFileArgs { file: Some(file), kubeconfig: None }.read().unwrap()
        };
        let env = Environment { kubernetes_service_host: Some("10.0.0.1".into()), ..Environment::default() };
        let compare = |old: &str, new: &str| {
            let plan = compare(&file("old.toml", old), &file("new.toml", new), &env);
            plan.map(|plan| plan.to_string().lines().map(str::to_owned).collect::<Vec<_>>())
        };
        let old = "[server.connect]\nlisten = \"127.0.0.1:1\"\nallow_from = [\"10.0.0.0/8\"]\n\
            [server.http_proxy]\nlisten = \"127.0.0.1:2\"\n[server.session]\nmax_sessions = 7\n\
            [server.tcp]\n\"127.0.0.1:3\" = \"a/b:1\"\n\"127.0.0.1:4\" = \"a/b:1\"\n";
        // Defaults that are written out change nothing, and the inherited rules concern all listeners.
        let new = "[server.connect]\nlisten = \"127.0.0.1:1\"\nallow_from = [\"10.0.0.0/9\"]\nauth = \"none\"\n\
            [server.session]\nmax_sessions = 8\n[server.intercept]\nnetworks = [\"10.0.0.0/8\"]\n\
            [server.tcp]\n\"127.0.0.1:3\" = { target = \"a/b:1\", send_proxy = false }\n\
            \"127.0.0.1:4\" = \"a/b:2\"\n\"127.0.0.1:7000-7099\" = \"a/b:1\"\n";
        let expected = [
            "reload: judges sessions of server.connect again",
            "reload: judges sessions of server.tcp.\"127.0.0.1:3\" again",
            "reload: judges sessions of server.tcp.\"127.0.0.1:4\" again",
            "reload: closes server.http_proxy",
            "reload: closes and opens again server.tcp.\"127.0.0.1:4\"",
            "reload: opens server.tcp.\"127.0.0.1:7000-7099\"",
            "restart: changes server.intercept",
            "restart: changes server.session",
        ];
        assert_eq!(compare(old, new).unwrap(), expected);
        assert_eq!(compare(old, old).unwrap(), [""; 0]);
        let proxies = new.replace("[server.session]", "proxy_protocol = [\"10.0.0.5\"]\n[server.session]");
        let again = compare(new, &proxies).unwrap();
        assert_eq!(again.iter().filter(|line| line.contains("opens again")).count(), 4, "{again:?}");
        // The first listener that needs addresses starts their watch.
        let plain = "[server.connect]\nlisten = \"127.0.0.1:1\"\n";
        let proxy = format!("{plain}[server.http_proxy]\nlisten = \"127.0.0.1:2\"\n");
        let expected = ["reload: opens server.addresses", "reload: opens server.http_proxy"];
        assert_eq!(compare(plain, &proxy).unwrap(), expected);
        let file = |path: &str| format!("{plain}[server.invitations]\nstore = \"file\"\nfile = {path:?}\n");
        assert_eq!(compare(plain, &file("/a")).unwrap(), ["reload: opens server.invitations"]);
        for other in [plain, &file("/b")] {
            assert_eq!(compare(&file("/a"), other).unwrap(), ["restart: changes server.invitations"]);
        }
        let users = |ca: &str| format!("{plain}[server.clients]\nclient_ca = {ca:?}\nnames = [\"*\"]\n");
        let judges = ["reload: judges sessions of server.clients again"];
        assert_eq!(compare(&users("/a"), &users("/b")).unwrap(), judges);
        // Order, comments and spelling change nothing.
        let superedge = |text: &str| compare("[mode.cloud.ssh]\nport = 22\n", text).unwrap();
        assert_eq!(superedge("# SSH\n[Mode.Cloud.SSH]\nPort = \"22\"\n"), [""; 0]);
        assert_eq!(
            superedge("[mode.cloud.ssh]\nport = 23\n"),
            ["reload: closes and opens again mode.cloud.ssh"]
        );
        let error = compare("[server.connect]\nlisten = 7", plain).unwrap_err();
        assert!(error.code == 78 && error.text.contains("old.toml has errors"), "{error}");
    }

    #[test]
    fn the_plan_of_an_edge_names_what_opens_and_what_waits_for_a_restart_without_values() {
        let edge = "[edge.uplink]\nnode = \"n\"\nservers = [\"a:1\"]\ntoken = \"sw0rd\"\nca = \"/c\"\n";
        let proxy = format!("{edge}[edge.http_proxy]\nlisten = \"127.0.0.1:3128\"\n");
        let fenced = format!("{proxy}allow_from = [\"::1\"]\n");
        let judges = "reload: judges sessions of edge.http_proxy again";
        let moved = proxy.replace("3128", "3129");
        for (old, new, expected) in [
            (edge, &*edge.replace("sw0rd", "other"), &["restart: changes edge.uplink"][..]),
            (edge, &proxy, &["reload: opens edge.http_proxy"]),
            (&proxy, &fenced, &[judges]),
            (&proxy, &moved, &["reload: closes and opens again edge.http_proxy"]),
            (&proxy, edge, &["reload: closes edge.http_proxy"]),
        ] {
            let plan = EdgeConfig::read(old, &Environment::default()).unwrap().0;
            let plan = plan.plan(&EdgeConfig::read(new, &Environment::default()).unwrap().0);
            assert_eq!(plan.to_string().lines().collect::<Vec<_>>(), expected);
        }
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
