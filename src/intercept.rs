//! Interception of this machine's traffic to nodes. An nftables table redirects connections to their addresses, at some
//! ports, to local listeners, which query the kernel for the original destination.
//!
//! The table belongs to the kernel and outlives its owner. So its ports expire unless they are renewed, and the next
//! process may take the table over.

mod netfilter;
pub(crate) mod nft;
pub(crate) mod pending_connections;
pub mod rules;
pub(crate) mod table_owner;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use serde_json::{Value, json};
use socket2::SockRef;
use tokio::net::TcpStream;
use tracing::{debug, info, warn};

use crate::intercept::nft::{run, wait};
use crate::intercept::pending_connections::delete_pending_connections;
use crate::intercept::rules::{InterceptSets, NODES4, NODES6, PORTS};
use crate::intercept::table_owner::TableOwner;

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
    pub v4: u16,
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
                // With other ports, connections to each node may be affected.
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
        // The kernel decides on redirection at the first packet, and remembers it. So unanswered connections are
        // forgotten.
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
