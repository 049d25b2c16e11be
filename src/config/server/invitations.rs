//! `[mode.cloud.invitations]`: where pods keep who is invited and who has joined.

use std::path::PathBuf;

use toml::de::DeValue;

use crate::config::server::kubernetes::{self, ClusterSettings};
use crate::config::server::registry::{self, EtcdSettings};
use crate::config::table::ConfigTable;
use crate::config::value::{self, ValueError};
use crate::config::{Diagnostics, Environment};

/// What all pods of a cloud share of nodes that join by invitation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Invitations {
    /// In a file, on a disk that they share.
    File(PathBuf),
    /// In one key of etcd, which stands at the prefix.
    Etcd(EtcdSettings),
    /// In the Secret of this name.
    Secret(ClusterSettings, String),
}

/// The values of `store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InvitationStore {
    None,
    File,
    Etcd,
    Secret,
}

/// Reads the table; `None`: nobody joins by invitation.
pub(crate) fn read(
    cloud: &mut ConfigTable<'_>,
    env: &Environment,
    report: &mut Diagnostics,
) -> Option<Invitations> {
    let mut table = cloud.table("invitations", report);
    let kind = table.read("store", kind, report).unwrap_or(InvitationStore::None);
    let file = table.read("file", value::file_path, report);
    let etcd = registry::etcd(&mut table, kind == InvitationStore::Etcd, ETCD_PREFIX, report);
    let secret = table.read("secret", kubernetes::name, report).flatten();
    let store = match kind {
        InvitationStore::None => None,
        InvitationStore::File => {
            if !table.has("file") {
                table.error("file", None, "name a file on a disk that all pods share", report);
            }
            file.map(Invitations::File)
        }
        InvitationStore::Etcd => Some(Invitations::Etcd(etcd)),
        InvitationStore::Secret => match kubernetes::reached(env) {
            Ok(cluster) => Some(Invitations::Secret(cluster, secret.unwrap_or_else(|| SECRET.to_owned()))),
            Err(why) => {
                table.error("store", Some("asks for Kubernetes".to_owned()), why, report);
                None
            }
        },
    };
    table.finish(report);
    store
}

fn kind(value: &DeValue<'_>) -> Result<InvitationStore, ValueError> {
    match value::text(value)?.as_str() {
        "none" => Ok(InvitationStore::None),
        "file" => Ok(InvitationStore::File),
        "etcd" => Ok(InvitationStore::Etcd),
        "secret" => Ok(InvitationStore::Secret),
        _ => Err(value::wrong(value, "want \"none\", \"file\", \"etcd\" or \"secret\"")),
    }
}

/// Beside what CoreDNS reads.
const ETCD_PREFIX: &str = "/tunnel";

/// The Secret's name by default.
const SECRET: &str = "tunnel-invitations";
