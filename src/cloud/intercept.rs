//! Starts catching what is sent to edge nodes' addresses, from `[mode.cloud.intercept]`.

mod keeper;
mod pace;
mod presence;
mod seek;
mod told;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use tokio::sync::oneshot;
use tracing::{info, info_span};

use super::core::Core;
use super::ports::ClientPort;
use crate::config::cloud::{Cloud, Intercept as Settings};
use crate::frontend::{Caught, Intercept};
use crate::net::intercept::{Catch, CatchError, Table};
use crate::net::interfaces::LocalAddresses;
use crate::net::listen::Listener;
use crate::net::mark;
use crate::startup::{FaultKind, Gates, Startup};
use keeper::Keeper;

/// What is to be caught, and the listeners' knowledge of it.
#[derive(Debug)]
pub(super) struct Interception {
    table: Table,
    caught: Arc<Caught>,
    settings: Settings,
}

/// Where what is caught is led.
struct Listeners {
    v4: Listener,
    /// `None`: this host has no IPv6.
    v6: Option<Listener>,
    /// For what other machines send through this one.
    forwarded: Option<Listener>,
}

/// Binds the listeners and takes the table; outer `None`: there are faults, which `startup` has noted; inner: nothing is to
/// be caught.
pub(super) fn prepare(
    settings: &Cloud,
    gates: &mut Gates,
    startup: &mut Startup,
) -> Option<(Vec<ClientPort>, Option<Interception>)> {
    let Some(settings) = settings.intercept.clone() else { return Some((Vec::new(), None)) };
    let guard = gates.prepare(KEY, &settings.access, startup);
    let is_on_host = on_host(settings.host_ip, startup);
    let listeners = Listeners::bind(&settings, startup);
    let (listeners, guard) = listeners.zip(guard).filter(|_| is_on_host)?;
    let table = match Table::claim(listeners.catch(&settings)) {
        Ok(table) => table,
        Err(why) => {
            startup.fault(kind(&why), KEY, why.to_string());
            return None;
        }
    };
    let caught = Arc::new(Caught::default());
    let all = [Some(listeners.v4), listeners.v6, listeners.forwarded].into_iter().flatten();
    let ports = all.map(|listener| {
        let caught = caught.clone();
        ClientPort::tcp(listener, guard.clone(), move |core| {
            let ports = core.context.ports.clone();
            Intercept { caught, ports }
        })
    });
    Some((ports.collect(), Some(Interception { table, caught: caught.clone(), settings })))
}

impl Interception {
    /// Has the mark on all that this process sends from now on: to be called before it sends anything.
    pub(super) fn mark_own(&self) {
        mark::set(self.settings.mark.mark);
    }

    /// Catches from now on, until the pod begins to stop. The receiver hears once nothing is caught any more.
    pub(super) fn spawn(self, core: &Core, cloud: &Cloud) -> oneshot::Receiver<()> {
        let Self { table, caught, settings } = self;
        if cloud.addresses.cluster.is_none() && !settings.trust_edges {
            info!(
                "what edges say of their own addresses counts for nothing, as no Kubernetes is asked that could contradict \
                 them: give their addresses in the token file, or set {KEY}.trust_edges = true"
            );
        }
        let (done, emptied) = oneshot::channel();
        let shared = core.context.clone();
        let drain = shared.ground.drain.clone();
        let own = LocalAddresses::of_interfaces(settings.host_ip.into_iter().chain(cloud.pod_ip).collect());
        let (grace, readiness) = (cloud.session.grace, core.readiness.clone());
        let keeper = Keeper::new(table, caught, settings, grace, own, shared, readiness);
        drain.spawn(info_span!("intercept"), keeper.run(done));
        emptied
    }
}

impl Listeners {
    fn bind(settings: &Settings, startup: &mut Startup) -> Option<Self> {
        let key = format!("{KEY}.networks");
        let mut bind = |ip: IpAddr| startup.bind(&key, SocketAddr::new(ip, settings.port));
        let v4 = bind(Ipv4Addr::LOCALHOST.into());
        let v6 = has_v6().then(|| bind(Ipv6Addr::LOCALHOST.into()));
        // Port by port: where one is given, it is taken on loopback already.
        let any: IpAddr = if has_v6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let at = SocketAddr::new(any, settings.port.checked_add(u16::from(settings.port > 0))?);
        let forwarded = (!settings.forwarded.is_empty()).then(|| startup.bind(&key, at));
        Some(Self { v4: v4?, v6: all(v6)?, forwarded: all(forwarded)? })
    }

    fn catch(&self, settings: &Settings) -> Catch {
        let port = |listener: &Listener| listener.at().port();
        Catch {
            table: settings.table.clone(),
            mark: settings.mark.mark,
            mask: settings.mark.mask,
            v4: Some(port(&self.v4)),
            v6: self.v6.as_ref().map(port),
            forwarded: self.forwarded.as_ref().map(|listener| (settings.forwarded.clone(), port(listener))),
        }
    }
}

/// Outer `None`: it was wanted, and cannot be had.
fn all<T>(wanted: Option<Option<T>>) -> Option<Option<T>> {
    match wanted {
        None => Some(None),
        Some(had) => had.map(Some),
    }
}

fn has_v6() -> bool {
    UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
}

/// Whether this pod is on its host's network, as far as Kubernetes has told; if not, that is noted.
fn on_host(host: Option<IpAddr>, startup: &mut Startup) -> bool {
    let Some(host) = host else { return true };
    let own = LocalAddresses::of_interfaces(Vec::new()).now().all;
    if own.contains(&host) {
        return true;
    }
    let why = format!(
        "this pod is not on its host's network (HOST_IP is {host}, which is no address here), so nothing of the host passes \
         through its tables: set hostNetwork: true in its manifest"
    );
    startup.fault(FaultKind::Permission, KEY, why);
    false
}

fn kind(why: &CatchError) -> FaultKind {
    match why {
        CatchError::Denied => FaultKind::Permission,
        CatchError::Owned(_) => FaultKind::Port,
        CatchError::Foreign(_) => FaultKind::Config,
        CatchError::Program(_) | CatchError::Old | CatchError::Silent | CatchError::Failed(_) => {
            FaultKind::System
        }
    }
}

const KEY: &str = "mode.cloud.intercept";
