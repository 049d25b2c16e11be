//! What became of each flag of YurtTunnel's programs.

use std::net::IpAddr;

use super::{Remark, Verdict};
use crate::names::Target;
use Verdict::{Changed, Gone, Kept};

/// What the server's flags say that has a place in our settings.
#[derive(Debug)]
pub(super) struct Server {
    /// Where edges and TLS come in.
    pub(super) bind: IpAddr,
    /// Where HTTP comes in.
    pub(super) insecure_bind: IpAddr,
    /// The port for agents.
    pub(super) agents: u16,
    /// The port with TLS.
    pub(super) secure: u16,
    /// The port without.
    pub(super) insecure: u16,
    /// The port of metrics.
    pub(super) meta: u16,
    /// Whether names of nodes are kept.
    pub(super) names: bool,
}

/// What the server does without any flag.
impl Default for Server {
    fn default() -> Self {
        Self {
            bind: [0, 0, 0, 0].into(),
            insecure_bind: [127, 0, 0, 1].into(),
            agents: 10262,
            secure: 10263,
            insecure: 10264,
            meta: 10265,
            names: true,
        }
    }
}

/// Reads the server's flags.
pub(super) fn server(flags: &[(String, String)]) -> (Server, Vec<Remark>) {
    let mut server = Server::default();
    let remarks = flags.iter().map(|(name, value)| {
        let (verdict, why) = match name.as_str() {
            "bind-address" => set(&mut server.bind, value, "listen of [mode.cloud.stream.server], listen_ip of [mode.cloud.https]"),
            "insecure-bind-address" => set(&mut server.insecure_bind, value, "listen_ip of [mode.cloud.http]"),
            "tunnel-agent-connect-port" => set(&mut server.agents, value, "the port in listen of [mode.cloud.stream.server]"),
            "secure-port" => set(&mut server.secure, value, "the port in addr of [mode.cloud.https]"),
            "insecure-port" => set(&mut server.insecure, value, "the port in addr of [mode.cloud.http]"),
            "meta-port" => set(&mut server.meta, value, "the port in metrics_listen of [mode.cloud.stream.server]; profiles (pprof) there are none"),
            "enable-dns-controller" => {
                server.names = value != "false";
                (Kept, if server.names { "[mode.cloud.node_names]" } else { "without [mode.cloud.node_names]" })
            }
            "kubeconfig" => (Changed, "the flag --k of this program"),
            "v" => (Changed, "the flag --v of this program has other steps: 2 is debug"),
            "cert-dns-names" | "cert-ips" => (Changed, "the certificate in cert has to carry it: tunnel init --name makes one, or [mode.cloud.csr] has it issued"),
            "cert-dir" => (Changed, "each file is named by its own key: cert, key, client_ca"),
            "enable-iptables" if value == "false" => (Kept, "nothing is intercepted unless the settings say so"),
            "enable-iptables" => (Changed, "[mode.cloud.intercept] does that by nftables: give it the networks of the edge nodes; iptables is not touched"),
            "iptables-sync-period" | "dns-sync-period" => (Gone, "changes are taken up when they happen, and all is looked at anew every 30 min"),
            "egress-selector-enable" => (Gone, "it did nothing there; here [mode.cloud.egress] serves kube-apiserver's egress selector"),
            "server-count" => (Gone, "pods find each other by service of [mode.cloud.registry], and an edge needs a link to one of them"),
            "proxy-strategy" => (Gone, "a request goes to the node that it names, always"),
            "logtostderr" | "alsologtostderr" | "log-dir" => (Kept, "a flag of this program by the same name"),
            "version" | "help" => (Gone, "it sets nothing"),
            _ => (Gone, UNKNOWN),
        };
        remark(verdict, name, value, why)
    });
    let remarks = remarks.collect();
    (server, remarks)
}

/// Reads the agent's flags: where its edge finds the cloud, if one says so.
pub(super) fn agent(flags: &[(String, String)]) -> (Option<Target>, Vec<Remark>) {
    let mut cloud = None;
    let remarks = flags.iter().map(|(name, value)| {
        let (verdict, why) = match name.as_str() {
            "tunnelserver-addr" => match value.parse() {
                Ok(at) => {
                    cloud = Some(at);
                    (Kept, "server_name of [mode.edge.stream.client]")
                }
                Err(_) => (Changed, "it is no host:port: put it into server_name of [mode.edge.stream.client]"),
            },
            "node-name" => (Changed, "NODE_NAME of the environment, or node of [mode.edge.stream.client]: it is another one for each node"),
            "node-ip" => (Changed, "NODE_IP of the environment"),
            "agent-identifiers" => (Gone, "an edge is known by its node's name, and its addresses by what Kubernetes says"),
            "apiserver-addr" | "kube-config" | "kubeconfig" => (Gone, "an edge asks nothing of Kubernetes"),
            "cert-dir" => (Changed, "the authority is in cert, the token in token_file of [mode.edge.stream.client]"),
            "meta-host" | "meta-port" => (Changed, "metrics_listen of [mode.edge.stream.client], which is off unless it is set"),
            "v" => (Changed, "the flag --v of this program has other steps: 2 is debug"),
            "logtostderr" | "alsologtostderr" | "log-dir" => (Kept, "a flag of this program by the same name"),
            "version" | "help" => (Gone, "it sets nothing"),
            _ => (Gone, UNKNOWN),
        };
        remark(verdict, name, value, why)
    });
    let remarks = remarks.collect();
    (cloud, remarks)
}

fn remark(verdict: Verdict, name: &str, value: &str, why: &str) -> Remark {
    Remark { verdict, what: format!("--{name}={value}"), why: why.to_owned() }
}

/// Takes a value over; one that is none stays as it was.
fn set<T: std::str::FromStr>(to: &mut T, value: &str, why: &'static str) -> (Verdict, &'static str) {
    match value.parse() {
        Ok(value) => {
            *to = value;
            (Kept, why)
        }
        Err(_) => (Gone, "it cannot be read: its default stands here"),
    }
}

const UNKNOWN: &str = "no flag of YurtTunnel 1.3 that is known here";
