//! `tunnel invite`, `tunnel invitations` and `tunnel join`: authorizing machines and users to join a cloud, and joining it.

mod user;

use std::convert::Infallible;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use clap::Subcommand;
use rand::seq::SliceRandom as _;
use rustix::system::uname;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::admin::{
    InvitationResponse, MAX_INVITATION_SECONDS, MAX_KEY_SECONDS, MAX_USES, MIN_INVITATION_SECONDS,
};
use crate::command::admin_api::{AdminApi, query};
use crate::command::init::{
    EdgeConfigText, checked, folder_on_machine, host_of_server, random_token, tls_note,
};
use crate::command::output_dir::OutputDir;
use crate::command::service::{self, Unit};
use crate::command::status::{Table, duration};
use crate::command::{CommandError, Format, Role, examples, shell_word};
use crate::config::Environment;
use crate::edge::Edge;
use crate::edge::config::EdgeConfig;
use crate::invitations::store::Enrolled;
use crate::invitations::subject::Subject;
use crate::invitations::{InvitationCode, ServerCa};
use tunnel_base::files;
use tunnel_base::logging;
use tunnel_base::names::{ClientName, DeviceName, Host, NodeName, Target, UserName};
use tunnel_base::policy::Glob;
use tunnel_link::grpc::enrol::{EnrolCallError, EnrolMethod, JoinParams, call_enrol};
use tunnel_net::dial::dial;
use tunnel_net::http_proxy::HttpProxyClient;
use tunnel_net::resolver::Resolver;
use tunnel_net::tls::error::HandshakeError;
use tunnel_net::tls::{TlsClientConfig, Trust, server_name};

/// Arguments of `tunnel invite`.
#[derive(Debug, Clone, clap::Args)]
pub struct InviteArgs {
    /// Name of the node that the machine becomes.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["user", "nodes"])]
    #[arg(required_unless_present_any = ["user", "nodes"])]
    pub node: Option<NodeName>,
    /// User to whom the machine belongs, which is no node then.
    #[arg(long, value_name = "NAME")]
    pub user: Option<UserName>,
    /// With --uses: pattern of the nodes for which to make a join key. With --user: nodes that the user should reach,
    /// separated by commas; only printed, as a rule for the servers' config. '*' matches any run of characters.
    #[arg(long, value_name = "NODES", value_delimiter = ',')]
    pub nodes: Vec<Glob>,
    /// Number of nodes that may join by the key, each under its own name.
    #[arg(long, value_name = "NUMBER", requires = "nodes", conflicts_with = "user")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_USES)))]
    pub uses: Option<u32>,
    /// Ports of these nodes, separated by commas.
    #[arg(long, value_name = "PORTS", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..))]
    #[arg(requires = "user")]
    pub ports: Vec<u16>,
    /// Lifetime of the invitation: a whole number with s, m, h or d, from 1m to 7d, and to 365d for a join key.
    #[arg(long = "expires", alias = "ttl", value_name = "TIME", default_value = "1h", value_parser = lasting)]
    pub lasting: Duration,
    /// Output format.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: Format,
    /// Admin socket of the server. [default: that of a server of this user, otherwise a link of client.toml; the server's
    /// log contains the path]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Arguments of `tunnel invitations`.
#[derive(Debug, Clone, clap::Args)]
pub struct InvitationsArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: InvitationsCommand,
    /// Admin socket of the server. [default: that of a server of this user, otherwise a link of client.toml; the server's
    /// log contains the path]
    #[arg(long, value_name = "PATH", global = true)]
    pub socket: Option<PathBuf>,
}

/// Commands of `tunnel invitations`.
#[derive(Debug, Clone, Subcommand)]
pub enum InvitationsCommand {
    /// List the nodes and users' devices that have joined, who has an open invitation, and the join keys.
    #[command(after_help = examples([
        "tunnel invitations list",
        "tunnel invitations list -o json",
    ]))]
    List {
        /// Output format.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: Format,
    },
    /// Revoke the token and the open invitation of a node, those of a user, or a join key. The links close within 10 s,
    /// at all servers.
    #[command(after_help = examples([
        "tunnel invitations revoke node7",
        "tunnel invitations revoke --key 4f3c0a91d2 --with-nodes",
    ]))]
    Revoke {
        /// Node that has joined, or was invited.
        #[arg(value_name = "NODE", required_unless_present_any = ["user", "key"], conflicts_with_all = ["user", "key"])]
        node: Option<NodeName>,
        /// User, with all devices and open invitations.
        #[arg(long, value_name = "NAME")]
        user: Option<UserName>,
        /// Only this device of the user.
        #[arg(long, value_name = "NAME", requires = "user")]
        device: Option<DeviceName>,
        /// Join key, by its ID. No further machine joins by it, and its nodes remain.
        #[arg(long, value_name = "ID", conflicts_with = "user")]
        key: Option<String>,
        /// Also revoke the tokens of the nodes that came by the key.
        #[arg(long, requires = "key")]
        with_nodes: bool,
    },
}

/// Requests an invitation from a server. Returns the command for the machine that should join.
///
/// # Errors
///
/// Returns an error if no server responds, or it refuses.
pub async fn invite(args: InviteArgs, env: &Environment) -> Result<String, CommandError> {
    query(args.socket.clone(), &["server"], env, async |api| invite_by(api, &args).await).await
}

async fn invite_by(api: &AdminApi, args: &InviteArgs) -> Result<String, CommandError> {
    let invitee = invitee(args)?;
    let mut body = json!({ "subject": invitee.to_string(), "seconds": args.lasting.as_secs() });
    if let Some(uses) = args.uses {
        // Otherwise absent, as older servers do not know it.
        body["uses"] = uses.into();
    }
    let answer = api.post("/invitations", body.to_string()).await?;
    let InvitationResponse { code, cloud, key, .. } = api.parse(&answer)?;
    // They become a part of a command for root, so nothing else passes.
    let code = code.parse::<InvitationCode>().map_err(|cause| api.incompatible(&cause))?;
    cloud.parse::<Target>().map_err(|cause| api.incompatible(&cause))?;
    if *code.invitee() != invitee {
        return Err(api.incompatible(&"its invitation is for another node or user"));
    }
    if args.output == Format::Json {
        return Ok(answer);
    }
    let (choice, cloud, lasting) = (api.choice(), shell_word(&cloud), format_duration(args.lasting));
    Ok(match &invitee {
        Subject::User(user) | Subject::Device(ClientName { user, .. }) => format!(
            "{choice}on a machine of {user}, within {lasting}, as that person:\n  \
             echo {code} | tunnel join --user {cloud} --invitation -\n\
             It works once, for one device. Anyone who has it can be {user}, so send it over a private channel.\n\
             {user} reaches only what a rule permits, in the config of each server:\n  \
             [server.clients]\n  rules = [{rule}]\n\
             Add it to the rules that are there: this applies without a restart. If there is no such table yet, add both \
             lines, and restart the server.\n",
            rule = rule(user, args),
        ),
        Subject::Node(node) => format!(
            "{choice}on {node}, within {lasting}, as root:\n  echo {code} | tunnel join {cloud} --invitation -\n\
             It works once. If {node} has joined before, its earlier token then ends. Anyone who has it can become {node}, \
             so send it over a private channel.\n{note}",
            note = tls_note(node),
        ),
        Subject::Nodes(pattern) => format!(
            "{choice}on each machine, within {lasting}, as root:\n  echo {key_code} | tunnel join {cloud} --invitation -\n\
             It works for {uses} machines, each named by its host's name, or by --node. Anyone who has it can become any \
             {pattern} that has not joined, so keep it as secret as a password. To end it:\n  \
             tunnel invitations revoke --key {key}\n",
            key_code = shell_word(&code.to_string()),
            uses = args.uses.unwrap_or_default(),
            key = logging::printable(&key.unwrap_or_default()),
        ),
    })
}

/// Returns whom the arguments invite.
fn invitee(args: &InviteArgs) -> Result<Subject, CommandError> {
    let (invitee, max_seconds) = match (&args.nodes[..], args.uses) {
        ([pattern], Some(_)) if pattern.to_string().contains('*') => {
            (Subject::Nodes(pattern.clone()), MAX_KEY_SECONDS)
        }
        (_, Some(_)) => {
            return Err(CommandError::usage(
                "--nodes: expected one pattern with '*'; for one node set --node instead",
            ));
        }
        ([_, ..], None) if args.user.is_none() => {
            return Err(CommandError::usage("--nodes: set --uses for a join key, or --user for a rule"));
        }
        _ => (subject(args.node.as_ref(), args.user.as_ref(), None)?, MAX_INVITATION_SECONDS),
    };
    if args.lasting.as_secs() > max_seconds {
        return Err(CommandError::usage(
            "--expires: at most 7d, unless it is for a join key (--nodes and --uses)",
        ));
    }
    Ok(invitee)
}

/// Returns the access rule for a user, in TOML. Without arguments it is an example, which permits nothing real.
fn rule(user: &UserName, InviteArgs { nodes, ports, .. }: &InviteArgs) -> String {
    let nodes: Vec<_> = nodes.iter().map(|node| format!("\"{node}\"")).collect();
    let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
    let (nodes, ports) = match (nodes.is_empty(), ports.is_empty()) {
        (true, true) => ("\"NODE\"".to_owned(), "22".to_owned()),
        _ => (nodes.join(", "), ports.join(", ")),
    };
    let part = |key, list: String| if list.is_empty() { list } else { format!(", {key} = [{list}]") };
    format!("{{ users = [\"{user}\"]{}{} }}", part("nodes", nodes), part("ports", ports))
}

/// Returns whom the arguments name.
fn subject(
    node: Option<&NodeName>,
    user: Option<&UserName>,
    device: Option<&DeviceName>,
) -> Result<Subject, CommandError> {
    match (node.cloned(), user.cloned(), device.cloned()) {
        (Some(node), ..) => Ok(Subject::Node(node)),
        (None, Some(user), Some(device)) => Ok(Subject::Device(ClientName { user, device })),
        (None, Some(user), None) => Ok(Subject::User(user)),
        (None, None, _) => Err(CommandError::usage("expected a node, or --user")),
    }
}

/// Lists those who joined by a server's invitations or have one, or revokes one.
///
/// # Errors
///
/// Returns an error if no server responds, or there is nothing to revoke.
pub async fn manage(args: InvitationsArgs, env: &Environment) -> Result<String, CommandError> {
    query(args.socket, &["server"], env, async |api| manage_by(api, args.command).await).await
}

async fn manage_by(api: &AdminApi, command: InvitationsCommand) -> Result<String, CommandError> {
    match command {
        InvitationsCommand::List { output } => {
            let answer = api.get("/invitations").await?;
            let all: Vec<Enrolled> = api.parse(&answer)?;
            Ok(if output == Format::Json { answer } else { api.choice().to_owned() + &tables(&all) })
        }
        InvitationsCommand::Revoke { key: Some(key), with_nodes, .. } => {
            let body = json!({ "key": key, "with_nodes": with_nodes });
            api.post("/revocations", body.to_string()).await?;
            let end =
                if with_nodes { "the links of its nodes close within 10 s" } else { "its nodes remain" };
            Ok(format!("{}revoked; {end}\n", api.choice()))
        }
        InvitationsCommand::Revoke { node, user, device, .. } => {
            let subject = subject(node.as_ref(), user.as_ref(), device.as_ref())?;
            let body = json!({ "subject": subject.to_string() });
            api.post("/revocations", body.to_string()).await?;
            let choice = api.choice();
            Ok(match &subject {
                Subject::Node(_) | Subject::Nodes(_) => format!(
                    "{choice}revoked; the links of {subject} close within 10 s\nto add {subject} again, here:\n  \
                     tunnel invite --node {subject}\nand there, as root, before the command that invite prints:\n  \
                     cd /etc/tunnel && mv -t $(mktemp -d old.XXXX) edge.toml certs token\n"
                ),
                Subject::User(user) => format!(
                    "{choice}revoked; the links of {user} close within 10 s\nRules that name {user} remain in the \
                     servers' config. They apply again if somebody joins by another invitation for {user}.\n"
                ),
                Subject::Device(ClientName { user, device }) => format!(
                    "{choice}revoked; the links of {user}'s {device} close within 10 s\nto add it again, here:\n  \
                     tunnel invite --user {user}\nand there, before the command that invite prints:\n  \
                     cd ~/.config/tunnel && mv -t $(mktemp -d old.XXXX) client.toml ca.crt\n"
                ),
            })
        }
    }
}

/// Returns a table of nodes, and one of users and one of join keys if there are any.
fn tables(all: &[Enrolled]) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut nodes = Table::new(&["NODE", "JOINED", "OPEN INVITATION", "KEY"]);
    let mut users = Table::new(&["USER", "DEVICE", "OPEN INVITATION"]);
    let mut keys = Table::new(&["KEY", "NODES", "USES", "LEFT", "OPEN"]);
    let (mut has_users, mut has_keys) = (false, false);
    for one in all {
        let left = |until: u64| format!("{} left", duration(until.saturating_sub(now) as f64));
        let invited = one.invited_until.map_or("-".to_owned(), left);
        let name = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), logging::printable);
        if one.pattern.is_some() {
            has_keys = true;
            let (uses, used) = (one.uses.unwrap_or_default(), one.used.unwrap_or_default());
            let (uses, left) = (uses.to_string(), uses.saturating_sub(used).to_string());
            keys.row(vec![name(&one.key), name(&one.pattern), uses, left, invited]);
        } else if one.user.is_some() {
            has_users = true;
            users.row(vec![name(&one.user), name(&one.device), invited]);
        } else {
            let joined = if one.joined { "yes" } else { "no" }.to_owned();
            nodes.row(vec![name(&one.node), joined, invited, name(&one.key)]);
        }
    }
    let more = [(has_users, users), (has_keys, keys)].into_iter().filter(|(has_any, _)| *has_any);
    more.fold(format!("{nodes}\n"), |text, (_, table)| format!("{text}\n{table}\n"))
}

/// Formats a duration in words.
fn format_duration(lasting: Duration) -> String {
    let seconds = lasting.as_secs();
    match seconds {
        s if s % (24 * 3600) == 0 => format!("{} d", s / (24 * 3600)),
        s if s % 3600 == 0 => format!("{} h", s / 3600),
        s if s % 60 == 0 => format!("{} min", s / 60),
        s => format!("{s} s"),
    }
}

fn lasting(text: &str) -> Result<Duration, String> {
    let expected = "expected a whole number with s, m, h or d, from 1m to 365d";
    let unit = text.chars().last().and_then(|unit| UNITS.iter().find(|(name, _)| *name == unit));
    let (unit, seconds) = unit.ok_or(expected)?;
    let number: u64 = text.strip_suffix(*unit).unwrap_or_default().parse().map_err(|_| expected)?;
    let seconds = number.saturating_mul(*seconds);
    let is_valid = (MIN_INVITATION_SECONDS..=MAX_KEY_SECONDS).contains(&seconds);
    if is_valid { Ok(Duration::from_secs(seconds)) } else { Err(expected.to_owned()) }
}

const UNITS: [(char, u64); 4] = [('s', 1), ('m', 60), ('h', 3600), ('d', 24 * 3600)];

// Joining: makes this machine a node of a cloud that has invited it, or a device of a user.

/// Arguments of `tunnel join`.
#[derive(Debug, Clone, clap::Args)]
pub struct JoinArgs {
    /// Address of the servers, as edges dial it.
    #[arg(value_name = "SERVER:PORT")]
    pub server: Target,
    /// File with the invitation or join key that `tunnel invite` printed, or - for stdin. It names the node that this
    /// machine becomes, a pattern of nodes, or its user.
    #[arg(long, value_name = "FILE")]
    pub invitation: InvitationSource,
    /// The machine becomes a device of the invited user, and is no node. Writes ~/.config/tunnel/client.toml.
    #[arg(long)]
    pub user: bool,
    /// Name of the user's device. Default: the host's name.
    #[arg(long, value_name = "NAME", requires = "user")]
    pub device: Option<DeviceName>,
    /// Name of the node, if the invitation is a join key for several. Default: NODE_NAME of the environment, or the
    /// host's name.
    #[arg(long, value_name = "NAME", conflicts_with = "user")]
    pub node: Option<NodeName>,
    /// Name in the server's certificate, if it differs from the dialled name.
    #[arg(long, value_name = "NAME", value_parser = host_of_server)]
    pub tls_server_name: Option<Host>,
    /// Folder for config, CA and token; its existing contents are kept.
    #[arg(long, value_name = "DIR", default_value = "/etc/tunnel", conflicts_with = "user")]
    pub install_dir: PathBuf,
}

/// Where `tunnel join` finds the invitation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvitationSource {
    /// In the command line. Not documented, because other users of the machine can read it there.
    Argument(InvitationCode),
    /// On stdin.
    Stdin,
    /// In a file.
    File(PathBuf),
}

impl FromStr for InvitationSource {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match (text, text.parse()) {
            ("-", _) => Self::Stdin,
            (_, Ok(code)) => Self::Argument(code),
            (_, Err(_)) => Self::File(text.into()),
        })
    }
}

impl InvitationSource {
    /// Reads the invitation. Blocks on the file or on stdin.
    fn read(&self, stdin: impl Read) -> Result<InvitationCode, CommandError> {
        let (name, text) = match self {
            Self::Argument(code) => return Ok(code.clone()),
            Self::Stdin => ("stdin".to_owned(), read_text(stdin)),
            Self::File(path) => (path.display().to_string(), std::fs::File::open(path).and_then(read_text)),
        };
        let text = text.map_err(|cause| {
            CommandError::usage(format!(
                "--invitation: cannot read {name}: {cause}; name a file with the invitation, or - for stdin"
            ))
        })?;
        text.parse().map_err(|error| CommandError::usage(format!("--invitation: {name}: {error}")))
    }
}

/// Reads at most [`MAX_INVITATION`] bytes.
fn read_text(from: impl Read) -> std::io::Result<String> {
    let mut content = Vec::new();
    from.take(MAX_INVITATION).read_to_end(&mut content)?;
    files::text(content)
}

/// Longer than any invitation.
const MAX_INVITATION: u64 = 4096;

/// Joins as a node or as a user's device, and writes the files that it needs. `variable` returns environment variables by
/// name. Returns what was written and what to do next, as lines for the terminal. An attempt that may have been granted
/// is continued by running it again.
///
/// # Errors
///
/// Returns an error if the invitation is not valid, no server is reachable, or a file cannot be written.
pub async fn run(
    args: &JoinArgs,
    variable: impl Fn(&str) -> Option<String>,
    stdin: impl Read,
) -> Result<String, CommandError> {
    let code = args.invitation.read(stdin)?;
    match (code.invitee(), args.user) {
        (Subject::User(user), true) => user::join(args, &code, user, variable).await,
        (invitee @ (Subject::Node(_) | Subject::Nodes(_)), false) => {
            let env = Environment::read(variable);
            join_node(args, &code, &node_of_this_machine(invitee, args.node.as_ref(), &env)?, &env).await
        }
        (node @ (Subject::Node(_) | Subject::Nodes(_)), true) => Err(CommandError::usage(format!(
            "--user: the invitation is for node {node}; leave --user out, or ask for `tunnel invite --user`"
        ))),
        (Subject::User(user) | Subject::Device(ClientName { user, .. }), _) => {
            Err(CommandError::usage(format!(
                "--invitation: it is for user {user}, whose device is no node; set --user, or ask for `tunnel invite --node`"
            )))
        }
    }
}

/// Returns the name of the node that this machine becomes.
fn node_of_this_machine(
    invitee: &Subject,
    named: Option<&NodeName>,
    env: &Environment,
) -> Result<NodeName, CommandError> {
    let (from, node) = match (named, invitee, env.node_name.as_deref().filter(|name| !name.is_empty())) {
        (Some(node), ..) => ("--node", node.clone()),
        (None, Subject::Node(node), _) => return Ok(node.clone()),
        (None, _, name) => {
            let from = if name.is_some() { "NODE_NAME" } else { "the host's name" };
            let node = name.map_or_else(|| uname().nodename().to_string_lossy().parse(), str::parse);
            (from, node.map_err(|why| CommandError::usage(format!("{from}: {why}; set --node")))?)
        }
    };
    if invitee.admits(&Subject::Node(node.clone())) {
        return Ok(node);
    }
    Err(CommandError::usage(format!(
        "{from}: {node} does not match the invitation, which is for {invitee}; set --node, or ask for another invitation"
    )))
}

async fn join_node(
    args: &JoinArgs,
    code: &InvitationCode,
    node: &NodeName,
    env: &Environment,
) -> Result<String, CommandError> {
    let to = folder_on_machine("--install-dir", &args.install_dir)?;
    // The package's unit is used where it is installed; another unit would shadow it.
    let unit = service::packaged(Role::Edge).is_none().then_some(UNIT);
    let new_unit = unit.map(|_| new_unit(&args.install_dir)).transpose()?.flatten();
    let entries = ENTRIES.into_iter().chain(new_unit.as_ref().and(unit)).map(str::to_owned);
    // Local steps that can fail come first, because an invitation can be used only once.
    let folder = OutputDir::resume(&args.install_dir, entries)?;
    let token = folder.write_once(TOKEN_FILE, &format!("{}\n", random_token()))?;
    let (server, dns) = (args.server.to_string(), args.tls_server_name.as_ref());
    let text = EdgeConfigText { node, server: &server, dns, has_kubelet: false };
    folder.rewrite("edge.toml", &text.at(to))?;
    if let Some(text) = new_unit {
        folder.rewrite(UNIT, &text)?;
    }
    let join_client = JoinClient::new(args, code, node.to_string(), token.trim(), folder, CA_FILE, env)?;
    join_client
        .join(|folder| {
            let here = folder.to_string_lossy().into_owned();
            checked("edge.toml", EdgeConfig::read(&text.at(&here), &Environment::default()), Edge::validate)
        })
        .await?;
    let (more, start) = match unit {
        // systemctl links no file where `tunnel service install` has written one.
        Some(unit) if Path::new(service::UNIT_DIR).join(unit).exists() => {
            (format!(", {unit}"), unit.to_owned())
        }
        Some(unit) => (format!(", {unit}"), format!("{to}/{unit}")),
        None => (String::new(), UNIT.to_owned()),
    };
    Ok(format!(
        "{node} has joined; in {to}, for this user only: edge.toml, certs/ca.crt, token/token{more}\nnext, here:\n  tunnel edge -c {to}/edge.toml\n\
         or, to let systemd start it now and at every boot:\n{readable}  systemctl enable --now {start}\n{note}",
        readable = service::make_readable(&args.install_dir),
        note = tls_note(node),
    ))
}

/// Returns the text of the unit, or `None` if it is in the folder since an earlier join. systemd may use that file.
fn new_unit(dir: &Path) -> Result<Option<String>, CommandError> {
    let text = Unit::of_this_machine(Role::Edge).text(&dir.join("edge.toml"))?;
    let path = dir.join(UNIT);
    match std::fs::read_to_string(&path) {
        Ok(before) if before == text => Ok(None),
        Ok(_) => Err(CommandError::cannot_write(format!(
            "{} is there already and differs from the unit that join would write; move it away and join again",
            path.display()
        ))),
        // The folder reports a file that cannot be read as one that is there already.
        Err(_) => Ok(Some(text)),
    }
}

/// The future contents of the folder.
const ENTRIES: [&str; 3] = ["edge.toml", "certs", "token"];
const TOKEN_FILE: &str = "token/token";
const CA_FILE: &str = "certs/ca.crt";
const UNIT: &str = service::unit_name(Role::Edge);

// The requests to the servers of a cloud, one server after the other until one responds.

/// The request to join, and how to reach the servers.
struct JoinClient<'a> {
    args: &'a JoinArgs,
    code: &'a InvitationCode,
    joining: JoinParams,
    /// The name in the servers' certificate.
    name: ServerName<'static>,
    folder: OutputDir,
    /// The path of the CA's file within the folder.
    ca_file: &'static str,
    proxy: Option<HttpProxyClient>,
    resolver: Resolver,
}

/// The error if no server granted the request.
struct JoinError {
    failure: CommandError,
    /// Whether it is certain that no server granted it.
    is_final: bool,
}

/// The error of an attempt at one server.
enum JoinAttemptError {
    /// The server refused.
    Refused(String),
    /// The server belongs to another cloud, or its certificate has another name. Nothing was revealed to it.
    Foreign(String),
    /// The server did not respond; `sent` is true if the invitation was sent.
    Unanswered { text: String, sent: bool },
    /// A local error.
    Here(CommandError),
}

impl<'a> JoinClient<'a> {
    /// `name` is the node's name, or `USER/DEVICE`.
    fn new(
        args: &'a JoinArgs,
        code: &'a InvitationCode,
        name: String,
        token: &str,
        folder: OutputDir,
        ca_file: &'static str,
        env: &Environment,
    ) -> Result<Self, CommandError> {
        let joining = JoinParams { secret: code.secret(), name, token: token.to_owned() };
        let name = args.tls_server_name.as_ref().unwrap_or(&args.server.host).to_string();
        let proxy = env.https_proxy.as_ref().map(|url| {
            HttpProxyClient::new(url.reveal(), env.no_proxy.as_deref().unwrap_or_default())
                .map_err(|cause| CommandError::unusable(format!("HTTPS_PROXY: {cause}")))
        });
        Ok(Self {
            args,
            code,
            joining,
            name: server_name(&name).map_err(|cause| CommandError::usage(cause.to_string()))?,
            folder,
            ca_file,
            proxy: proxy.transpose()?.flatten(),
            resolver: Resolver::system().map_err(|cause| CommandError::unavailable(cause.to_string()))?,
        })
    }

    /// Joins, checks the files in the folder that `check` is given, and moves them to their final place. An attempt that
    /// may have been granted keeps them: the next one uses the same token.
    async fn join(self, check: impl FnOnce(&Path) -> Result<(), CommandError>) -> Result<(), CommandError> {
        let asked = self.ask().await;
        let Self { folder, ca_file, .. } = self;
        let written = asked.and_then(|authority| {
            let written = folder.rewrite(ca_file, &authority).and_then(|()| check(&folder.unfinished()));
            written.map_err(|failure| JoinError { failure, is_final: false })
        });
        match written {
            Ok(()) => folder.finish(),
            Err(JoinError { failure, is_final }) => {
                if !is_final {
                    folder.keep();
                }
                Err(failure)
            }
        }
    }

    /// Returns the CAs (PEM) to trust the servers with. Tries each address several times.
    async fn ask(&self) -> Result<String, JoinError> {
        let (mut foreign, mut last, mut was_sent) = (None, String::new(), false);
        let mut pause = INITIAL_PAUSE;
        for round in 0..MAX_ATTEMPTS {
            if round > 0 {
                sleep(pause).await;
                pause *= 2;
            }
            let mut may_mend = false;
            let found = self.addresses().await;
            let mut left = found.map_err(|failure| JoinError { failure, is_final: !was_sent })?;
            while !left.is_empty() {
                match self.ask_first(&mut left).await {
                    Ok(authority) => return Ok(authority),
                    Err(JoinAttemptError::Refused(text)) => {
                        return Err(JoinError { failure: CommandError::refused(text), is_final: true });
                    }
                    Err(JoinAttemptError::Here(failure)) => {
                        return Err(JoinError { failure, is_final: !was_sent });
                    }
                    Err(JoinAttemptError::Foreign(text)) => foreign = Some(text),
                    Err(JoinAttemptError::Unanswered { text, sent }) => {
                        (was_sent, may_mend) = (was_sent | sent, true);
                        last = text;
                    }
                }
            }
            if !may_mend {
                // All servers belong to other clouds, or have other names; retrying does not change that.
                break;
            }
        }
        let hint =
            if was_sent { "; it may have been granted; run the same command again to continue" } else { "" };
        // An answer is more telling than none.
        let why = foreign.filter(|_| !was_sent).unwrap_or(last);
        let text = format!("{}: {why}{hint}", self.args.server);
        Err(JoinError { failure: CommandError::unavailable(text), is_final: !was_sent })
    }

    /// Requests to join at the first server that answers, and removes that from the list; all of them if none does.
    ///
    /// First fetches its CA and compares it with the hash in the invitation. Sends the invitation only after the server
    /// has proved its identity with that CA.
    async fn ask_first(&self, left: &mut Vec<SocketAddr>) -> Result<String, JoinAttemptError> {
        let authority = self.args.server.to_string();
        let addresses = std::mem::take(left);
        let socket = self.connect(&addresses).await?;
        let at = socket.peer_addr().map_err(|cause| unanswered(cause.to_string()))?;
        left.extend(addresses.into_iter().filter(|other| *other != at));
        let anyone = self.encrypted(socket, at, Trust::NoVerify).await?;
        let shown = call_enrol(anyone, &authority, EnrolMethod::Ca).await.map_err(|why| miss(why, false))?;
        // If there are several CAs, only this one is trusted.
        let pin = self.code.pin();
        let fits = |block: &&str| {
            let mut block = block.as_bytes();
            rustls_pemfile::certs(&mut block).any(|der| der.is_ok_and(|der| ServerCa::pin_of(&der) == pin))
        };
        let pinned = shown.split_inclusive(CERTIFICATE_END).find(fits);
        let pinned =
            pinned.ok_or_else(|| JoinAttemptError::Foreign(format!("{} {WRONG_CLOUD}", self.named(at))))?;
        self.folder.rewrite(self.ca_file, pinned).map_err(JoinAttemptError::Here)?;
        let trust = Trust::Ca(self.folder.unfinished().join(self.ca_file));
        let proved = self.encrypted(self.connect(&[at]).await?, at, trust).await?;
        let wish = EnrolMethod::Join(self.joining.clone());
        call_enrol(proved, &authority, wish).await.map_err(|why| miss(why, true))
    }

    /// Connects to the first of these addresses of the servers, or of the proxy for them, that answers.
    async fn connect(&self, addresses: &[SocketAddr]) -> Result<TcpStream, JoinAttemptError> {
        let server = &self.args.server;
        match self.proxy.as_ref().filter(|proxy| proxy.applies_to(server)) {
            Some(proxy) => {
                proxy.connect(addresses, server, TIMEOUT).await.map_err(|e| unanswered(e.to_string()))
            }
            None => dial(&server.host, addresses, TIMEOUT).await.map_err(|e| unanswered(e.after(server))),
        }
    }

    async fn encrypted(
        &self,
        socket: TcpStream,
        at: SocketAddr,
        trust: Trust,
    ) -> Result<TlsStream<TcpStream>, JoinAttemptError> {
        let tls = TlsClientConfig { trust, identity: None, alpn: vec![b"h2".to_vec()] }.load();
        let tls = tls.map_err(|cause| unanswered(cause.to_string()))?;
        let accepted =
            timeout(TIMEOUT, TlsConnector::from(tls.load()).connect(self.name.clone(), socket)).await;
        let at = self.named(at);
        let accepted =
            accepted.map_err(|_| unanswered(format!("{at} did not complete the TLS handshake")))?;
        accepted.map_err(|cause| {
            let (error, name) = (HandshakeError::of(&cause), self.name.to_str());
            let text = format!("TLS handshake as {name:?} with {at} failed: {error}{}", hint(&error));
            let is_named = matches!(error, HandshakeError::Name(_));
            if is_named { JoinAttemptError::Foreign(text) } else { unanswered(text) }
        })
    }

    /// Returns an address for an error, which begins with the server that the user named.
    fn named(&self, at: SocketAddr) -> String {
        if Target::from(at) == self.args.server { "it".to_owned() } else { at.to_string() }
    }

    /// Returns the addresses of the servers, or of the proxy for them.
    async fn addresses(&self) -> Result<Vec<SocketAddr>, CommandError> {
        let proxy = self.proxy.as_ref().filter(|proxy| proxy.applies_to(&self.args.server));
        let Target { host, port } = proxy.map_or(&self.args.server, HttpProxyClient::at);
        let found = match host {
            Host::Ip(ip) => vec![*ip],
            Host::Name(name) => self
                .resolver
                .lookup(name)
                .await
                .map_err(|cause| CommandError::unavailable(cause.to_string()))?,
        };
        let mut addresses: Vec<_> = found.into_iter().map(|ip| SocketAddr::new(ip, *port)).collect();
        addresses.shuffle(&mut rand::rng());
        Ok(addresses)
    }
}

fn unanswered(text: String) -> JoinAttemptError {
    JoinAttemptError::Unanswered { text, sent: false }
}

/// Returns the hint for a failed handshake. May be empty.
fn hint(error: &HandshakeError) -> &'static str {
    match error {
        HandshakeError::Name(_) => "; set --tls-server-name to a name in the certificate",
        HandshakeError::NotTls | HandshakeError::Protocol => {
            "; name the server's port for links, listen of its [server.links] (default 9000)"
        }
        _ => "",
    }
}

fn miss(why: EnrolCallError, sent: bool) -> JoinAttemptError {
    match why {
        EnrolCallError::Refused(text) => JoinAttemptError::Refused(text),
        EnrolCallError::Unserved => JoinAttemptError::Refused(why.to_string()),
        EnrolCallError::Unanswered(text) => JoinAttemptError::Unanswered { text, sent },
    }
}

/// The error for a server with another CA.
const WRONG_CLOUD: &str = "does not belong to the cloud of this invitation, or its CA has changed; nothing \
                             was revealed to it; check the address, or request a new invitation";

/// The last line of each certificate.
const CERTIFICATE_END: &str = "-----END CERTIFICATE-----";

/// Number of attempts per address, and the first pause between them, which doubles.
const MAX_ATTEMPTS: u32 = 5;
const INITIAL_PAUSE: Duration = Duration::from_millis(500);

/// Timeout for each step.
const TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_lifetime_needs_a_unit_and_has_limits() {
        assert_eq!(lasting("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(lasting("365d"), Ok(Duration::from_secs(MAX_KEY_SECONDS)));
        for bad in ["", "1", "h", "59s", "366d", "-1h", "1hh", "1w", "99999999999999999999h"] {
            assert!(lasting(bad).unwrap_err().contains("from 1m to 365d"), "{bad}");
        }
        assert_eq!(
            [30 * 86400, 3600, 5400, 90].map(|s| format_duration(Duration::from_secs(s))),
            ["30 d", "1 h", "90 min", "90 s"]
        );
    }
}
