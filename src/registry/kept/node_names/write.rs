//! One look at what is to be written, and the write.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::PoisonError;

use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::api::PostParams;
use kube::{Api, Client, Error};
use tokio::time::timeout;
use tracing::{info, warn};

use super::lines::{self, Text, text};
use super::node::Seen;
use super::{NodeNameParams, NodeNames};
use crate::registry::cluster::{ClusterError, REQUEST_TIMEOUT};
use crate::registry::kept::lease::Term;

/// Why nothing is written any more in this term.
pub(super) enum Stopped {
    /// Somebody else has written.
    Fenced(String),
    /// It is to be tried again.
    Failed(ClusterError),
}

impl<E: Into<ClusterError>> From<E> for Stopped {
    fn from(cause: E) -> Self {
        Self::Failed(cause.into())
    }
}

impl NodeNames {
    /// Makes the ConfigMap say what is true now. `first`: it is to carry this term's number even if it is true already, so
    /// that no write of an earlier term comes through any more. Whether it was written.
    pub(super) async fn pass(
        &self,
        term: Term,
        nodes: &BTreeMap<String, Seen>,
        first: bool,
    ) -> Result<bool, Stopped> {
        let NodeNameParams { cluster, namespace, configmap, key, .. } = &self.params;
        let (client, home) = cluster.connect().await?;
        let service = self.look_up(&client, &home).await?;
        let holders = self.holders(&client, &home).await?;
        if service.is_empty() && nodes.values().any(|node| node.is_edge) {
            let why =
                format!("there is no Service {home}/{} that edges' names could lead to", self.params.service);
            return Err(ClusterError::Failed(why).into());
        }
        let Text { lines: text, left_out } = text(nodes, &self.params.names, &service, &holders, MOST_BYTES);
        self.tell(left_out);
        let api = Api::<ConfigMap>::namespaced(client, namespace);
        let found = api.get_opt(configmap).await?;
        let number = found.as_ref().and_then(number);
        if let Some(higher) = number.filter(|number| *number > term.number) {
            return Err(Stopped::Fenced(format!("term {higher} has written, and ours is {}", term.number)));
        }
        let is_true = found.as_ref().and_then(|map| map.data.as_ref()?.get(key)) == Some(&text);
        if is_true && !(first && number != Some(term.number)) {
            return Ok(false);
        }
        let (there, mut object) = (found.is_some(), found.unwrap_or_default());
        object.metadata.name = Some(configmap.clone());
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.insert(TERM.to_owned(), term.number.to_string());
        let lines = text.lines().count();
        object.data.get_or_insert_default().insert(key.clone(), text);
        let params = PostParams::default();
        let written = if there {
            api.replace(configmap, &params, &object).await
        } else {
            api.create(&params, &object).await
        };
        match written {
            Ok(_) => {
                info!(lines, term = term.number, "names of nodes are written");
                Ok(true)
            }
            Err(Error::Api(status)) if matches!(status.code, 404 | 409) => {
                Err(Stopped::Fenced(format!("somebody else has written: {}", status.message)))
            }
            Err(cause) => Err(cause.into()),
        }
    }

    /// Logs which Nodes have no name, each once for as long as it has none.
    fn tell(&self, left_out: BTreeMap<String, &'static str>) {
        let mut told = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        for (node, why) in left_out.iter().filter(|(node, why)| told.get(*node) != Some(*why)) {
            warn!(%node, "no name in DNS leads to node {node}: {why}");
        }
        *told = left_out;
    }

    pub(super) async fn look_up(
        &self,
        client: &Client,
        home: &str,
    ) -> Result<BTreeSet<IpAddr>, ClusterError> {
        let found = Api::<Service>::namespaced(client.clone(), home).get_opt(&self.params.service).await?;
        let ips = found.and_then(|service| service.spec?.cluster_ips).unwrap_or_default();
        let ips: BTreeSet<IpAddr> = ips.iter().filter_map(|ip| ip.parse().ok()).collect();
        self.service.send_if_modified(|old| {
            let news = *old != ips;
            old.clone_from(&ips);
            news
        });
        Ok(ips)
    }

    /// The pods that have edges, by the edges' names.
    async fn holders(
        &self,
        client: &Client,
        home: &str,
    ) -> Result<BTreeMap<String, BTreeSet<IpAddr>>, ClusterError> {
        let Some(name) = &self.params.holders else { return Ok(BTreeMap::new()) };
        let found = Api::<ConfigMap>::namespaced(client.clone(), home).get_opt(name).await?;
        let text = found.and_then(|map| map.data?.remove(HOSTS_KEY)).unwrap_or_default();
        Ok(lines::holders(&text))
    }

    /// The number of the term that has written last; 0 if none has.
    pub(super) async fn written_term(&self) -> Result<i32, ClusterError> {
        let NodeNameParams { cluster, namespace, configmap, .. } = &self.params;
        let asked = timeout(REQUEST_TIMEOUT, async {
            let (client, _) = cluster.connect().await?;
            let found = Api::<ConfigMap>::namespaced(client, namespace).get_opt(configmap).await?;
            Ok(found.as_ref().and_then(number).unwrap_or_default())
        });
        asked.await.unwrap_or(Err(ClusterError::Silent))
    }
}

fn number(map: &ConfigMap) -> Option<i32> {
    map.metadata.annotations.as_ref()?.get(TERM)?.parse().ok()
}

/// The annotation with the number of the term that has written.
const TERM: &str = "tunnel.cloud.io/lease-transitions";

/// The key in which pods publish which nodes they have.
const HOSTS_KEY: &str = "hosts";

/// What Kubernetes takes in one ConfigMap, less what surrounds the text.
const MOST_BYTES: usize = 1_000_000;
