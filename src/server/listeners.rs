//! The open listeners of a server. They follow its config: a reload opens and closes them.

use std::fmt;
use std::net::SocketAddr;

use tokio_util::task::TaskTracker;
use tracing::info;

use crate::config::server::Tls;
use crate::listener::access::{AccessPolicyBuilder, ListenerAccess};
use crate::listener::admission::ListenerContext;
use crate::listener::{BoundPort, ListenerDeps};
use crate::server::config::ConfiguredListener;
use crate::startup::{NotPrepared, StartupErrorCollector, StartupErrors};
use tunnel_base::drain::Drain;
use tunnel_net::listen::share_port;

/// The open listeners for clients.
pub(crate) struct OpenListeners {
    /// What they share.
    deps: ListenerDeps,
    policies: AccessPolicyBuilder,
    tls: Tls,
    /// The other ports of the server, each with its key.
    other_ports: Vec<(String, SocketAddr)>,
    open: Vec<OpenListener>,
}

/// A listener with bound ports, which serves no client yet.
pub(crate) struct PreparedListener {
    pub(crate) table: ConfiguredListener,
    access: ListenerAccess,
    /// The addresses that it requested, each with its key.
    requested: Vec<(String, SocketAddr)>,
    pub(crate) ports: Vec<BoundPort>,
}

struct OpenListener {
    table: ConfiguredListener,
    /// The addresses that it requested, each with its key.
    requested: Vec<(String, SocketAddr)>,
    /// Accepts no client once this drain starts. Its sessions continue.
    drain: Drain,
    /// Its accept loops, which own its ports.
    accepting: TaskTracker,
}

/// Reads the files of listeners and binds their ports. Notes all errors.
pub(crate) fn prepare(
    tables: &[ConfiguredListener],
    tls: &Tls,
    policies: &mut AccessPolicyBuilder,
    startup: &mut StartupErrorCollector,
) -> Result<Vec<PreparedListener>, NotPrepared> {
    let prepared = tables.iter().map(|table| {
        let (key, access) = table.config.access();
        let access = policies.prepare(key, access, startup);
        let before = startup.ports().len();
        let ports = table.config.bind(tls, startup);
        let requested = startup.ports().iter().skip(before).cloned().collect();
        Ok(PreparedListener { table: table.clone(), access: access?, requested, ports: ports? })
    });
    // All of them, so that each error is noted.
    prepared.collect::<Vec<_>>().into_iter().collect()
}

impl OpenListeners {
    /// Creates the list, without listeners. `other_ports` are the other ports of the server, each with its key.
    pub(crate) fn new(
        deps: ListenerDeps,
        policies: AccessPolicyBuilder,
        tls: Tls,
        other_ports: Vec<(String, SocketAddr)>,
    ) -> Self {
        Self { deps, policies, tls, other_ports, open: Vec::new() }
    }

    /// Serves clients.
    pub(crate) fn serve(&mut self, prepared: Vec<PreparedListener>) {
        self.policies.watch(&self.deps.files);
        for PreparedListener { table, access: ListenerAccess { proxies, policy }, requested, ports } in
            prepared
        {
            let drain = self.deps.context.drain.child();
            let accepting = TaskTracker::new();
            let listener = table.kind.name;
            let shared = self.deps.context.clone();
            let context = ListenerContext { listener, policy, drain: drain.clone(), ..shared };
            let deps = ListenerDeps { context, proxies, accepting: accepting.clone(), ..self.deps.clone() };
            log_open(listener, &ports);
            ports.into_iter().for_each(|port| (port.spawn)(&deps));
            self.open.push(OpenListener { table, requested, drain, accepting });
        }
    }

    /// Opens the listeners that these tables add, and closes those that they no longer have. A listener with other
    /// settings closes and opens again. Not cancel safe.
    ///
    /// # Errors
    ///
    /// A file cannot be used, or an address cannot be bound. All listeners then are as before, except that one may fail
    /// to open again if it had to close first for its port; this is in the errors.
    pub(crate) async fn apply(&mut self, tables: &[ConfiguredListener]) -> Result<(), StartupErrors> {
        let is_new = |table: &&ConfiguredListener| {
            table.kind.is_live() && !self.open.iter().any(|open| open.table == **table)
        };
        let opening: Vec<_> = tables.iter().filter(is_new).cloned().collect();
        let is_kept = |open: &OpenListener| !open.table.kind.is_live() || tables.contains(&open.table);
        let (kept, closing): (Vec<_>, Vec<_>) = std::mem::take(&mut self.open).into_iter().partition(is_kept);
        self.open = kept;
        let requested = match self.check(&opening) {
            Ok(requested) => requested,
            Err(errors) => {
                self.open.extend(closing);
                return Err(errors);
            }
        };
        let is_in_the_way = |open: &OpenListener| open.is_in_the_way(&opening, &requested);
        let (first, others): (Vec<_>, Vec<_>) = closing.into_iter().partition(is_in_the_way);
        close(&first).await;
        let prepared = self.prepare(&opening);
        let (result, next) = match prepared {
            Ok(prepared) => {
                close(&others).await;
                (Ok(()), prepared)
            }
            Err(mut errors) => {
                self.open.extend(others);
                let tables: Vec<_> = first.into_iter().map(|closed| closed.table).collect();
                let again = self.prepare(&tables).unwrap_or_else(|more| {
                    errors.0.extend(more.0);
                    Vec::new()
                });
                (Err(errors), again)
            }
        };
        self.serve(next);
        result
    }

    /// Checks all of these tables that can be checked while others have their ports. Returns the requested addresses.
    fn check(&self, tables: &[ConfiguredListener]) -> Result<Vec<SocketAddr>, StartupErrors> {
        let kept = self.open.iter().flat_map(|open| &open.requested);
        let mut startup = StartupErrorCollector::checking();
        startup.reserve_ports(self.other_ports.iter().chain(kept));
        let before = startup.ports().len();
        // The errors are in `startup`, and nothing is bound.
        let _ = prepare(tables, &self.tls, &mut AccessPolicyBuilder::default(), &mut startup);
        let requested = startup.ports().iter().skip(before).map(|(_, at)| *at).collect();
        if startup.is_clear() { Ok(requested) } else { Err(startup.into_errors()) }
    }

    fn prepare(&mut self, tables: &[ConfiguredListener]) -> Result<Vec<PreparedListener>, StartupErrors> {
        let mut startup = StartupErrorCollector::default();
        let prepared = prepare(tables, &self.tls, &mut self.policies, &mut startup);
        startup.finish(prepared)
    }
}

/// Logs the ports of a listener. A long range is one line.
fn log_open(listener: &str, ports: &[BoundPort]) {
    let more = ports.len().checked_sub(MAX_LOGGED).filter(|more| *more > 0);
    let shown = if more.is_some() { 1 } else { ports.len() };
    for port in ports.iter().take(shown) {
        let ports = more.map(|_| ports.len());
        info!(listener, local_addr = %port.shown, ports, "listening for clients");
    }
}

/// Maximum number of ports of a listener that are logged one by one.
const MAX_LOGGED: usize = 8;

/// Closes the ports of listeners. Their sessions continue.
async fn close(listeners: &[OpenListener]) {
    for OpenListener { table, drain, accepting, .. } in listeners {
        drain.start();
        accepting.close();
        accepting.wait().await;
        info!(listener = table.kind.name, key = table.key(), "listener closed");
    }
}

impl OpenListener {
    /// Returns true if it must close before one of these tables can open, which request these addresses.
    fn is_in_the_way(&self, opening: &[ConfiguredListener], requested: &[SocketAddr]) -> bool {
        let shares = |at: SocketAddr| requested.iter().any(|other| share_port(at, *other));
        opening.iter().any(|table| table.key() == self.table.key())
            || self.requested.iter().any(|(_, at)| shares(*at))
    }
}

impl fmt::Debug for OpenListeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<_> = self.open.iter().map(|open| open.table.key()).collect();
        f.debug_struct("OpenListeners").field("open", &keys).finish_non_exhaustive()
    }
}
