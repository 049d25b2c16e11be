//! The settings that are written, and what is told at the end.

use std::fmt::Write as _;

use super::{APISERVER, Init, edge_folder};
use crate::names::{Host, NodeName};

/// Settings of a pod.
pub(in crate::command) struct CloudText<'a> {
    /// Who may come in at the egress port; none: there is no such port.
    pub(in crate::command) clients: &'a [String],
}

/// Settings of an edge.
pub(in crate::command) struct EdgeText<'a> {
    pub(in crate::command) node: &'a NodeName,
    /// Where the cloud is, host and port.
    pub(in crate::command) server: &'a str,
    /// The name in its certificate, if that is another one.
    pub(in crate::command) dns: Option<&'a Host>,
    /// Whether it has a certificate for its kubelet.
    pub(in crate::command) has_kubelet: bool,
}

impl CloudText<'_> {
    /// With its files in that folder.
    pub(in crate::command) fn at(&self, dir: &str) -> String {
        // A service may not write below /etc.
        let enrolled = if dir.starts_with("/etc/") { STATE_DIR } else { dir };
        let mut text = format!(
            r#"# Settings of a pod: tunnel --m=cloud --c={dir}/cloud.toml
# Written by `tunnel init`; conf/cloud.toml describes every key.

[mode.cloud.stream.server]
listen = "0.0.0.0:9000"
log_listen = "127.0.0.1:51010"
cert = "{dir}/certs/cloud.crt"
key = "{dir}/certs/cloud.key"
ca = "{dir}/certs/ca.crt"
tokenfile = "{dir}/token/token"

# HTTP CONNECT, for this machine alone. For others: another address, and allow_from or auth to say for whom.
[mode.cloud.ssh]
listen = "127.0.0.1:2222"

# Nodes that join by `tunnel invite` and `tunnel join`; without an invitation that is open no machine can join.
[mode.cloud.invitations]
store = "file"
file = "{enrolled}/enrolled"
"#
        );
        if !self.clients.is_empty() {
            let names: Vec<_> = self.clients.iter().map(|name| format!("\"{name}\"")).collect();
            let names = names.join(", ");
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                r#"
# HTTP CONNECT over TLS, for these certificates alone.
[mode.cloud.egress]
listen = "0.0.0.0:8000"
cert = "{dir}/certs/cloud.crt"
key = "{dir}/certs/cloud.key"
client_ca = "{dir}/certs/ca.crt"
names = [{names}]
"#
            );
        }
        text
    }
}

impl EdgeText<'_> {
    /// With its files in that folder.
    pub(in crate::command) fn at(&self, dir: &str) -> String {
        let Self { node, server, dns, has_kubelet } = self;
        let dns = dns.map_or_else(String::new, |dns| format!("dns = \"{dns}\"\n"));
        let mut text = format!(
            r#"# Settings of the edge of {node}: tunnel --m=edge --c={dir}/edge.toml
# Written for it alone; conf/edge.toml describes every key.

[mode.edge.stream.client]
node = "{node}"
token_file = "{dir}/token/token"
cert = "{dir}/certs/ca.crt"
server_name = "{server}"
{dns}log_listen = "127.0.0.1:51010"

# Clients reach services of this machine, and nothing behind it.
[mode.edge.allow]
targets = ["127.0.0.0/8:*", "[::1]:*", "own:*"]
"#
        );
        if *has_kubelet {
            let _ = write!(
                text,
                r#"
# What this node's kubelet is shown.
[mode.edge.https]
cert = "{dir}/certs/apiserver-kubelet-client.crt"
key = "{dir}/certs/apiserver-kubelet-client.key"
"#
            );
        }
        text
    }
}

/// Where the packaged units let the program write.
const STATE_DIR: &str = "/var/lib/tunnel";

/// The file of kube-apiserver's --egress-selector-config-file.
pub(super) fn egress_selector(server: &str) -> String {
    format!(
        r"# For kube-apiserver's --egress-selector-config-file. The files are named as kube-apiserver sees them.
apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection:
    proxyProtocol: HTTPConnect
    transport:
      tcp:
        url: https://{server}:8000
        tlsConfig:
          caBundle: /etc/kubernetes/tunnel/ca.crt
          clientCert: /etc/kubernetes/tunnel/client.crt
          clientKey: /etc/kubernetes/tunnel/client.key
"
    )
}

/// What was made, where it goes, and what to do next.
pub(super) fn made(asked: &Init, clients: &[String], is_new: bool, to: &str) -> String {
    let dir = asked.dir.display();
    let mut text = format!("made in {dir}, for this user alone:\n");
    let mut line = |name: &str, what: &str| {
        let _ = writeln!(text, "  {name:<30}  {what}");
    };
    if is_new {
        line("ca.crt, ca.key", "the authority; ca.key stays here and goes to no other machine");
    }
    line("cloud/", &format!("becomes {to} on the machine of each pod"));
    for node in &asked.nodes {
        line(&format!("{}/", edge_folder(node)), &format!("becomes {to} on {node}"));
    }
    for (client, folder) in asked.clients.iter().zip(clients) {
        let what = if client == APISERVER {
            "becomes /etc/kubernetes/tunnel on kube-apiserver's machine".to_owned()
        } else {
            format!("for {client}: certificate and key for the egress port")
        };
        line(&format!("{folder}/"), &what);
    }
    let node = asked.nodes.first().map(ToString::to_string).unwrap_or_default();
    let _ = write!(
        text,
        "next, on the machine of a pod:\n  cp -rpT {dir}/cloud {to}\n  tunnel --m=cloud --c={to}/cloud.toml\n\
         then, for each node:\n  scp -rp {dir}/edge-{node} root@{node}:{to}\n  \
         on {node}: tunnel --m=edge --c={to}/edge.toml\n\
         and on the pod's machine:\n  tunnel status\n  curl -p -x http://127.0.0.1:2222 http://{node}:PORT/\n  \
         tunnel invite --node NODE    (prints the line by which one more node joins)\n"
    );
    text
}
