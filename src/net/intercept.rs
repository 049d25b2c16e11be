//! Traffic of this machine that is caught on its way to nodes: a table of nftables leads what is sent to their addresses,
//! at some ports, to listeners of ours, which learn from the kernel where it was meant to go.
//!
//! The table is the kernel's, and stays when its owner dies. So its ports are forgotten unless they are renewed, and
//! whoever comes then may take it over.

mod netfilter;
mod nft;
mod owner;
mod pending;
mod rules;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use nftables::schema::Nftables;
use socket2::SockRef;
use tokio::net::TcpStream;
use tracing::{debug, info, warn};

use owner::Owner;
pub use rules::Sets;

/// What is caught, and where it is led.
#[derive(Debug, Clone)]
pub struct Catch {
    /// The table's name; its family is inet.
    pub table: String,
    /// What connections carry that are never caught, as they are our own.
    pub mark: u32,
    /// Which bits of a connection's mark are compared.
    pub mask: u32,
    /// The port of the listener at 127.0.0.1.
    pub v4: Option<u16>,
    /// The one at `::1`.
    pub v6: Option<u16>,
    /// Networks whose traffic is caught that passes through this machine, and the port of the listener for it.
    pub forwarded: Option<(Vec<IpNet>, u16)>,
}

/// The table of this process. Dropped without [`Self::delete`] it stays in the kernel, until its ports are forgotten.
#[derive(Debug)]
pub struct Table {
    catch: Catch,
    /// What the kernel has; `None`: that is not known, so all is made anew.
    kept: Option<Sets>,
    /// Shows others that the owner lives.
    _owner: Owner,
}

/// Why nothing can be caught.
#[derive(Debug, thiserror::Error)]
pub enum CatchError {
    /// Usual cause: the package is missing.
    #[error("the program nft cannot be run: {0}; install nftables, or take an image that contains it")]
    Program(io::Error),
    /// Usual cause: a container without that capability, or a user that is not root.
    #[error(
        "this process may not change its network's nftables: it lacks CAP_NET_ADMIN (in Kubernetes: \
         securityContext.capabilities.add = [\"NET_ADMIN\"], and runAsUser = 0)"
    )]
    Denied,
    /// Another process has it.
    #[error(
        "the table inet {0} belongs to another process, which is alive: stop that one, or choose another name"
    )]
    Owned(String),
    /// It is there, and not as we make it.
    #[error("the table inet {0} is there, and not made by this program: delete it, or choose another name")]
    Foreign(String),
    /// The kernel knows no owners.
    #[error("this kernel lets no process own a table of nftables: it takes Linux 5.12 or newer")]
    Old,
    /// nft does not end.
    #[error("nft has not ended within {PATIENCE:?}")]
    Silent,
    /// nft, or the kernel, refuses. Usual cause: a kernel without a module (nft_redir, nft_fib_inet, nf_conntrack).
    #[error("nft: {0}")]
    Failed(String),
}

impl Table {
    /// Takes the table's name, and tries whether nft and the kernel would make it; nothing is caught yet. Blocks for some
    /// milliseconds: for start-up.
    ///
    /// # Errors
    ///
    /// What will not do.
    pub fn claim(catch: Catch) -> Result<Self, CatchError> {
        let owner = Owner::of(&catch.table)?;
        catch.is_free()?;
        nft::wait(&["-c", "-j", "-f", "-"], &text(&catch.whole(&Sets::default())))?;
        Ok(Self { catch, kept: None, _owner: owner })
    }

    /// Makes the sets these in one transaction, the whole table where it is not there or not known to be right, and renews
    /// the ports. Connections that wait in vain for a node or port that has joined are caught with their next packet.
    ///
    /// # Errors
    ///
    /// The kernel has what it had; the next call makes the whole table anew.
    pub async fn keep(&mut self, sets: &Sets) -> Result<(), CatchError> {
        let (commands, joined) = match &self.kept {
            Some(kept) => {
                let mut joined = sets.clone();
                if kept.ports == sets.ports {
                    joined.nodes.retain(|node| !kept.nodes.contains(node));
                }
                (self.catch.change(kept, sets), joined)
            }
            None => (self.catch.whole(sets), sets.clone()),
        };
        self.kept = None;
        nft::run(&text(&commands)).await?;
        self.kept = Some(sets.clone());
        if !joined.nodes.is_empty() {
            match pending::forget(&joined).await {
                Ok(0) => {}
                Ok(forgotten) => debug!(forgotten, "connections that nobody had answered are looked at anew"),
                Err(cause) => warn!(%cause, "connections that are under way are not caught"),
            }
        }
        Ok(())
    }

    /// Takes the table away.
    pub async fn delete(self) {
        match nft::run(&text(&self.catch.gone())).await {
            Ok(()) => info!(table = self.catch.table, "the table is deleted"),
            Err(cause) => warn!(table = self.catch.table, %cause, "the table stays"),
        }
    }
}

impl Catch {
    /// Whether the name is free, or that of a table as we make it, whose owner has died.
    fn is_free(&self) -> Result<(), CatchError> {
        match nft::wait(&["-j", "-t", "list", "table", "inet", &self.table], "") {
            Ok(listed) => {
                let ours = [rules::NODES4, rules::NODES6, rules::PORTS];
                let has = |set: &&str| listed.contains(&format!("\"name\": \"{set}\""));
                if !ours.iter().all(has) {
                    return Err(CatchError::Foreign(self.table.clone()));
                }
                info!(table = self.table, "a table is taken over whose owner has died");
                Ok(())
            }
            // There is none.
            Err(CatchError::Failed(_)) => Ok(()),
            Err(cause) => Err(cause),
        }
    }
}

/// Where a connection was meant to go that is led here; where it has come to, if nobody has led it.
///
/// # Errors
///
/// The kernel does not know.
pub fn meant_for(socket: &TcpStream, from: IpAddr) -> io::Result<SocketAddr> {
    let known = SockRef::from(socket);
    let meant = if from.is_ipv4() { known.original_dst_v4() } else { known.original_dst_v6() }?;
    meant.as_socket().ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn text(commands: &Nftables<'_>) -> String {
    // It has neither maps nor numbers that JSON could not have.
    serde_json::to_string(commands).unwrap_or_default()
}

/// nft takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);
