//! What became of each flag of YurtTunnel's programs.

use std::net::IpAddr;

use super::{Remark, Verdict};
use crate::names::Target;
use Verdict::{Changed, Gone, Kept, Unknown};

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
            "meta-port" => match set(&mut server.meta, value, METRICS) {
                (Kept, why) => (Changed, why),
                unread => unread,
            },
            "enable-dns-controller" => {
                server.names = value != "false";
                (Kept, if server.names { "[mode.cloud.node_names]" } else { "without [mode.cloud.node_names]" })
            }
            "kube-config" => (Changed, "the flag --k of this program"),
            "cert-dns-names" | "cert-ips" => (Changed, "the certificate in cert has to carry it: tunnel init --name makes one, or [mode.cloud.csr] has it issued with names, which the approver takes by --name"),
            "cert-dir" => (Changed, "each file is named by its own key: cert, key, client_ca"),
            IPTABLES if value == "false" => (Kept, "nothing is intercepted unless the settings say so"),
            IPTABLES => (Changed, INTERCEPT),
            "iptables-sync-period" | "dns-sync-period" => (Gone, "changes are taken up when they happen, and all is looked at anew every 30 min"),
            "egress-selector-enable" => (Gone, "it did nothing there; here [mode.cloud.egress] serves kube-apiserver's egress selector"),
            "server-count" => (Gone, "pods find each other by service of [mode.cloud.registry], and an edge needs a link to one of them"),
            "proxy-strategy" => (Gone, "a request goes to the node that it names, always"),
            name => of_any_program(name),
        };
        remark(verdict, name, value, why)
    });
    let mut remarks: Vec<_> = remarks.collect();
    // It did so without being told.
    if !flags.iter().any(|(name, _)| name == IPTABLES) {
        remarks.push(remark(Changed, IPTABLES, "true, its default", INTERCEPT));
    }
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
            "node-ip" => (Changed, "NODE_IP of the environment, or node_ips of [mode.edge.stream.client]"),
            "agent-identifiers" => (Gone, "an edge is known by its node's name, and by the addresses of --node-ip and of its Node"),
            "apiserver-addr" => (Gone, "an edge asks Kubernetes for nothing but a certificate, and that by a kubeconfig"),
            "kube-config" => (Changed, "the flag --k of this program, where [mode.edge.csr] has a certificate issued; all else does without"),
            "cert-dir" => (Changed, "the authority is in cert of [mode.edge.stream.client]; file of [mode.edge.csr] has what is issued"),
            "meta-host" | "meta-port" => (Changed, "metrics_listen of [mode.edge.stream.client], which is off unless it is set"),
            name => of_any_program(name),
        };
        remark(verdict, name, value, why)
    });
    let remarks = remarks.collect();
    (cloud, remarks)
}

/// What became of a flag that programs of Kubernetes have, for their logs above all.
fn of_any_program(name: &str) -> (Verdict, &'static str) {
    match name.replace('_', "-").as_str() {
        "v" => (Changed, "the flag --v of this program has other steps: 2 is debug"),
        "logtostderr" | "alsologtostderr" | "log-dir" => (Kept, "a flag of this program by the same name"),
        "log-file"
        | "log-file-max-size"
        | "log-flush-frequency"
        | "log-backtrace-at"
        | "vmodule"
        | "stderrthreshold"
        | "skip-headers"
        | "skip-log-headers"
        | "add-dir-header"
        | "one-output" => (Gone, "this program logs to stderr, or with --log-dir to files there"),
        "version" | "help" => (Gone, "it sets nothing"),
        _ => (Unknown, UNKNOWN),
    }
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

const IPTABLES: &str = "enable-iptables";
const INTERCEPT: &str = "[mode.cloud.intercept] does that by nftables: give it the networks of the edge nodes; iptables is not touched";
const METRICS: &str = "the port in metrics_listen of [mode.cloud.stream.server], at --bind-address, as kubelets probe it; profiles (pprof) there are none";
const UNKNOWN: &str =
    "no flag that any YurtTunnel is known to have: what it was for has to be seen to by hand";
