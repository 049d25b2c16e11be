//! The open listeners of a server. They follow its config: a reload opens and closes them.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use tokio_util::task::TaskTracker;
use tracing::info;

use crate::admission::access::AccessPolicies;
use crate::admission::{AccessPolicy, CertificateRequest, ListenerContext};
use crate::config::listen_tls::Tls;
use crate::config::plan::log_changed;
use crate::listener::{BoundPort, ListenerDeps};
use crate::server::config::ConfiguredListener;
use crate::startup::{Prepared, StartupErrorCollector, StartupErrors};
use tunnel_base::drain::Drain;

/// The open listeners for clients.
#[derive(derive_more::Debug)]
#[debug("OpenListeners({} open)", open.len())]
pub(crate) struct OpenListeners {
    /// What they share.
    pub(crate) deps: ListenerDeps,
    pub(crate) policies: AccessPolicies,
    pub(crate) tls: Tls,
    /// The other ports of the server, each with its key.
    pub(crate) other_ports: Vec<(String, SocketAddr)>,
    pub(crate) open: Vec<OpenListener>,
}

/// A listener with bound ports, which serves no client yet.
pub(crate) struct PreparedListener {
    pub(crate) table: ConfiguredListener,
    /// The addresses that it requested, each with its key.
    requested: Vec<(String, SocketAddr)>,
    pub(crate) ports: Vec<BoundPort>,
}

pub(crate) struct OpenListener {
    table: ConfiguredListener,
    /// The addresses that it requested, each with its key.
    requested: Vec<(String, SocketAddr)>,
    /// Accepts no client once this drain starts. Its sessions continue.
    drain: Drain,
    /// Its accept loops, which own its ports.
    accepting: TaskTracker,
}

/// Reads the files of a listener and binds its ports. Notes all errors.
pub(crate) fn prepare(
    table: &ConfiguredListener,
    tls: &Tls,
    startup: &mut StartupErrorCollector,
) -> Prepared<PreparedListener> {
    let before = startup.ports().len();
    let ports = table.config.bind(tls, startup)?;
    let requested = startup.ports().iter().skip(before).cloned().collect();
    Ok(PreparedListener { table: table.clone(), requested, ports })
}

impl OpenListeners {
    /// Serves clients, by the policy of the table's key.
    pub(crate) fn serve(&mut self, prepared: PreparedListener) {
        let PreparedListener { table, requested, ports } = prepared;
        let (key, access) = table.config.access();
        let policy = self.policies.of(key);
        // Sessions from before are judged by what the new ports ask for.
        let asking = ports.iter().filter_map(|port| port.tls.clone());
        let asking: Vec<_> = asking.filter(|tls| tls.load().requests_certificates()).collect();
        let is_everywhere = asking.len() == ports.len();
        let certificates = asking.into_iter().next().map(|tls| CertificateRequest { tls, is_everywhere });
        policy.store(AccessPolicy { certificates, ..AccessPolicy::clone(&policy.load()) }.into());
        let drain = self.deps.context.drain.child();
        let accepting = TaskTracker::new();
        let listener = table.kind.name;
        let context = ListenerContext { listener, policy, drain: drain.clone(), ..self.deps.context.clone() };
        let proxies = access.proxy_protocol.clone();
        let deps = ListenerDeps { context, proxies, accepting: accepting.clone(), ..self.deps.clone() };
        log_open(listener, &ports);
        ports.into_iter().for_each(|port| (port.spawn)(&deps));
        self.open.push(OpenListener { table, requested, drain, accepting });
    }

    /// Reloads users files when they change.
    pub(crate) fn watch_users(&mut self) {
        self.policies.watch(&self.deps.files);
    }

    /// Opens the listeners that these tables add, and closes those that they no longer have. A listener with other
    /// settings closes and opens again. Not cancel safe.
    ///
    /// Returns the files that cannot be used, and the addresses that cannot be bound. Their listeners are as before, and
    /// all others are as these tables say.
    pub(crate) async fn apply(&mut self, tables: &[ConfiguredListener]) -> StartupErrors {
        // The plan: what opens, if its files can be used, and what closes because it is gone or opens again.
        let (opening, mut errors) = self.check(tables);
        let is_among = |all: &[ConfiguredListener], one: &OpenListener| {
            all.iter().any(|table| table.key() == one.table.key())
        };
        let closes = |one: &OpenListener| {
            one.table.kind.is_live() && (is_among(&opening, one) || !is_among(tables, one))
        };
        // Ports close first, because others may take them.
        let closing: Vec<_> = self.open.extract_if(.., |one| closes(one)).collect();
        for OpenListener { table, drain, accepting, .. } in &closing {
            drain.start();
            accepting.close();
            accepting.wait().await;
            info!(listener = table.kind.name, key = table.key(), "listener closed");
        }
        let mut changed: BTreeSet<_> = closing.iter().map(|one| one.table.key().to_owned()).collect();
        let mut failed = Vec::new();
        for table in &opening {
            match self.open(table) {
                Ok(()) => _ = changed.insert(table.key().to_owned()),
                Err(more) => {
                    errors.0.extend(more.0);
                    failed.push(table.key());
                }
            }
        }
        // Clients of a listener that cannot move keep their port.
        for OpenListener { table, .. } in closing.iter().filter(|one| failed.contains(&one.table.key())) {
            match self.open(table) {
                Ok(()) => _ = changed.remove(table.key()),
                Err(more) => errors.0.extend(more.0),
            }
        }
        self.watch_users();
        log_changed(&changed, "listeners reloaded");
        errors
    }

    /// Returns the tables that open, and the errors of those that cannot, as far as that is known while others have
    /// their ports.
    fn check(&mut self, tables: &[ConfiguredListener]) -> (Vec<ConfiguredListener>, StartupErrors) {
        let mut startup = StartupErrorCollector::checking();
        let kept = self.open.iter().filter(|one| tables.contains(&one.table) || !one.table.kind.is_live());
        startup.reserve_ports(self.other_ports.iter().chain(kept.flat_map(|one| &one.requested)));
        let new = tables
            .iter()
            .filter(|table| table.kind.is_live() && !self.open.iter().any(|one| one.table == **table));
        let is_usable = |table: &&ConfiguredListener| {
            let before = startup.errors();
            // The errors are in `startup`, and nothing is bound.
            let _ = prepare(table, &self.tls, &mut startup);
            // The error of a users file that cannot be read is noted where its policy is made.
            startup.errors() == before && !self.policies.of(table.key()).load().is_removed
        };
        let usable = new.filter(is_usable).cloned().collect();
        (usable, startup.into_errors())
    }

    fn open(&mut self, table: &ConfiguredListener) -> Result<(), StartupErrors> {
        let mut startup = StartupErrorCollector::default();
        let prepared = prepare(table, &self.tls, &mut startup);
        self.serve(startup.finish(prepared)?);
        Ok(())
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
