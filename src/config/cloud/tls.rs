//! The table `mode.cloud.tls`: versions and cipher suites of TLS at a pod's own ports.

use crate::config::fold::{Report, Table};
use crate::config::{Concern, value};

/// `[mode.cloud.tls]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The oldest version that is accepted.
    pub min_version: TlsVersion,
    /// Go's names of cipher suites for TLS 1.2; empty: all that are sound.
    pub cipher_suites: Vec<String>,
}

/// A version of TLS that we accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsVersion {
    /// TLS 1.2.
    V12,
    /// TLS 1.3.
    V13,
}

/// Reads the table.
pub(super) fn read(cloud: &mut Table<'_>, report: &mut Report) -> Tls {
    let mut table = cloud.table("tls", report);
    let min_version = table.read(
        "tls_min_version",
        |value| match value::text(value)?.as_str() {
            "" | "VersionTLS12" => Ok((TlsVersion::V12, None)),
            "VersionTLS13" => Ok((TlsVersion::V13, None)),
            old @ ("VersionTLS10" | "VersionTLS11") => Ok((TlsVersion::V12, Some(old.to_owned()))),
            _ => Err(value::wrong(value, "want VersionTLS12 or VersionTLS13")),
        },
        report,
    );
    if let Some((_, Some(old))) = &min_version {
        let text = format!("{old} is broken and not spoken: the oldest version is TLS 1.2");
        report.warn(table.key("tls_min_version"), Concern::Surprise, text);
    }
    let suites = table.read("tls_cipher_suites", value::text, report).unwrap_or_default();
    let names = suites.split(',').map(str::trim).filter(|name| !name.is_empty());
    let tls = Tls {
        min_version: min_version.map_or(TlsVersion::V12, |(version, _)| version),
        cipher_suites: names.map(str::to_owned).collect(),
    };
    table.finish(report);
    tls
}
