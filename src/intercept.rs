//! Interception of this machine's traffic to nodes. An nftables table redirects connections to their addresses, at some
//! ports, to local listeners, which query the kernel for the original destination.
//!
//! The table belongs to the kernel and outlives its owner. So its ports expire unless they are renewed, and the next
//! process may take the table over.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use ipnet::IpNet;
use serde::Serialize;
use serde_json::{Value, json};
use socket2::{SockRef, Socket};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use tunnel_net::netlink::{self, AF_INET, AF_INET6, attribute, find, split};

/// What is intercepted, and where it is redirected.
#[derive(Debug, Clone)]
pub struct InterceptRules {
    /// Name of the table; its family is inet.
    pub table: String,
    /// Mark of the server's own connections, which are never intercepted.
    pub mark: u32,
    /// Bits of a connection's mark that are compared.
    pub mask: u32,
    /// Port of the listener at 127.0.0.1.
    pub v4: Option<u16>,
    /// Port of the listener at `::1`.
    pub v6: Option<u16>,
    /// Networks of which forwarded traffic is intercepted, and the port of the listener for it.
    pub forwarded: Option<(Vec<IpNet>, u16)>,
}

/// The nftables table of this server: redirects connections to addresses of nodes to local listeners. Dropping it
/// leaves the table in the kernel until its ports expire; [`Self::delete`] removes it at once.
#[derive(Debug)]
pub struct NftTable {
    /// What is intercepted, and where it is redirected.
    catch: InterceptRules,
    /// Sets in the kernel; `None` if unknown, so that the next update rebuilds the table.
    kept: Option<InterceptSets>,
    /// Reserves the table's name until dropped; separate from the table itself.
    _owner: TableOwner,
}

/// Error claiming or updating the nftables table of this server. At startup it ends the start; a later update is
/// retried.
#[derive(Debug, thiserror::Error)]
pub enum InterceptError {
    /// Usual cause: the package is missing.
    #[error("cannot run nft: {0}; install nftables, or use an image that contains it")]
    Program(io::Error),
    /// Usual cause: a container without that capability, or a user that is not root.
    #[error(
        "cannot change nftables of this network: CAP_NET_ADMIN is missing; in Kubernetes set \
         securityContext.capabilities.add = [\"NET_ADMIN\"] and runAsUser = 0"
    )]
    Denied,
    /// Another process owns the table.
    #[error(
        "table inet {0} belongs to another running process; stop that process, or choose another table name"
    )]
    Owned(String),
    /// The table exists and has another structure.
    #[error("table inet {0} exists and was not made by this program; delete it, or choose another name")]
    Foreign(String),
    /// The kernel does not support owned tables.
    #[error("kernel does not support owned nftables tables; requires Linux 5.12 or newer")]
    KernelTooOld,
    /// nft did not finish in time.
    #[error("nft did not finish within {TIMEOUT:?}")]
    Timeout,
    /// nft or the kernel returned an error. Usual cause: a missing kernel module (nft_redir, nft_fib_inet,
    /// nf_conntrack).
    #[error("nft: {0}")]
    Failed(String),
}

impl NftTable {
    /// Takes ownership of the table's name, and checks that nft and the kernel accept the table. Intercepts nothing
    /// yet. Blocks for some milliseconds: call it at startup.
    ///
    /// # Errors
    ///
    /// Returns the reason if interception is not possible.
    pub fn claim(catch: InterceptRules) -> Result<Self, InterceptError> {
        let owner = TableOwner::of(&catch.table)?;
        catch.check_name_free()?;
        wait(&["-c", "-j", "-f", "-"], &text(&catch.replace_commands(&InterceptSets::default())))?;
        Ok(Self { catch, kept: None, _owner: owner })
    }

    /// Updates the sets in one transaction and renews the ports. Rebuilds the whole table if its state is unknown.
    /// Unanswered connections to a new node or port are intercepted with their next packet.
    ///
    /// # Errors
    ///
    /// The kernel's state is unchanged, and the next call rebuilds the whole table.
    pub async fn sync(&mut self, sets: &InterceptSets) -> Result<(), InterceptError> {
        let (commands, joined) = match &self.kept {
            Some(kept) => {
                let mut joined = sets.clone();
                if kept.ports == sets.ports {
                    joined.nodes.retain(|node| !kept.nodes.contains(node));
                }
                (self.catch.update_commands(kept, sets), joined)
            }
            None => (self.catch.replace_commands(sets), sets.clone()),
        };
        self.kept = None;
        run(&text(&commands)).await?;
        self.kept = Some(sets.clone());
        if !joined.nodes.is_empty() {
            match delete_pending_connections(&joined).await {
                Ok(0) => {}
                Ok(forgotten) => debug!(
                    conntrack_entries_deleted = forgotten,
                    "unanswered connections will be intercepted"
                ),
                Err(cause) => warn!(error = %cause, "cannot intercept connections in flight"),
            }
        }
        Ok(())
    }

    /// Deletes the table.
    pub async fn delete(self) {
        match run(&text(&self.catch.delete_commands())).await {
            Ok(()) => info!(table = self.catch.table, "intercept table deleted"),
            Err(cause) => warn!(table = self.catch.table, error = %cause, "cannot delete intercept table"),
        }
    }
}

impl InterceptRules {
    /// Checks that the name is free, or belongs to a table of this program with a dead owner.
    fn check_name_free(&self) -> Result<(), InterceptError> {
        match wait(&["-j", "-t", "-f", "-"], &text(&[self.table("list")])) {
            Ok(listed) => {
                let ours = [NODES4, NODES6, PORTS];
                let has = |set: &&str| listed.contains(&format!("\"name\": \"{set}\""));
                if !ours.iter().all(has) {
                    return Err(InterceptError::Foreign(self.table.clone()));
                }
                info!(table = self.table, "taking over the table of a dead owner");
                Ok(())
            }
            // The table does not exist.
            Err(InterceptError::Failed(_)) => Ok(()),
            Err(cause) => Err(cause),
        }
    }
}

/// Returns a redirected connection's original destination, or its actual destination if it was not redirected.
///
/// # Errors
///
/// Fails if the kernel does not know the destination.
pub fn original_destination(socket: &TcpStream, from: IpAddr) -> io::Result<SocketAddr> {
    let known = SockRef::from(socket);
    let meant = if from.is_ipv4() { known.original_dst_v4() } else { known.original_dst_v6() }?;
    meant.as_socket().ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn text(commands: &[Value]) -> String {
    json!({ "nftables": commands }).to_string()
}

/// nft takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(5);

// Netlink messages to the kernel's netfilter.

/// Builds a request with its `number`. Its body is `struct nfgenmsg` with the family and resource ID, then attributes.
fn message(kind: u16, flags: u16, number: u32, family: u8, of: u16, attributes: &[u8]) -> Vec<u8> {
    let body = [&[family, 0][..], &of.to_be_bytes(), attributes].concat();
    netlink::request(kind, flags, number, &body)
}

const NETLINK_NETFILTER: i32 = 12;
/// Length of both headers of a message in bytes.
const HEADERS_LEN: usize = netlink::HEADER_LEN + 4;

// Runs nft.

/// Runs commands in one nft transaction. Cancel safe: the nft process is killed, but may already have applied them.
pub(crate) async fn run(commands: &str) -> Result<(), InterceptError> {
    let done = async {
        let mut nft = tokio::process::Command::from(command(&["-j", "-f", "-"]));
        let mut child = nft.kill_on_drop(true).spawn().map_err(InterceptError::Program)?;
        if let Some(mut input) = child.stdin.take() {
            // If nft ends before it has read everything, its output has the reason.
            let _ = input.write_all(commands.as_bytes()).await;
        }
        check_output(&child.wait_with_output().await.map_err(InterceptError::Program)?)
    };
    timeout(TIMEOUT, done).await.unwrap_or(Err(InterceptError::Timeout)).map(drop)
}

/// Like [`run`], but with these arguments, and returns the output. Blocks: call it at startup.
pub(crate) fn wait(args: &[&str], commands: &str) -> Result<String, InterceptError> {
    let mut child = command(args).spawn().map_err(InterceptError::Program)?;
    if let Some(mut input) = child.stdin.take() {
        let _ = input.write_all(commands.as_bytes());
    }
    check_output(&child.wait_with_output().map_err(InterceptError::Program)?)
}

fn command(args: &[&str]) -> Command {
    let mut nft = Command::new("nft");
    nft.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    nft
}

fn check_output(output: &Output) -> Result<String, InterceptError> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let stderr_text = text(&output.stderr);
    if stderr_text.contains("Operation not permitted") {
        return Err(InterceptError::Denied);
    }
    let first =
        stderr_text.lines().find(|line| !line.trim().is_empty()).unwrap_or("failed without a message");
    Err(InterceptError::Failed(first.to_owned()))
}

// Ownership of a table. Next to it is an empty table that the kernel reserves for one socket (`NFT_TABLE_F_OWNER`). The
// kernel lets no other process change it, and deletes it with that socket, however the process ends. The table belongs
// to the network namespace, so servers with separate process IDs and files see each other's table. Creating it requires
// CAP_NET_ADMIN there.
//
// Uses netlink directly, as the socket must stay open, and nft's closes with nft.

/// While it exists, marks a table's name as owned by this process.
#[derive(Debug)]
pub(crate) struct TableOwner {
    /// The netlink socket that owns the kernel's marker table, which the kernel deletes with it.
    _kernel: Socket,
}

impl TableOwner {
    /// Becomes the owner of the table with this name.
    ///
    /// # Errors
    ///
    /// Returns [`InterceptError::Owned`], [`InterceptError::Denied`], or another error if the kernel cannot do it.
    pub(crate) fn of(table: &str) -> Result<Self, InterceptError> {
        let failed = |cause: io::Error| InterceptError::Failed(format!("cannot query the kernel: {cause}"));
        let mut kernel = netlink::open(NETLINK_NETFILTER).map_err(failed)?;
        kernel.send(&batch(&format!("{table}-owner"))).map_err(failed)?;
        let mut room = [0; OWNER_BUFFER_SIZE];
        // The kernel has responded before `send` returns.
        let len = kernel.read(&mut room).map_err(failed)?;
        match parse_response(room.get(..len).unwrap_or_default()) {
            OwnershipResult::Made => Ok(Self { _kernel: kernel }),
            OwnershipResult::MayNot => Err(InterceptError::Denied),
            OwnershipResult::Refused(EPERM | EEXIST) => Err(InterceptError::Owned(table.to_owned())),
            OwnershipResult::Refused(EOPNOTSUPP) => Err(InterceptError::KernelTooOld),
            OwnershipResult::Refused(code) => Err(failed(io::Error::from_raw_os_error(code))),
        }
    }
}

/// The kernel's response to creating the marker table of a [`TableOwner`].
#[derive(Debug, PartialEq, Eq)]
enum OwnershipResult {
    /// The table was created: this process owns the name.
    Made,
    /// The whole batch was refused, as the process may not change this network.
    MayNot,
    /// The table was refused with this error.
    Refused(i32),
}

/// Parses the kernel's response.
fn parse_response(answer: &[u8]) -> OwnershipResult {
    let code = netlink::error(answer).raw_os_error();
    match (code, answer.get(8..12)) {
        (Some(0), _) => OwnershipResult::Made,
        (Some(EPERM), Some(number)) if *number == BEGIN.to_ne_bytes() => OwnershipResult::MayNot,
        (code, _) => OwnershipResult::Refused(code.unwrap_or(EOPNOTSUPP)),
    }
}

/// Builds a transaction that creates a table with an owner, unless a table with that name exists.
fn batch(table: &str) -> Vec<u8> {
    let name = [table.as_bytes(), &[0]].concat();
    let attributes = [attribute(NFTA_TABLE_NAME, &name), attribute(NFTA_TABLE_FLAGS, &OWNER.to_be_bytes())];
    let table = NLM_F_ACK | NLM_F_EXCL | NLM_F_CREATE;
    [
        message(NFNL_MSG_BATCH_BEGIN, 0, BEGIN, 0, NFTABLES, &[]),
        message(NFTABLES << 8, table, MAKE, NFPROTO_INET, 0, &attributes.concat()),
        message(NFNL_MSG_BATCH_END, 0, END, 0, NFTABLES, &[]),
    ]
    .concat()
}

const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
/// The nftables subsystem; its first message type creates a table.
const NFTABLES: u16 = 10;
const NFPROTO_INET: u8 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_TABLE_FLAGS: u16 = 2;
const OWNER: u32 = 2;
const EPERM: i32 = 1;
const EEXIST: i32 = 17;
const EOPNOTSUPP: i32 = 95;
/// Sequence numbers of the three messages, which the kernel's response repeats.
const BEGIN: u32 = 1;
const MAKE: u32 = 2;
const END: u32 = 3;
/// More than the length of a response in bytes.
const OWNER_BUFFER_SIZE: usize = 1024;

// The table as nft commands in JSON, as nft's language refuses names that are its keywords: recent versions refuse
// "tunnel". Pure.

/// The contents of the table's sets: connections to these addresses and ports are redirected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InterceptSets {
    /// Addresses of nodes.
    pub nodes: BTreeSet<IpAddr>,
    /// Ports of nodes.
    pub ports: BTreeSet<u16>,
}

impl InterceptRules {
    /// Returns commands that replace any table of this name by the whole table with these sets.
    pub(crate) fn replace_commands(&self, sets: &InterceptSets) -> Vec<Value> {
        let mut commands = self.delete_commands();
        commands.push(self.table("add"));
        let set = |set| self.command("add", "set", set);
        commands.extend([
            set(json!({ "name": NODES4, "type": "ipv4_addr" })),
            set(json!({ "name": NODES6, "type": "ipv6_addr" })),
            set(json!({ "name": PORTS, "type": "inet_service", "flags": ["timeout"], "timeout": PORT_TIMEOUT_SECONDS })),
        ]);
        commands.extend(self.chain(OUTPUT));
        for (is_v4, port) in [(true, self.v4), (false, self.v6)] {
            commands.extend(port.map(|port| self.rule(OUTPUT, &redirect(is_v4, port))));
        }
        if let Some((from, port)) = &self.forwarded {
            commands.extend(self.chain(PREROUTING));
            for net in from {
                let is_v4 = net.addr().is_ipv4();
                let prefix = json!({ "prefix": { "addr": net.network(), "len": net.prefix_len() } });
                let from = equal(&field(family(is_v4), "saddr"), &prefix);
                commands.push(self.rule(PREROUTING, &[&[from][..], &redirect(is_v4, *port)].concat()));
            }
        }
        commands.extend(self.fill(sets));
        commands
    }

    /// Returns commands that change the sets in one transaction. The ports are always renewed.
    pub(crate) fn update_commands(&self, from: &InterceptSets, to: &InterceptSets) -> Vec<Value> {
        let joined = to.nodes.difference(&from.nodes).copied().collect();
        let mut commands = self.nodes("delete", from.nodes.difference(&to.nodes));
        commands.extend(self.fill(&InterceptSets { nodes: joined, ports: to.ports.clone() }));
        commands
    }

    /// Returns commands that delete the table if it exists.
    pub(crate) fn delete_commands(&self) -> Vec<Value> {
        // Deleting a missing table is an error, adding an existing one is not: so add it first.
        vec![self.table("add"), self.table("delete")]
    }

    /// Returns commands that add nodes, and replace the ports, each with its full timeout.
    fn fill(&self, sets: &InterceptSets) -> Vec<Value> {
        let mut commands = self.nodes("add", &sets.nodes);
        // An element that is added again keeps its remaining timeout, so all are removed first.
        commands.push(self.command("flush", "set", json!({ "name": PORTS })));
        commands.extend(self.elements("add", PORTS, &sets.ports));
        commands
    }

    /// Returns commands that add addresses to the set of their family, or delete them there.
    fn nodes<'a>(&self, verb: &str, nodes: impl IntoIterator<Item = &'a IpAddr>) -> Vec<Value> {
        let (v4, v6): (Vec<&IpAddr>, Vec<&IpAddr>) = nodes.into_iter().partition(|ip| ip.is_ipv4());
        [(NODES4, v4), (NODES6, v6)]
            .iter()
            .filter_map(|(set, nodes)| self.elements(verb, set, nodes))
            .collect()
    }

    /// Returns `None` for an empty list, which nft rejects.
    fn elements(&self, verb: &str, set: &str, elements: impl IntoIterator<Item: Serialize>) -> Option<Value> {
        let elements: Vec<_> = elements.into_iter().map(|element| json!(element)).collect();
        (!elements.is_empty())
            .then(|| self.command(verb, "element", json!({ "name": set, "elem": elements })))
    }

    /// Returns commands that add a chain. It first accepts traffic to this machine, and the server's own traffic.
    fn chain(&self, name: &str) -> [Value; 3] {
        let chain =
            json!({ "name": name, "type": "nat", "hook": name, "prio": PRIORITY, "policy": "accept" });
        let here = equal(&json!({ "fib": { "result": "type", "flags": ["daddr"] } }), &json!("local"));
        let masked = json!({ "&": [{ "meta": { "key": "mark" } }, self.mask] });
        let ours = equal(&masked, &json!(self.mark & self.mask));
        let passes = |traffic| self.rule(name, &[traffic, json!({ "return": null })]);
        [self.command("add", "chain", chain), passes(here), passes(ours)]
    }

    fn rule(&self, chain: &str, statements: &[Value]) -> Value {
        self.command("add", "rule", json!({ "chain": chain, "expr": statements }))
    }

    fn table(&self, verb: &str) -> Value {
        json!({ verb: { "table": { "family": "inet", "name": self.table } } })
    }

    /// Returns a command about an object of the table: its kind, and its properties.
    fn command(&self, verb: &str, kind: &str, mut object: Value) -> Value {
        object["family"] = json!("inet");
        object["table"] = json!(self.table);
        json!({ verb: { kind: object } })
    }
}

/// Returns statements that redirect traffic to the nodes and ports of the sets to a local port.
fn redirect(is_v4: bool, port: u16) -> [Value; 3] {
    let nodes = if is_v4 { NODES4 } else { NODES6 };
    [
        equal(&field(family(is_v4), "daddr"), &json!(format!("@{nodes}"))),
        equal(&field("tcp", "dport"), &json!(format!("@{PORTS}"))),
        json!({ "redirect": { "port": port } }),
    ]
}

fn equal(left: &Value, right: &Value) -> Value {
    json!({ "match": { "op": "==", "left": left, "right": right } })
}

fn field(protocol: &str, field: &str) -> Value {
    json!({ "payload": { "protocol": protocol, "field": field } })
}

fn family(is_v4: bool) -> &'static str {
    if is_v4 { "ip" } else { "ip6" }
}

/// Before the chains of kube-proxy, and of YurtTunnel's iptables rules: both are at -100.
const PRIORITY: i32 = -110;

/// Timeout of a port in its set, in seconds, unless it is renewed.
const PORT_TIMEOUT_SECONDS: u32 = 30;

const OUTPUT: &str = "output";
const PREROUTING: &str = "prerouting";

/// Names of the sets, which identify a table of this program.
pub(crate) const NODES4: &str = "nodes4";
pub(crate) const NODES6: &str = "nodes6";
pub(crate) const PORTS: &str = "ports";

// Connections opened before their target was intercepted. Connection tracking keeps the decision made for the first
// packet, so a client with an unanswered SYN would wait until its timeout. Once such an entry is deleted, the client's
// next SYN is evaluated again.
//
// Uses netlink (`ctnetlink`) directly, as a machine with nft need not have the conntrack program.

/// Deletes connection tracking entries of unanswered connections to these nodes and ports that are not redirected yet.
/// Returns their number.
///
/// # Errors
///
/// Fails if the kernel does not track connections, or if this process may not change that.
pub(crate) async fn delete_pending_connections(of: &InterceptSets) -> io::Result<usize> {
    // Errors about entries that no longer exist are not read.
    let (dump, delete_socket) = (netlink::open(NETLINK_NETFILTER)?, netlink::open(NETLINK_NETFILTER)?);
    let mut forgotten = 0;
    for family in [AF_INET, AF_INET6] {
        if !of.nodes.iter().any(|ip| ip.is_ipv4() == (family == AF_INET)) {
            continue;
        }
        let pending = pending(&dump, family, of).await?;
        for entry in &pending {
            delete_socket.send(&message(CT_DELETE, 0, 0, family, 0, entry))?;
        }
        forgotten += pending.len();
    }
    Ok(forgotten)
}

/// Returns the attributes that identify each such connection to the kernel.
async fn pending(kernel: &Socket, family: u8, of: &InterceptSets) -> io::Result<Vec<Vec<u8>>> {
    // Requests only connections neither answered nor redirected; older kernels return all.
    let request_filter =
        [attribute(CTA_STATUS, &[0; 4]), attribute(CTA_STATUS_MASK, &REPLIED_OR_DNAT.to_be_bytes())].concat();
    kernel.send(&message(CT_GET, netlink::NLM_F_DUMP, 0, family, 0, &request_filter))?;
    let (mut room, mut found) = (vec![0; netlink::DUMP_ROOM], Vec::new());
    let mut each = |message: &[u8]| {
        let entry = message.get(HEADERS_LEN..).and_then(ConntrackEntry::read);
        let entry = entry.filter(|entry| of.nodes.contains(&entry.to) && of.ports.contains(&entry.port));
        found.extend(entry.filter(ConntrackEntry::is_pending).map(|entry| entry.key));
    };
    while netlink::read_dump(kernel, &mut room, &mut each)? {
        // There may be many entries, and other tasks wait for this thread.
        yield_now().await;
    }
    Ok(found)
}

/// A TCP connection in the kernel's connection tracking.
#[derive(Debug, PartialEq, Eq)]
struct ConntrackEntry {
    /// Destination of its first packet.
    to: IpAddr,
    port: u16,
    status: u32,
    state: u8,
    /// Attributes that identify the connection.
    key: Vec<u8>,
}

impl ConntrackEntry {
    /// Parses an entry. Returns `None` if it is not TCP or incomplete.
    fn read(attributes: &[u8]) -> Option<Self> {
        let tuple = find(attributes, CTA_TUPLE_ORIG)?;
        let (ip, protocol) = (find(tuple, CTA_TUPLE_IP)?, find(tuple, CTA_TUPLE_PROTO)?);
        let v4 = || Some(IpAddr::from(<[u8; 4]>::try_from(find(ip, CTA_IP_V4_DST)?).ok()?));
        let v6 = || Some(IpAddr::from(<[u8; 16]>::try_from(find(ip, CTA_IP_V6_DST)?).ok()?));
        let port = u16::from_be_bytes(find(protocol, CTA_PROTO_DST_PORT)?.try_into().ok()?);
        let tcp = find(find(attributes, CTA_PROTOINFO)?, CTA_PROTOINFO_TCP)?;
        let state = *find(tcp, CTA_PROTOINFO_TCP_STATE)?.first()?;
        let status = u32::from_be_bytes(find(attributes, CTA_STATUS)?.try_into().ok()?);
        let naming = [CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE];
        let named = split(attributes).filter(|(kind, ..)| naming.contains(kind));
        let key = named.flat_map(|(.., whole)| whole.iter().copied()).collect();
        Some(Self { to: v4().or_else(v6)?, port, status, state, key })
    }

    fn is_pending(&self) -> bool {
        self.state == SYN_SENT && self.status & REPLIED_OR_DNAT == 0
    }
}

/// Message types of the connection tracking subsystem: list connections, delete one.
const CT_GET: u16 = 1 << 8 | 1;
const CT_DELETE: u16 = 1 << 8 | 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_IP: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_DST: u16 = 4;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_STATUS: u16 = 3;
const CTA_PROTOINFO: u16 = 4;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_STATUS_MASK: u16 = 26;
/// Status bits: a reply was seen, or the destination was changed.
const REPLIED_OR_DNAT: u32 = 1 << 1 | 1 << 5;
/// State of a connection whose SYN is unanswered.
const SYN_SENT: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(number: u32, code: i32) -> Vec<u8> {
        let mut answer = 36_u32.to_ne_bytes().to_vec();
        answer.extend(2_u16.to_ne_bytes());
        answer.extend([0, 0]);
        answer.extend(number.to_ne_bytes());
        answer.extend([0; 4]);
        answer.extend((-code).to_ne_bytes());
        answer.resize(36, 0);
        answer
    }

    #[test]
    fn missing_privileges_are_distinguished_from_a_refused_table() {
        assert_eq!(parse_response(&answer(MAKE, 0)), OwnershipResult::Made);
        assert_eq!(parse_response(&answer(BEGIN, EPERM)), OwnershipResult::MayNot);
        for code in [EPERM, EEXIST, EOPNOTSUPP] {
            assert_eq!(parse_response(&answer(MAKE, code)), OwnershipResult::Refused(code));
        }
        assert_eq!(
            parse_response(&[]),
            OwnershipResult::Refused(EOPNOTSUPP),
            "without a response there is no ownership"
        );
    }

    #[test]
    fn the_owned_table_is_created_in_one_transaction() {
        let batch = batch("t-owner");
        let lengths: Vec<_> =
            netlink::messages(&batch).map(|(kind, message)| (kind, message.len())).collect();
        assert_eq!(lengths, [(16, 20), (0xa00, 40), (17, 20)]);
        assert_eq!(batch[40..60], *b"\x0c\0\x01\0t-owner\0\x08\0\x02\0\0\0\0\x02");
    }
}

#[cfg(test)]
mod rules_tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    fn catch() -> InterceptRules {
        InterceptRules {
            table: "tunnel".to_owned(),
            mark: 0x40,
            mask: 0xf0,
            v4: Some(7001),
            v6: Some(7002),
            forwarded: None,
        }
    }

    fn sets(nodes: &[&str], ports: &[u16]) -> InterceptSets {
        let nodes = nodes.iter().map(|ip| ip.parse().unwrap()).collect();
        InterceptSets { nodes, ports: ports.iter().copied().collect() }
    }

    /// Returns the commands, each as its verb, its object's kind, and the object.
    fn commands(all: &[Value]) -> Vec<(String, String, Value)> {
        let first = |value: Value| match value {
            Value::Object(of) => of.into_iter().next().unwrap(),
            other => panic!("{other}"),
        };
        let each = all.iter().map(|command| {
            let (verb, object) = first(command.clone());
            let (kind, object) = first(object);
            assert_eq!(
                (&object["family"], &object.get("table").unwrap_or(&object["name"])),
                (&json!("inet"), &&json!("tunnel"))
            );
            (verb, kind, object)
        });
        each.collect()
    }

    fn rules<'a>(all: &'a [(String, String, Value)], chain: &str) -> Vec<&'a Value> {
        let rules =
            all.iter().filter(|(verb, kind, of)| verb == "add" && kind == "rule" && of["chain"] == chain);
        rules.map(|(.., rule)| &rule["expr"]).collect()
    }

    /// Applies commands to the kernel's sets. Panics if the kernel would refuse one.
    fn applied(all: &[Value], held: &mut BTreeMap<String, BTreeSet<String>>) {
        for (verb, kind, of) in commands(all) {
            let name = of["name"].as_str().unwrap_or_default().to_owned();
            match (verb.as_str(), kind.as_str()) {
                ("flush", "set") => held.get_mut(&name).unwrap().clear(),
                ("delete", "table") => held.clear(),
                ("add", "set") => drop(held.insert(name, BTreeSet::new())),
                ("add" | "delete", "element") => {
                    let set = held.get_mut(&name).unwrap();
                    let elements = of["elem"].as_array().unwrap();
                    assert!(!elements.is_empty(), "nft rejects empty lists");
                    for element in elements {
                        let element = element.to_string();
                        // Deleting a missing element fails the whole transaction.
                        assert!(if verb == "add" { set.insert(element) } else { set.remove(&element) });
                    }
                }
                _ => {}
            }
        }
    }

    #[test]
    fn local_and_marked_packets_are_accepted_before_all_other_rules() {
        let forwarded = Some((vec!["10.9.0.0/16".parse().unwrap(), "fd09::/64".parse().unwrap()], 7003));
        let all =
            commands(&InterceptRules { forwarded, ..catch() }.replace_commands(&InterceptSets::default()));
        let local = json!([
            { "match": { "op": "==", "left": { "fib": { "result": "type", "flags": ["daddr"] } }, "right": "local" } },
            { "return": null }
        ]);
        let ours = json!([
            { "match": { "op": "==", "left": { "&": [{ "meta": { "key": "mark" } }, 0xf0] }, "right": 0x40 } },
            { "return": null }
        ]);
        for (chain, hook) in [("output", "output"), ("prerouting", "prerouting")] {
            let rules = rules(&all, chain);
            assert_eq!((rules[0], rules[1]), (&local, &ours), "{chain}");
            assert_eq!(rules.len(), 4, "{chain}: plus one for each family or network");
            let (.., made) = all.iter().find(|(_, kind, of)| kind == "chain" && of["name"] == chain).unwrap();
            assert_eq!(
                (&made["type"], &made["hook"], &made["prio"]),
                (&json!("nat"), &json!(hook), &json!(-110))
            );
        }
        let redirect = |port: u16| json!({ "redirect": { "port": port } });
        assert_eq!(rules(&all, "output")[2][2], redirect(7001));
        assert_eq!(rules(&all, "output")[3][2], redirect(7002));
        let from = |rule: usize| &rules(&all, "prerouting")[rule][0]["match"]["right"]["prefix"];
        assert_eq!(from(2), &json!({ "addr": "10.9.0.0", "len": 16 }));
        assert_eq!(from(3), &json!({ "addr": "fd09::", "len": 64 }));
    }

    #[test]
    fn only_families_with_a_listener_are_intercepted_and_no_forwarded_traffic() {
        let all =
            commands(&InterceptRules { v6: None, ..catch() }.replace_commands(&InterceptSets::default()));
        assert_eq!((rules(&all, "output").len(), rules(&all, "prerouting").len()), (3, 0));
        assert!(!all.iter().any(|(_, kind, of)| kind == "chain" && of["name"] == "prerouting"));
    }

    #[test]
    fn the_whole_table_replaces_any_table_of_its_name() {
        let all = commands(&catch().replace_commands(&sets(&["10.0.0.7", "fd00::7"], &[10250])));
        let begin: Vec<_> =
            all.iter().take(3).map(|(verb, kind, _)| (verb.as_str(), kind.as_str())).collect();
        assert_eq!(begin, [("add", "table"), ("delete", "table"), ("add", "table")]);
        let deletion = commands(&catch().delete_commands());
        assert_eq!(deletion[..], all[..2]);
    }

    #[test]
    fn unchanged_ports_are_renewed_with_their_full_timeout() {
        let same = sets(&["10.0.0.7"], &[10250]);
        let all = commands(&catch().update_commands(&same, &same));
        let verbs: Vec<_> = all.iter().map(|(verb, kind, _)| (verb.as_str(), kind.as_str())).collect();
        assert_eq!(verbs, [("flush", "set"), ("add", "element")]);
        assert_eq!(all[1].2["elem"], json!([10250]));
        let whole = commands(&catch().replace_commands(&same));
        let (.., ports) = whole.iter().find(|(_, kind, of)| kind == "set" && of["name"] == "ports").unwrap();
        assert_eq!((&ports["flags"], &ports["timeout"]), (&json!(["timeout"]), &json!(30)));
    }

    fn any_sets() -> impl Strategy<Value = InterceptSets> {
        let v4 = (0_u8..6).prop_map(|last| IpAddr::from([10, 0, 0, last]));
        let v6 = (0_u16..6).prop_map(|last| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]));
        let nodes = proptest::collection::btree_set(prop_oneof![v4, v6], 0..8);
        (nodes, proptest::collection::btree_set(1_u16..6, 0..4))
            .prop_map(|(nodes, ports)| InterceptSets { nodes, ports })
    }

    proptest! {
        #[test]
        fn any_change_of_sets_yields_the_same_state_as_the_whole_table(
            steps in proptest::collection::vec(any_sets(), 1..6),
        ) {
            let (mut held, mut direct) = (BTreeMap::new(), BTreeMap::new());
            applied(&catch().replace_commands(&InterceptSets::default()), &mut held);
            let mut from = InterceptSets::default();
            for to in &steps {
                applied(&catch().update_commands(&from, to), &mut held);
                from = to.clone();
            }
            applied(&catch().replace_commands(&from), &mut direct);
            prop_assert_eq!(held, direct);
        }
    }
}

#[cfg(test)]
mod pending_tests {
    use proptest::prelude::*;

    use super::*;

    /// The kernel's report of an unanswered connection from 10.99.0.1 to 10.99.0.8:10250.
    const UNANSWERED: &str = "3400018014000180080001000a630001080002000a6300081c000280050001000600000006000200aa1000000600\
                              0300280a00003400028014000180080001000a630008080002000a6300011c000280050001000600000006000200\
                              280a000006000300aa1000000800030000000188080008000000000008000c009b458e6608000b00000000020800\
                              070000000077300004802c0001800500010001000000050002000a00000005000300000000000600040003000000\
                              0600050000000000";

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<_> = hex.bytes().map(|digit| char::from(digit).to_digit(16).unwrap()).collect();
        digits.chunks(2).map(|two| u8::try_from(two[0] * 16 + two[1]).unwrap()).collect()
    }

    #[test]
    fn an_unanswered_connection_is_pending_and_a_translated_one_is_not() {
        let message_bytes = bytes(UNANSWERED);
        let entry = ConntrackEntry::read(&message_bytes).unwrap();
        assert_eq!((entry.to, entry.port), ([10, 99, 0, 8].into(), 10250));
        assert!(entry.is_pending());
        // Identified by its source, its destination and its ID.
        assert_eq!(entry.key, [&message_bytes[..0x34], &bytes("08000c009b458e66")].concat());
        for led in [1 << 1, 1 << 5] {
            assert!(
                !ConntrackEntry {
                    status: entry.status | led,
                    ..ConntrackEntry::read(&message_bytes).unwrap()
                }
                .is_pending()
            );
        }
        assert!(!ConntrackEntry { state: 3, ..entry }.is_pending(), "it is established");
    }

    proptest! {
        #[test]
        fn no_conntrack_message_makes_the_parser_panic(message_bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            ConntrackEntry::read(&message_bytes);
        }

        #[test]
        fn a_truncated_conntrack_message_yields_no_other_port(len in 0_usize..208) {
            let message_bytes = bytes(UNANSWERED);
            let cut = ConntrackEntry::read(&message_bytes[..len.min(message_bytes.len())]);
            prop_assert!(cut.is_none_or(|cut| cut.port == 10250));
        }
    }
}
