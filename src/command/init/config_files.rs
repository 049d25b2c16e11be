//! The config files, and the closing message.

use std::fmt::Write as _;

use crate::command::init::{APISERVER, EGRESS_PORT, GRPC_PORT, InitArgs, edge_folder};
use crate::command::machine_files::{quoted_list, tls_note};
use crate::command::shell_word;
use tunnel_proto::names::{Host, NodeName, Target};

/// Returns the TOML config of a server with its files in that folder. `clients` are the names of the clients of the
/// egress port; without clients there is no such port.
pub(crate) fn server_config(clients: &[String], dir: &str) -> String {
    // A service may not write below /etc.
    let enrolled = if dir.starts_with("/etc/") { STATE_DIR } else { dir };
    let mut text =
        format!(include_str!("server.toml"), dir = dir, enrolled = enrolled, GRPC_PORT = GRPC_PORT);
    if !clients.is_empty() {
        let names = quoted_list(clients);
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            concat!("\n", include_str!("egress.toml")),
            dir = dir,
            names = names,
            EGRESS_PORT = EGRESS_PORT
        );
    }
    text
}

/// The directory that the packaged units allow the program to write.
const STATE_DIR: &str = "/var/lib/tunnel";

/// Returns the file for kube-apiserver's --egress-selector-config-file.
pub(crate) fn egress_selector(server: &Host) -> String {
    let server = Target { host: server.clone(), port: EGRESS_PORT };
    format!(include_str!("egress-selector.yaml"), server = server)
}

/// Returns what was made, where it belongs, and what to do next.
pub(crate) fn summary(args: &InitArgs, clients: &[String], is_new: bool, to: &str) -> String {
    let dir = args.dir.display();
    let mut text = format!("created in {dir}, for this user only:\n");
    let mut line = |name: &str, what: &str| {
        let _ = writeln!(text, "  {name:<30}  {what}");
    };
    if is_new {
        line("ca.crt, ca.key", "the CA; ca.key stays here, do not copy it to other machines");
    }
    line("server/", &format!("becomes {to} on the machine of each server"));
    for node in &args.nodes {
        line(&format!("{}/", edge_folder(node)), &format!("becomes {to} on {node}"));
    }
    for (client, folder) in args.clients.iter().zip(clients) {
        let what = if client == APISERVER {
            "becomes /etc/kubernetes/tunnel on kube-apiserver's machine".to_owned()
        } else {
            format!("for {client}: certificate and key for the egress port")
        };
        line(&format!("{folder}/"), &what);
    }
    let from = shell_word(&format!("{dir}/server"));
    let config = shell_word(&format!("{to}/server.toml"));
    let place = shell_word(to);
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "next, on the machine of a server:\n  cp -rpT {from} {place}\n  tunnel server -c {config}\n\
         then, for each node, on the server's machine:\n  \
         tunnel invite --node NODE    (prints the command that NODE runs, also behind NAT)\n"
    );
    if let Some(node) = args.nodes.first() {
        let _ = write!(
            text,
            "or, for {node}, copy edge-{node} by any way to {to} there, and run:\n  tunnel edge -c {}\n",
            shell_word(&format!("{to}/edge.toml"))
        );
    }
    let node = args.nodes.first().map_or("NODE", NodeName::as_str);
    let _ = write!(text, "and on the server's machine:\n  tunnel nodes\n  tunnel ssh root@{node}\n");
    text + &args.nodes.iter().map(tls_note).collect::<String>()
}
