//! `[mode.cloud.invitations]`: where pods keep who is invited and who has joined.

use std::path::PathBuf;

use toml::de::DeValue;

use crate::config::server::kubernetes::{self, ClusterSettings};
use crate::config::server::registry::{self, EtcdSettings};
use crate::config::table::Table;
use crate::config::value::{self, Wrong};
use crate::config::{Environment, Report};

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
enum Kind {
    None,
    File,
    Etcd,
    Secret,
}

/// Reads the table; `None`: nobody joins by invitation.
pub(crate) fn read(cloud: &mut Table<'_>, env: &Environment, report: &mut Report) -> Option<Invitations> {
    let mut table = cloud.table("invitations", report);
    let kind = table.read("store", kind, report).unwrap_or(Kind::None);
    let file = table.read("file", value::file_path, report);
    let etcd = registry::etcd(&mut table, kind == Kind::Etcd, ETCD_PREFIX, report);
    let secret = table.read("secret", kubernetes::name, report).flatten();
    let store = match kind {
        Kind::None => None,
        Kind::File => {
            if !table.has("file") {
                table.complain("file", None, "name a file on a disk that all pods share", report);
            }
            file.map(Invitations::File)
        }
        Kind::Etcd => Some(Invitations::Etcd(etcd)),
        Kind::Secret => match kubernetes::reached(env) {
            Ok(cluster) => Some(Invitations::Secret(cluster, secret.unwrap_or_else(|| SECRET.to_owned()))),
            Err(why) => {
                table.complain("store", Some("asks for Kubernetes".to_owned()), why, report);
                None
            }
        },
    };
    table.finish(report);
    store
}

fn kind(value: &DeValue<'_>) -> Result<Kind, Wrong> {
    match value::text(value)?.as_str() {
        "none" => Ok(Kind::None),
        "file" => Ok(Kind::File),
        "etcd" => Ok(Kind::Etcd),
        "secret" => Ok(Kind::Secret),
        _ => Err(value::wrong(value, "want \"none\", \"file\", \"etcd\" or \"secret\"")),
    }
}

/// Beside what CoreDNS reads.
const ETCD_PREFIX: &str = "/tunnel";

/// The Secret's name by default.
const SECRET: &str = "tunnel-invitations";
