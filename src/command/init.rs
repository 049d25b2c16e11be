//! `tunnel init`: makes the first certificates, tokens and config files of a cloud, closed by default.

pub(crate) mod config_files;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::value_parser;

use crate::command::init::config_files::{egress_selector, server_config, summary};
use crate::command::machine_files::{checked, edge_config, folder_on_machine, host_of_server, random_token};
use crate::command::output_dir::OutputDir;
use crate::command::{CommandError, CommandResult, Role};
use tunnel_net::pki::{CertificateAuthority, IssuedCert, PkiError};
use tunnel_net::tls::certificate::KUBELET_CLIENT_PREFIX;
use tunnel_proto::names::{Host, NodeName, Target};

/// Arguments of `tunnel init`.
#[derive(Debug, Clone, clap::Args)]
pub struct InitArgs {
    /// Output folder; its existing contents are kept.
    #[arg(value_name = "DIR", default_value = "tunnel-files")]
    pub dir: PathBuf,
    /// Name or address at which edges reach the servers; may be repeated. Edges dial the first.
    #[arg(long = "name", value_name = "HOST", required = true, value_parser = host_of_server)]
    pub names: Vec<Host>,
    /// Node that gets its own token and config; may be repeated. Nodes that join by invitation need none.
    #[arg(long = "node", value_name = "NODE")]
    pub nodes: Vec<NodeName>,
    /// Client of the egress port, by the name in its certificate; may be repeated. kube-apiserver is
    /// system:kube-apiserver.
    #[arg(long = "egress-client", value_name = "NAME")]
    pub clients: Vec<String>,
    /// Certificate (PEM) of the CA that signs, instead of a new one.
    #[arg(long, value_name = "FILE", requires = "ca_key")]
    pub ca_cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "ca_cert")]
    pub ca_key: Option<PathBuf>,
    /// Certificate (PEM) of the CA of kubelets' clients (--client-ca-file). Each node gets a certificate named
    /// tunnel:NODE for its own kubelet.
    #[arg(long, value_name = "FILE", requires = "kubelet_ca_key")]
    pub kubelet_ca_cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "kubelet_ca_cert")]
    pub kubelet_ca_key: Option<PathBuf>,
    /// Validity of certificates in days; a new CA is valid for ten times as long.
    #[arg(long, default_value_t = 365, value_parser = value_parser!(u32).range(1..=3650))]
    pub days: u32,
    /// Folder of the files on the machines that they are for.
    #[arg(long, value_name = "DIR", default_value = "/etc/tunnel")]
    pub install_dir: PathBuf,
}

/// Makes all files, or none. Returns what was made and what to do next, as lines for the terminal. Blocks on the disk.
///
/// # Errors
///
/// Returns an error if an argument is wrong, or a file cannot be written.
pub fn run(args: &InitArgs) -> CommandResult {
    let to = folder_on_machine("--install-dir", &args.install_dir)?;
    let clients = client_folders("--egress-client", &args.clients)?;
    if let Some(twice) = args.nodes.iter().enumerate().find(|(at, node)| args.nodes[..*at].contains(node)) {
        return Err(CommandError::usage(format!("--node {} is given twice", twice.1)));
    }
    check_nodes(&args.nodes)?;
    let signers = InitAuthorities::of(args)?;
    let folder = OutputDir::start(&args.dir, entries(args, &signers, &clients))?;
    let unfinished = absolute(&folder.unfinished())?;
    write_cloud(args, &signers, &folder, &unfinished, to)?;
    for (node, token) in args.nodes.iter().zip(&signers.tokens) {
        write_edge(args, node, token, &signers, &folder, &unfinished, to)?;
    }
    for (client, dir) in args.clients.iter().zip(&clients) {
        write_client(client, &format!("{dir}/"), args.names.first(), &signers.ours, &folder)?;
    }
    folder.finish()?;
    Ok(summary(args, &clients, signers.is_new, to))
}

/// Checks the names of nodes before anything is written.
fn check_nodes(nodes: &[NodeName]) -> CommandResult<()> {
    match nodes.iter().find(|node| edge_folder(node).len() > MAX_FOLDER) {
        Some(node) => Err(CommandError::usage(format!(
            "--node {node}: too long for the name of its folder; let the node join by invitation: tunnel invite"
        ))),
        None => Ok(()),
    }
}

/// The CAs with which `tunnel init` signs certificates, and the tokens of the nodes.
struct InitAuthorities {
    /// The CA of the tunnel, new or from `--ca-cert`; signs the certificates of servers and of clients.
    ours: CertificateAuthority,
    /// Whether the CA was made now.
    is_new: bool,
    /// The CA of kubelets' clients, from `--kubelet-ca-cert`.
    kubelets: Option<CertificateAuthority>,
    /// Token of each node, in the order of `--node`.
    tokens: Vec<String>,
}

impl InitAuthorities {
    fn of(args: &InitArgs) -> CommandResult<Self> {
        let valid = DAY * args.days;
        let given = args.ca_cert.as_deref().zip(args.ca_key.as_deref());
        let ours = match given {
            Some((cert, key)) => read_authority("--ca-cert", cert, key)?,
            None => CertificateAuthority::new("tunnel CA", valid * 10)
                .map_err(|cause| CommandError::unusable(cause.to_string()))?,
        };
        let kubelets = args.kubelet_ca_cert.as_deref().zip(args.kubelet_ca_key.as_deref());
        let kubelets =
            kubelets.map(|(cert, key)| read_authority("--kubelet-ca-cert", cert, key)).transpose()?;
        Ok(Self {
            ours: ours.signing_for(valid),
            is_new: given.is_none(),
            kubelets: kubelets.map(|authority| authority.signing_for(valid)),
            tokens: args.nodes.iter().map(|_| random_token()).collect(),
        })
    }
}

/// Reads a CA; `option` names its certificate in errors.
pub(crate) fn read_authority(option: &str, cert: &Path, key: &Path) -> CommandResult<CertificateAuthority> {
    CertificateAuthority::read(cert, key)
        .map_err(|cause| CommandError::unusable(format!("{option}: {cause}")))
}

/// Returns the folder of each client: its name, without characters that are special in a path or a shell.
pub(crate) fn client_folders(option: &str, clients: &[String]) -> CommandResult<Vec<String>> {
    let mut seen = BTreeSet::new();
    let folder = |name: &String| {
        let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, ':' | '.' | '-' | '_' | '@');
        let dir = format!("client-{}", name.replace(':', "-"));
        if name.is_empty() || name.len() > 64 || !name.chars().all(sound) {
            return Err(CommandError::usage(format!(
                "{option} {name:?}: expected 1 to 64 of A-Z a-z 0-9 : . - _ @"
            )));
        }
        if name.to_ascii_lowercase().starts_with(KUBELET_CLIENT_PREFIX) {
            return Err(CommandError::usage(format!(
                "{option} {name}: names that begin with {KUBELET_CLIENT_PREFIX} are reserved for edges; choose another"
            )));
        }
        if !seen.insert(dir.clone()) {
            return Err(CommandError::usage(format!(
                "{option} {name}: another client has the same folder {dir}"
            )));
        }
        Ok(dir)
    };
    clients.iter().map(folder).collect()
}

/// Returns the names of the future contents of the folder.
fn entries(args: &InitArgs, signers: &InitAuthorities, clients: &[String]) -> BTreeSet<String> {
    let authority = if signers.is_new { &["ca.crt", "ca.key"][..] } else { &[] };
    let fixed = authority.iter().copied().chain(["server"]).map(str::to_owned);
    fixed.chain(args.nodes.iter().map(edge_folder)).chain(clients.iter().cloned()).collect()
}

fn edge_folder(node: &NodeName) -> String {
    format!("edge-{node}")
}

fn write_cloud(
    args: &InitArgs,
    signers: &InitAuthorities,
    folder: &OutputDir,
    now_at: &Path,
    to: &str,
) -> CommandResult<()> {
    if signers.is_new {
        folder.write("ca.crt", signers.ours.cert())?;
        folder.write("ca.key", &signers.ours.key())?;
    }
    let mut names: Vec<String> = args.names.iter().map(ToString::to_string).collect();
    if args.names.iter().all(|name| matches!(name, Host::Ip(_))) {
        // Servers identify each other by a DNS name.
        names.push(POD_NAME.to_owned());
    }
    let server = signers.ours.server(&names).map_err(|cause| refused(&cause))?;
    write_issued(folder, "server/certs/server", &server)?;
    folder.write("server/certs/ca.crt", signers.ours.cert())?;
    let lines = args.nodes.iter().zip(&signers.tokens);
    let lines: String = lines.map(|(node, token)| format!("{node}:{token}\n")).collect();
    folder.write("server/token/token", &format!("{TOKEN_FILE_HEADER}{lines}"))?;
    let here = now_at.join("server");
    checked(Role::Server, &server_config(&args.clients, &here.to_string_lossy()))?;
    folder.write("server/server.toml", &server_config(&args.clients, to))
}

fn write_edge(
    args: &InitArgs,
    node: &NodeName,
    token: &str,
    signers: &InitAuthorities,
    folder: &OutputDir,
    now_at: &Path,
    to: &str,
) -> CommandResult<()> {
    let dir = edge_folder(node);
    folder.write(&format!("{dir}/certs/ca.crt"), signers.ours.cert())?;
    folder.write(&format!("{dir}/token/token"), &format!("{token}\n"))?;
    if let Some(kubelets) = &signers.kubelets {
        let issued =
            kubelets.client(&format!("{KUBELET_CLIENT_PREFIX}{node}")).map_err(|cause| refused(&cause))?;
        write_issued(folder, &format!("{dir}/certs/apiserver-kubelet-client"), &issued)?;
    }
    let servers = [Target { host: args.names[0].clone(), port: GRPC_PORT }];
    let text = |dir: &str| edge_config(node, &servers, None, signers.kubelets.is_some(), dir);
    let here = now_at.join(&dir);
    // Checked with the paths of the unfinished files, so that no edge gets a config with which it does not start.
    checked(Role::Edge, &text(&here.to_string_lossy()))?;
    folder.write(&format!("{dir}/edge.toml"), &text(to))
}

/// Writes the files of a client, each after `prefix`; for kube-apiserver also its selector with that server.
pub(crate) fn write_client(
    client: &str,
    prefix: &str,
    server: Option<&Host>,
    authority: &CertificateAuthority,
    folder: &OutputDir,
) -> CommandResult<()> {
    let issued = authority.client(client).map_err(|cause| refused(&cause))?;
    write_issued(folder, &format!("{prefix}client"), &issued)?;
    folder.write(&format!("{prefix}ca.crt"), authority.cert())?;
    match server {
        Some(server) if client == APISERVER => {
            folder.write(&format!("{prefix}egress-selector.yaml"), &egress_selector(server))
        }
        _ => Ok(()),
    }
}

pub(crate) fn write_issued(folder: &OutputDir, path: &str, issued: &IssuedCert) -> CommandResult<()> {
    folder.write(&format!("{path}.crt"), issued.cert())?;
    folder.write(&format!("{path}.key"), issued.key())
}

pub(crate) fn refused(cause: &PkiError) -> CommandError {
    CommandError::usage(cause.to_string())
}

fn absolute(path: &Path) -> CommandResult<PathBuf> {
    std::path::absolute(path)
        .map_err(|cause| CommandError::cannot_write(format!("cannot find {}: {cause}", path.display())))
}

pub(crate) const DAY: Duration = Duration::from_secs(24 * 3600);
/// The same port as in the docs.
const GRPC_PORT: u16 = 9000;
/// The port of the egress listener, as in the docs.
const EGRESS_PORT: u16 = 8000;
/// Maximum length in bytes of a file's name on Linux.
const MAX_FOLDER: usize = 255;
/// The name in kube-apiserver's certificate.
pub(crate) const APISERVER: &str = "system:kube-apiserver";
/// The comment at the start of the servers' token file.
const TOKEN_FILE_HEADER: &str =
    "# NODE:TOKEN, one node a line. Nodes that joined by invitation are not in this file.\n";
/// The name by which servers identify each other if edges use addresses.
const POD_NAME: &str = "tunnel-cloud";

#[cfg(test)]
mod tests;
