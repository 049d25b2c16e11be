//! Config of a server, read from the table `server`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::access::{AccessConfig, PasswordFile};
use crate::config::admin_listener::{self, AdminConfig};
use crate::config::kubernetes::node_names::{self, NodeNameSettings};
use crate::config::kubernetes::ports::{self, NodePortsConfig};
use crate::config::kubernetes::{self, ServerCsrConfig, ServiceAccountConfig};
use crate::config::listen_tls::{ListenerTlsConfig, Tls};
use crate::config::plan::{ConfigPlan, add};
use crate::config::server::addresses::{self, AddressSettings};
use crate::config::server::clients::{self, UserAccessConfig};
use crate::config::server::invitations::{self, InvitationConfig, InvitationStoreKind};
use crate::config::server::peers::{self, PeerConfig};
use crate::config::server::registry::{DnsConfig, EtcdSettings, PublishTo};
use crate::config::server::{self, DirectConfig, EdgeAccessConfig, LinkListenerConfig, SessionConfig};
use crate::config::table::{ConfigTableReader, read_file};
use crate::config::{self, ConfigErrors, Environment, ParsedConfig, Warning};
use crate::listener::{LISTENERS, ListenerConfig, ListenerKind, http, https};
use crate::startup::tls_files::FileKind;
use tunnel_base::policy::ports::PortTarget;

/// The validated config of a server: the tables below `[server]`, and values of the environment.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The listener for links of edges, and those for operators.
    pub links: LinkListenerConfig,
    /// Versions and cipher suites of TLS at the server's ports.
    pub tls: Tls,
    /// The access of users' programs that link to this server.
    pub clients: UserAccessConfig,
    /// The configured listeners for clients.
    pub(crate) listeners: Vec<ConfiguredListener>,
    /// The ConfigMap of named node ports; `None` disables it.
    pub ports: Option<NodePortsConfig>,
    /// The ConfigMap from which DNS reads the addresses of all nodes; `None` disables it.
    pub node_names: Option<NodeNameSettings>,
    /// The socket for commands on this machine.
    pub admin: AdminConfig,
    /// Limits of sessions.
    pub session: SessionConfig,
    /// Where this server publishes its nodes.
    pub dns: DnsConfig,
    /// Where its peers are.
    pub peers: PeerConfig,
    /// The store of invitations.
    pub invitations: InvitationConfig,
    /// The certificates that the cluster's signers issue for this server; `None` requests none.
    pub csr: Option<ServerCsrConfig>,
    /// The ServiceAccount whose tokens prove edges; `None` accepts none.
    pub service_account: Option<ServiceAccountConfig>,
    /// How clients may address a target other than by its node's name.
    pub addresses: AddressSettings,
    /// The targets that this server dials itself for its clients.
    pub direct: DirectConfig,
    /// What edges may reach through this server.
    pub edge_access: EdgeAccessConfig,
    /// `POD_NAME`, a label of the metrics; may be empty.
    pub pod_name: String,
    /// `POD_NAMESPACE`, a label of the metrics; may be empty.
    pub pod_namespace: String,
    /// `POD_IP`: where clients and peers reach this server. Set if records are published or Kubernetes is queried.
    pub pod_ip: Option<IpAddr>,
}

/// The table of a listener for clients. Equal tables differ at most in keys that change while the listener is open.
#[derive(Debug, Clone)]
pub(crate) struct ConfiguredListener {
    pub(crate) kind: &'static ListenerKind,
    pub(crate) config: Arc<dyn ListenerConfig>,
    /// Its values in effect, except of keys that change while the listener is open.
    pub(crate) values: toml::Table,
}

impl ConfiguredListener {
    /// Reads the values of a table that was just read.
    fn new(
        kind: &'static ListenerKind,
        config: Arc<dyn ListenerConfig>,
        file: &ConfigTableReader<'_>,
    ) -> Self {
        let mut values = file.report().effective.get(config.access().0).cloned().unwrap_or_default();
        for key in AccessConfig::LIVE_KEYS {
            values.remove(key);
        }
        Self { kind, config, values }
    }

    /// Returns the full key of the table.
    pub(crate) fn key(&self) -> &str {
        self.config.access().0
    }
}

impl PartialEq for ConfiguredListener {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key() && self.values == other.values
    }
}

impl ServerConfig {
    /// Reads a server's config.
    ///
    /// # Errors
    ///
    /// Returns all errors in the text.
    pub fn read(text: &str, env: &Environment) -> Result<(Self, Vec<Warning>), ConfigErrors> {
        Self::examine(text, env).whole()
    }

    /// Like [`Self::read`], but also returns a config that has errors, for further checks.
    pub fn examine(text: &str, env: &Environment) -> ParsedConfig<Self> {
        read_file(text, env, Self::gather)
    }

    pub(crate) fn gather(file: &mut ConfigTableReader<'_>) -> Self {
        let env = file.env;
        let mut table = file.table("server");
        config::other_role(file, &table, "edge");
        let links = server::links(&mut table);
        let clients = clients::read(&mut table);
        let mut inherited = AccessConfig::default();
        let mut listeners = Vec::new();
        for kind in LISTENERS {
            for config in (kind.read)(table.table(kind.name), &mut inherited) {
                listeners.push(ConfiguredListener::new(kind, config, file));
            }
        }
        let (dns, peers) = peers::read(&mut table);
        // A port that forwards to the port of a request's Host.
        let by_host = |kind: &str| {
            let listener = listeners.iter().find(|listener| listener.kind.name == kind)?;
            let mut ports = listener.config.node_ports().into_iter();
            ports.find(|port| port.stands_for == PortTarget::Host).map(|port| port.at.port())
        };
        let http = by_host(http::KIND.name);
        let https = by_host(https::KIND.name);
        let by_address = LISTENERS.iter().any(|kind| kind.by_address && table.has(kind.name));
        let ports = ("links.admin_listen", &links.ports);
        let published = (dns.publish == PublishTo::ConfigMap).then_some(&dns.configmap);
        let settings = Self {
            admin: admin_listener::admin(&mut table, "server", ports),
            links,
            clients,
            tls: table.settings("tls"),
            ports: ports::node_ports(&mut table, http, https),
            listeners,
            session: server::session(&mut table),
            node_names: node_names::node_names(&mut table, published, &dns.zone),
            dns,
            peers,
            invitations: invitations::read(&mut table),
            csr: kubernetes::csr(&mut table),
            service_account: kubernetes::service_account(&mut table),
            direct: table.settings("direct"),
            edge_access: server::edge_access(&mut table),
            pod_name: env.pod_name.clone().unwrap_or_default(),
            pod_namespace: env.pod_namespace.clone().unwrap_or_default(),
            pod_ip: config::address(file, "POD_IP", env.pod_ip.as_deref()),
            addresses: addresses::read(&mut table, by_address),
        };
        // At the end, when a key that nothing has read is an unknown one.
        table.finish();
        settings
    }

    /// Returns what a reload of another config does.
    pub fn plan(&self, new: &Self) -> ConfigPlan {
        // All fields, so that a new one has its place here.
        let Self {
            links,
            tls,
            clients,
            listeners,
            ports,
            node_names,
            admin,
            session,
            dns,
            peers,
            invitations,
            csr,
            service_account,
            addresses,
            direct,
            edge_access,
            pod_name: _,
            pod_namespace: _,
            pod_ip: _,
        } = self;
        let mut plan = ConfigPlan::default();
        // A change of rights closes no listener: open sessions are judged again, and only those without a right end.
        plan.judge(&self.access(), &new.access());
        let users = |clients: &UserAccessConfig| (clients.access.bounds.clone(), clients.client_ca.clone());
        add(&mut plan.judges, users(clients) != users(&new.clients), clients::TABLE);
        add(&mut plan.judges, *edge_access != new.edge_access, "server.edge_access");
        add(&mut plan.judges, *direct != new.direct, "server.direct");
        // By key: other settings at the same key are one listener that opens again, instead of one that goes and one
        // that comes.
        for one in listeners.iter().chain(&new.listeners) {
            let key = one.key();
            let [old, new] =
                [listeners, &new.listeners].map(|all| all.iter().find(|other| other.key() == key));
            if one.kind.is_live() {
                plan.follow(key, &old, &new, &None);
            } else {
                add(&mut plan.restart, old != new, key);
            }
        }
        // A first store opens. Another one would be without those that have joined.
        let is_first = invitations.store == InvitationStoreKind::None;
        let keys = if is_first { &mut plan.opens } else { &mut plan.restart };
        add(keys, *invitations != new.invitations, "server.invitations");
        let absent = Self::examine("", &Environment::default()).settings;
        plan.follow("server.node_ports", ports, &new.ports, &None);
        plan.follow("server.node_names", node_names, &new.node_names, &None);
        plan.follow("server.csr", csr, &new.csr, &None);
        plan.follow("server.service_account", service_account, &new.service_account, &None);
        plan.follow("server.addresses", addresses, &new.addresses, &absent.addresses);
        plan.follow("server.dns", dns, &new.dns, &absent.dns);
        // What [server.dns] implies is not a change of this table.
        let named = |peers: &PeerConfig| PeerConfig { several: false, cluster: None, ..peers.clone() };
        plan.follow("server.peers", &named(peers), &named(&new.peers), &absent.peers);
        // Everything else is read at the start only. The plan names it, so that no operator waits for an effect.
        for (differs, key) in [
            (*links != new.links, "server.links"),
            (*tls != new.tls, "server.tls"),
            (admin.at_start() != new.admin.at_start(), ADMIN),
            (*session != new.session, "server.session"),
        ] {
            add(&mut plan.restart, differs, key);
        }
        plan
    }

    /// Returns the access rules of each listener and of users' links, by the key of the table.
    pub(crate) fn access(&self) -> Vec<(&str, &AccessConfig)> {
        let listeners = self.listeners.iter().map(|listener| listener.config.access());
        listeners.chain([(clients::TABLE, &self.clients.access), (ADMIN, &self.admin.access)]).collect()
    }

    /// Returns the files of this kind that listeners read, each with its key.
    fn listener_files(&self, kind: FileKind) -> impl Iterator<Item = (String, PathBuf)> {
        let admin = self.admin.tls.iter().flat_map(ListenerTlsConfig::files);
        let files = self.listeners.iter().flat_map(|listener| listener.config.files()).chain(admin);
        files.filter(move |file| file.kind == kind).map(|file| (file.key, file.path))
    }

    /// Returns the files that contain secrets, each with its key.
    pub fn secrets(&self) -> Vec<(String, PathBuf)> {
        let mut all = vec![
            ("server.links.key".to_owned(), self.links.key.to_path_buf()),
            ("server.links.token_file".to_owned(), self.links.token_file.to_path_buf()),
        ];
        for (_, access) in self.access() {
            // A file that several tables inherit from one is listed once.
            if let Some(PasswordFile { users, key }) = &access.auth
                && !all.iter().any(|(known, _)| known == key)
            {
                all.push((key.clone(), users.to_path_buf()));
            }
        }
        all.extend(self.listener_files(FileKind::PrivateKey));
        for (table, etcd) in self.etcds() {
            for (key, file) in [("key", &etcd.key), ("password_file", &etcd.password_file)] {
                all.extend(file.iter().map(|file| (format!("{table}.etcd.{key}"), file.to_path_buf())));
            }
        }
        let invitations =
            self.invitations.file.iter().filter(|_| self.invitations.store == InvitationStoreKind::File);
        all.extend(invitations.map(|file| ("server.invitations.file".to_owned(), file.to_path_buf())));
        all
    }

    /// Returns each etcd in use, with the table that configures it.
    pub fn etcds(&self) -> impl Iterator<Item = (&'static str, &EtcdSettings)> {
        let publish = (self.dns.publish == PublishTo::Etcd).then_some(("server.dns", &self.dns.etcd));
        let invitations = (self.invitations.store == InvitationStoreKind::Etcd)
            .then_some(("server.invitations", &self.invitations.etcd));
        publish.into_iter().chain(invitations)
    }

    /// Returns the files of certificates that this server presents, each with its key.
    pub fn certificates(&self) -> Vec<(String, PathBuf)> {
        let to_targets = self.listener_files(FileKind::ClientCertificate);
        self.server_certificates().into_iter().chain(to_targets).collect()
    }

    /// Returns those that it presents as a server: to edges, peers and clients.
    pub fn server_certificates(&self) -> Vec<(String, PathBuf)> {
        let links = ("server.links.cert".to_owned(), self.links.cert.to_path_buf());
        [links].into_iter().chain(self.listener_files(FileKind::ServerCertificate)).collect()
    }

    /// Returns the CA files that this server trusts, each with its key.
    pub fn ca_files(&self) -> Vec<(String, PathBuf)> {
        let links = ("server.links.peer_ca".to_owned(), self.links.peer_ca.to_path_buf());
        let users = self.clients.client_ca.clone().map(|ca| (format!("{}.client_ca", clients::TABLE), ca.0));
        [links].into_iter().chain(users).chain(self.listener_files(FileKind::Ca)).collect()
    }
}

/// The table of operators' access.
pub(crate) const ADMIN: &str = "server.admin";
