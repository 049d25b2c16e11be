//! The table `mode.edge.https`: TLS towards targets.

use std::path::PathBuf;

use crate::config::fold::{Report, Table};
use crate::config::value;

/// `[mode.edge.https]`: TLS towards the targets of the cloud's HTTPS ports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Https {
    /// PEM files of the certificate that targets are shown, and of its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// PEM file of the authorities that may sign a target's certificate; `None`: only targets on loopback are believed.
    pub ca: Option<PathBuf>,
}

/// Reads the table.
pub(super) fn read(edge: &mut Table<'_>, report: &mut Report) -> Https {
    let mut table = edge.table("https", report);
    let cert = table.read("cert", value::path, report);
    let key = table.read("key", value::path, report);
    for (given, other) in [("cert", "key"), ("key", "cert")] {
        if table.has(given) && !table.has(other) {
            table.complain(other, None, "a certificate and its key go together: name both files", report);
        }
    }
    let ca = table.read("ca", value::path, report);
    table.finish(report);
    Https { identity: cert.zip(key), ca }
}
