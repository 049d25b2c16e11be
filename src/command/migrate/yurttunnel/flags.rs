//! Remarks on each flag of YurtTunnel's programs.

use std::net::IpAddr;

use crate::command::migrate::yurttunnel::MigrationVerdict::{Changed, Gone, Kept, Unknown};
use crate::command::migrate::yurttunnel::{MigrationRemark, MigrationVerdict};
use tunnel_base::names::Target;

/// The flags of OpenYurt's tunnel server that have a counterpart in this program's config; the defaults are OpenYurt's.
#[derive(Debug)]
pub(crate) struct YurtServerFlags {
    /// Address for edges and TLS.
    pub(crate) bind: IpAddr,
    /// Address for HTTP.
    pub(crate) insecure_bind: IpAddr,
    /// The port for agents.
    pub(crate) agents: u16,
    /// The port with TLS.
    pub(crate) secure: u16,
    /// The port without TLS.
    pub(crate) insecure: u16,
    /// The port of metrics.
    pub(crate) meta: u16,
    /// Whether names of nodes are published.
    pub(crate) names: bool,
}

/// The server's defaults.
impl Default for YurtServerFlags {
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
pub(crate) fn server(flags: &[(String, String)]) -> (YurtServerFlags, Vec<MigrationRemark>) {
    let mut server = YurtServerFlags::default();
    let remarks = flags.iter().map(|(name, value)| {
        let (verdict, why) = match name.as_str() {
            "bind-address" => bind(&mut server.bind, value, "listen of [server.links], listen_ip of [server.https]"),
            "insecure-bind-address" => bind(&mut server.insecure_bind, value, "listen_ip of [server.http]"),
            "tunnel-agent-connect-port" => set(&mut server.agents, value, "the port in listen of [server.links]"),
            "secure-port" => set(&mut server.secure, value, "the port in ports of [server.https]"),
            "insecure-port" => set(&mut server.insecure, value, "the port in ports of [server.http]"),
            "meta-port" => match set(&mut server.meta, value, METRICS) {
                (Kept, why) => (Changed, why),
                unread => unread,
            },
            "enable-dns-controller" => {
                server.names = value != "false";
                (Kept, if server.names { "[server.node_names]" } else { "without [server.node_names]" })
            }
            "kube-config" => (Changed, "the flag --kubeconfig of this program"),
            "cert-dns-names" | "cert-ips" => (Changed, "the certificate in cert must contain it; tunnel init --name makes one, or [server.csr] requests one with names, which `tunnel approve` accepts by --san"),
            "cert-dir" => (Changed, "each file has its own key: cert, key, client_ca"),
            IPTABLES if value == "false" => (Kept, "nothing is intercepted unless the config enables it"),
            IPTABLES => (Changed, INTERCEPT),
            "iptables-sync-period" | "dns-sync-period" => (Gone, "changes are applied immediately, and everything is checked again every 30 min"),
            "egress-selector-enable" => (Gone, "it had no effect there; here [server.egress] serves kube-apiserver's egress selector"),
            "server-count" => (Gone, "servers find each other by kubernetes_service of [server.peers], and an edge needs a link to one of them"),
            "proxy-strategy" => (Gone, "a request always goes to the node that it names"),
            name => of_any_program(name),
        };
        remark(verdict, name, value, why)
    });
    let mut remarks: Vec<_> = remarks.collect();
    // Its default, even without the flag.
    if !flags.iter().any(|(name, _)| name == IPTABLES) {
        remarks.push(remark(Changed, IPTABLES, "true, its default", INTERCEPT));
    }
    (server, remarks)
}

/// Reads the agent's flags. Returns the server's address, if a flag contains it.
pub(crate) fn agent(flags: &[(String, String)]) -> (Option<Target>, Vec<MigrationRemark>) {
    let mut cloud = None;
    let remarks = flags.iter().map(|(name, value)| {
        let (verdict, why) = match name.as_str() {
            "tunnelserver-addr" => match value.parse() {
                Ok(at) => {
                    cloud = Some(at);
                    (Kept, "servers of [edge.uplink]")
                }
                Err(_) => (Changed, "not host:port; set servers of [edge.uplink]"),
            },
            "node-name" => {
                (Changed, "NODE_NAME of the environment, or node of [edge.uplink], different for each node")
            }
            "node-ip" => (Changed, "NODE_IP of the environment, or node_ips of [edge.uplink]"),
            "agent-identifiers" => (
                Gone,
                "an edge is identified by its node's name, and by the addresses of --node-ip and of its Node",
            ),
            "apiserver-addr" => (Gone, "an edge uses Kubernetes only for a certificate, with a kubeconfig"),
            "kube-config" => (
                Changed,
                "the flag --kubeconfig of this program, needed only if [edge.csr] requests a certificate",
            ),
            "cert-dir" => {
                (Changed, "the CA is in ca of [edge.uplink], the issued certificate in file of [edge.csr]")
            }
            "meta-host" | "meta-port" => {
                (Changed, "metrics_listen of [edge.uplink], which is off by default")
            }
            name => of_any_program(name),
        };
        remark(verdict, name, value, why)
    });
    let remarks = remarks.collect();
    (cloud, remarks)
}

/// Returns the remark on a flag that all Kubernetes programs have, mostly for logs.
fn of_any_program(name: &str) -> (MigrationVerdict, &'static str) {
    match name.replace('_', "-").as_str() {
        "v" => (Changed, "the flag -v of this program has different levels; 2 is debug"),
        "logtostderr" | "alsologtostderr" | "log-dir" => (Kept, "the flag of the same name"),
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
        "version" | "help" => (Gone, "not a setting"),
        _ => (Unknown, UNKNOWN),
    }
}

pub(super) fn remark(verdict: MigrationVerdict, name: &str, value: &str, why: &str) -> MigrationRemark {
    MigrationRemark { verdict, what: format!("--{name}={value}"), why: why.to_owned() }
}

/// Takes over a value. An invalid value leaves the default.
fn set<T: std::str::FromStr>(to: &mut T, value: &str, why: &'static str) -> (MigrationVerdict, &'static str) {
    match value.parse() {
        Ok(value) => {
            *to = value;
            (Kept, why)
        }
        Err(_) => (Gone, "invalid value; the default is used"),
    }
}

/// Takes over an address to listen on. A variable such as `$(NODE_IP)` has another value on each machine.
fn bind(to: &mut IpAddr, value: &str, why: &'static str) -> (MigrationVerdict, &'static str) {
    if value.starts_with("$(") && value.ends_with(')') {
        *to = IpAddr::from([0, 0, 0, 0]);
        return (Changed, "all addresses of the server, as the variable differs from machine to machine");
    }
    set(to, value, why)
}

const IPTABLES: &str = "enable-iptables";
const INTERCEPT: &str =
    "[server.intercept] does that with nftables; set the networks of the edge nodes; iptables is not touched";
const METRICS: &str = "the port in metrics_listen of [server.links], at --bind-address, as kubelets probe it; there are no profiles (pprof)";
const UNKNOWN: &str = "not a flag of any known YurtTunnel; handle its purpose by hand";
