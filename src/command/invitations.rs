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
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::admin::InvitationResponse;
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
    #[arg(long, value_name = "NAME", required_unless_present = "user", conflicts_with = "user")]
    pub node: Option<NodeName>,
    /// User to whom the machine belongs, which is no node then.
    #[arg(long, value_name = "NAME")]
    pub user: Option<UserName>,
    /// Nodes that the user should reach, separated by commas; '*' matches any run of characters. Only printed, as a rule
    /// for the servers' config.
    #[arg(long, value_name = "NODES", value_delimiter = ',', value_parser = glob, requires = "user")]
    pub nodes: Vec<String>,
    /// Ports of these nodes, separated by commas.
    #[arg(long, value_name = "PORTS", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..))]
    #[arg(requires = "user")]
    pub ports: Vec<u16>,
    /// Lifetime of the invitation: a whole number with s, m or h, from 1m to 168h.
    #[arg(long = "expires", alias = "ttl", value_name = "TIME", default_value = "1h", value_parser = lasting)]
    pub lasting: Duration,
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
    /// List the nodes and users' devices that have joined, and who has an open invitation.
    #[command(after_help = examples([
        "tunnel invitations list",
        "tunnel invitations list -o json",
    ]))]
    List {
        /// Output format.
        #[arg(short, long, value_name = "FORMAT", default_value = "text")]
        output: Format,
    },
    /// Revoke the token and the open invitation of a node, or those of a user. The links close within 10 s, at all
    /// servers.
    #[command(after_help = examples([
        "tunnel invitations revoke node7",
        "tunnel invitations revoke --user alice --device laptop",
    ]))]
    Revoke {
        /// Node that has joined, or was invited.
        #[arg(value_name = "NODE", required_unless_present = "user", conflicts_with = "user")]
        node: Option<NodeName>,
        /// User, with all devices and open invitations.
        #[arg(long, value_name = "NAME")]
        user: Option<UserName>,
        /// Only this device of the user.
        #[arg(long, value_name = "NAME", requires = "user")]
        device: Option<DeviceName>,
    },
}

/// Requests an invitation from a server. Returns the command for the machine that should join.
///
/// # Errors
///
/// Returns an error if no server responds here, or it refuses.
pub async fn invite(args: InviteArgs, env: &Environment) -> Result<String, CommandError> {
    query(args.socket.clone(), &["server"], env, async |api| invite_by(api, &args).await).await
}

async fn invite_by(api: &AdminApi, args: &InviteArgs) -> Result<String, CommandError> {
    let invitee = subject(args.node.as_ref(), args.user.as_ref(), None)?;
    let body = json!({ "subject": invitee.to_string(), "seconds": args.lasting.as_secs() });
    let answer = api.post("/invitations", body.to_string()).await?;
    let InvitationResponse { code, cloud, .. } = api.parse(&answer)?;
    // They become a part of a command for root, so nothing else passes.
    let code = code.parse::<InvitationCode>().map_err(|cause| api.incompatible(&cause))?;
    cloud.parse::<Target>().map_err(|cause| api.incompatible(&cause))?;
    if *code.invitee() != invitee {
        return Err(api.incompatible(&"its invitation is for another node or user"));
    }
    let (choice, cloud, lasting) = (api.choice(), shell_word(&cloud), format_duration(args.lasting));
    Ok(match &invitee {
        Subject::User(user) | Subject::Device(ClientName { user, .. }) => format!(
            "{choice}on a machine of {user}, within {lasting}, as that person:\n  \
             echo {code} | tunnel join --user {cloud} --invitation -\n\
             It works once, for one device. Anyone who has it can be {user}, so send it over a private channel.\n\
             {user} reaches only what a rule permits, in the config of each server:\n  \
             [server.clients]\n  rules = [{rule}]\n",
            rule = rule(user, args),
        ),
        Subject::Node(node) => format!(
            "{choice}on {node}, within {lasting}, as root:\n  echo {code} | tunnel join {cloud} --invitation -\n\
             It works once. If {node} has joined before, its earlier token then ends. Anyone who has it can become {node}, \
             so send it over a private channel.\n{note}",
            note = tls_note(node),
        ),
    })
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
/// Returns an error if no server responds here, or there is nothing to revoke.
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
        InvitationsCommand::Revoke { node, user, device } => {
            let subject = subject(node.as_ref(), user.as_ref(), device.as_ref())?;
            let body = json!({ "subject": subject.to_string() });
            api.post("/revocations", body.to_string()).await?;
            let choice = api.choice();
            Ok(match &subject {
                Subject::Node(node) => format!(
                    "{choice}revoked; the links of {node} close within 10 s\nto add {node} again, here:\n  \
                     tunnel invite --node {node}\nand there, as root, before the command that invite prints:\n  \
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

/// Returns a table of nodes, and one of users if there are any.
fn tables(all: &[Enrolled]) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut nodes = Table::new(&["NODE", "JOINED", "OPEN INVITATION"]);
    let mut users = Table::new(&["USER", "DEVICE", "OPEN INVITATION"]);
    let mut has_users = false;
    for Enrolled { node, user, device, joined, invited_until } in all {
        let left = |until: &u64| format!("{} left", duration(until.saturating_sub(now) as f64));
        let invited = invited_until.as_ref().map_or("-".to_owned(), left);
        let name = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), logging::printable);
        if user.is_some() {
            has_users = true;
            users.row(vec![name(user), name(device), invited]);
        } else {
            nodes.row(vec![name(node), if *joined { "yes" } else { "no" }.to_owned(), invited]);
        }
    }
    if has_users { format!("{nodes}\n\n{users}\n") } else { format!("{nodes}\n") }
}

/// Formats a duration in words.
fn format_duration(lasting: Duration) -> String {
    let seconds = lasting.as_secs();
    match seconds {
        s if s % 3600 == 0 => format!("{} h", s / 3600),
        s if s % 60 == 0 => format!("{} min", s / 60),
        s => format!("{s} s"),
    }
}

fn glob(text: &str) -> Result<String, String> {
    text.parse::<Glob>().map(|_| text.to_owned()).map_err(|why| why.to_string())
}

fn lasting(text: &str) -> Result<Duration, String> {
    let expected = "expected a whole number with s, m or h, from 1m to 168h";
    let unit = text.chars().last().and_then(|unit| UNITS.iter().find(|(name, _)| *name == unit));
    let (unit, seconds) = unit.ok_or(expected)?;
    let number: u64 = text.strip_suffix(*unit).unwrap_or_default().parse().map_err(|_| expected)?;
    let lasting = Duration::from_secs(number.saturating_mul(*seconds));
    if (MIN_LIFETIME..=MAX_LIFETIME).contains(&lasting) { Ok(lasting) } else { Err(expected.to_owned()) }
}

const UNITS: [(char, u64); 3] = [('s', 1), ('m', 60), ('h', 3600)];
/// Enough time to carry a line to another machine.
const MIN_LIFETIME: Duration = Duration::from_secs(60);
/// One week.
const MAX_LIFETIME: Duration = Duration::from_secs(168 * 3600);

// Joining: makes this machine a node of a cloud that has invited it, or a device of a user.

/// Arguments of `tunnel join`.
#[derive(Debug, Clone, clap::Args)]
pub struct JoinArgs {
    /// Address of the servers, as edges dial it.
    #[arg(value_name = "SERVER:PORT")]
    pub server: Target,
    /// File with the invitation that `tunnel invite` printed, or - for stdin. It names the node that this machine
    /// becomes, or its user.
    #[arg(long, value_name = "FILE")]
    pub invitation: InvitationSource,
    /// The machine becomes a device of the invited user, and is no node. Writes ~/.config/tunnel/client.toml.
    #[arg(long)]
    pub user: bool,
    /// Name of the user's device. Default: the host's name.
    #[arg(long, value_name = "NAME", requires = "user")]
    pub device: Option<DeviceName>,
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
        (Subject::Node(node), false) => join_node(args, &code, node, &Environment::read(variable)).await,
        (Subject::User(user), true) => user::join(args, &code, user, variable).await,
        (Subject::Node(node), true) => Err(CommandError::usage(format!(
            "--user: the invitation is for node {node}; leave --user out, or ask for `tunnel invite --user`"
        ))),
        (Subject::User(user) | Subject::Device(ClientName { user, .. }), _) => {
            Err(CommandError::usage(format!(
                "--invitation: it is for user {user}, whose device is no node; set --user, or ask for `tunnel invite --node`"
            )))
        }
    }
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
        assert_eq!(lasting("168h"), Ok(MAX_LIFETIME));
        for bad in ["", "1", "h", "59s", "169h", "-1h", "1hh", "1d", "99999999999999999999h"] {
            assert!(lasting(bad).unwrap_err().contains("from 1m to 168h"), "{bad}");
        }
        assert_eq!(
            [3600, 5400, 90].map(|s| format_duration(Duration::from_secs(s))),
            ["1 h", "90 min", "90 s"]
        );
    }
}
