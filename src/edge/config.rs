//! Config of an edge, read from the table `edge`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::config::access::AccessConfig;
use crate::config::admin_listener::{self, AdminConfig};
use crate::config::edge::csr::{self, EdgeCsrConfig};
use crate::config::edge::{self, AllowConfig, EdgeSessionConfig, TargetTlsConfig, UplinkConfig};
use crate::config::plan::{ConfigPlan, add};
use crate::config::table::{ConfigTableReader, read_file};
use crate::config::{self, ConfigErrors, Environment, ParsedConfig, Warning};
use crate::edge::http_proxy::{self, EdgeProxyConfig};

/// The validated config of an edge: the tables below `[edge]`, and values of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeConfig {
    /// The servers to dial, and this edge's identity.
    pub uplink: UplinkConfig,
    /// The socket for commands on this machine.
    pub admin: AdminConfig,
    /// Limits of sessions.
    pub session: EdgeSessionConfig,
    /// The targets that this edge may dial.
    pub allow: AllowConfig,
    /// TLS to targets.
    pub target_tls: TargetTlsConfig,
    /// The proxy for programs on this node; `None` disables it.
    pub http_proxy: Option<EdgeProxyConfig>,
    /// The certificate that identifies this edge in addition to its token; `None` if it has none.
    pub csr: Option<EdgeCsrConfig>,
    /// `NODE_IP` and `POD_IP`: addresses of this machine in addition to those of its interfaces.
    pub own: Vec<IpAddr>,
    /// Whether the config file is bad, and this is its last good copy.
    pub is_last_good: bool,
}

impl EdgeConfig {
    /// Reads an edge's config.
    ///
    /// # Errors
    ///
    /// Returns all errors in the text and the environment.
    pub fn read(text: &str, env: &Environment) -> Result<(Self, Vec<Warning>), ConfigErrors> {
        Self::examine(text, env).whole()
    }

    /// Like [`Self::read`], but also returns a config that has errors, for further checks.
    pub fn examine(text: &str, env: &Environment) -> ParsedConfig<Self> {
        read_file(text, env, Self::gather)
    }

    /// Returns what a reload of another config does.
    pub fn plan(&self, new: &Self) -> ConfigPlan {
        // All fields, so that a new one has its place here.
        let Self { uplink, admin, session, allow, target_tls, http_proxy, csr, own: _, is_last_good: _ } =
            self;
        let mut plan = ConfigPlan::default();
        plan.judge(&self.access(), &new.access());
        add(&mut plan.judges, *allow != new.allow, "edge.allow");
        let ports = [http_proxy, &new.http_proxy].map(|proxy| proxy.as_ref().map(|proxy| proxy.of_port()));
        plan.follow(http_proxy::KEY, &ports[0], &ports[1], &None);
        for (differs, key) in [
            (*uplink != new.uplink, "edge.uplink"),
            (admin.at_start() != new.admin.at_start(), ADMIN),
            (*session != new.session, "edge.session"),
            (*target_tls != new.target_tls, "edge.target_tls"),
            (*csr != new.csr, "edge.csr"),
        ] {
            add(&mut plan.restart, differs, key);
        }
        plan
    }

    /// Returns the access rules of the proxy and of operators, by the key of the table.
    pub(crate) fn access(&self) -> Vec<(&str, &AccessConfig)> {
        let proxy = self.http_proxy.iter().map(|proxy| (http_proxy::KEY, &proxy.access));
        proxy.chain([(ADMIN, &self.admin.access)]).collect()
    }

    /// Returns the files that contain secrets, each with its key. `config` is the path of the config file.
    pub fn secrets(&self, config: &Path) -> Vec<(String, PathBuf)> {
        let UplinkConfig { token, token_file, .. } = &self.uplink;
        let token = token.iter().map(|_| ("edge.uplink.token", config));
        let files = [
            ("edge.uplink.token_file", token_file),
            ("edge.target_tls.key", &self.target_tls.key),
            ("edge.admin.users", &self.admin.users),
            ("edge.admin.key", &self.admin.tls.as_ref().map(|tls| tls.key.clone())),
        ];
        let files = files.into_iter().filter_map(|(key, file)| Some((key, file.as_deref()?)));
        let proxy = self.http_proxy.iter().filter_map(|proxy| proxy.access.auth.as_ref());
        let proxy = proxy.map(|auth| ("edge.http_proxy.users", &*auth.users));
        let all = token.chain(files).chain(proxy);
        all.map(|(key, path)| (key.to_owned(), path.to_owned())).collect()
    }

    /// Returns the files of certificates that this edge presents, each with its key.
    pub(crate) fn certificates(&self) -> Vec<(String, PathBuf)> {
        let to_targets = self.target_tls.cert.iter().map(|cert| ("edge.target_tls.cert".to_owned(), cert));
        let to_operators = self.admin.tls.iter().map(|tls| (tls.key("cert"), &tls.cert));
        to_targets.chain(to_operators).map(|(key, file)| (key, file.to_path_buf())).collect()
    }

    /// Returns the CA files that this edge trusts, each with its key.
    pub(crate) fn ca_files(&self) -> Vec<(String, PathBuf)> {
        let operators =
            self.admin.tls.iter().filter_map(|tls| Some((tls.key("client_ca"), tls.client_ca.clone()?.0)));
        [("edge.uplink.ca".to_owned(), self.uplink.ca.to_path_buf())].into_iter().chain(operators).collect()
    }

    pub(crate) fn gather(file: &mut ConfigTableReader<'_>) -> Self {
        let env = file.env;
        let mut table = file.table("edge");
        config::other_role(file, &table, "server");
        let node_ip = config::address(file, "NODE_IP", env.node_ip.as_deref());
        let csr = csr::csr(&mut table, node_ip);
        let uplink = edge::uplink(&mut table, csr.is_some());
        let ports = ("uplink.admin_listen", &uplink.ports);
        let admin = admin_listener::admin(&mut table, "edge", ports);
        let session = table.settings("session");
        let allow = table.settings("allow");
        let pod_ip = config::address(file, "POD_IP", env.pod_ip.as_deref());
        let target_tls = edge::target_tls(&mut table);
        let http_proxy = http_proxy::read(&mut table);
        table.finish();
        let own = node_ip.into_iter().chain(pod_ip).collect();
        Self { uplink, admin, session, allow, target_tls, http_proxy, csr, own, is_last_good: false }
    }
}

/// The table of operators' access.
pub(crate) const ADMIN: &str = "edge.admin";
