//! What a port behind TLS shows its clients, and asks of them: keys that the tables of several front ends have.

use std::path::PathBuf;

use crate::config::fold::{Report, Table};
use crate::config::value;

/// The files of a port behind TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificates {
    /// The table in which they are named.
    pub table: String,
    /// PEM file of the certificate, own first.
    pub cert: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
    /// PEM file of the authority that signs clients' certificates; `None`: none is asked for.
    pub client_ca: Option<PathBuf>,
}

impl Certificates {
    /// Reads the keys. `files` are certificate and key by default, `older` their keys' older names.
    pub(super) fn read(
        table: &mut Table<'_>,
        files: [&str; 2],
        older: Option<[&'static str; 2]>,
        report: &mut Report,
    ) -> Self {
        let older = older.map_or([None; 2], |older| older.map(Some));
        let mut file = |key, older: Option<&'static str>, default: &str| {
            let path = table.read(key, value::path, report);
            let Some(older) = older else { return path.unwrap_or_else(|| default.into()) };
            let other = table.read(older, value::path, report);
            if table.has(key) && table.has(older) {
                let found = format!("{older} is given as well");
                table.complain(key, Some(found), format!("both name one file: keep {key}"), report);
            }
            path.or(other).unwrap_or_else(|| default.into())
        };
        Self {
            cert: file("cert", older[0], files[0]),
            key: file("key", older[1], files[1]),
            client_ca: table.read("client_ca", value::path, report),
            table: table.key(""),
        }
    }

    /// The whole key of one of the files.
    pub fn key(&self, file: &str) -> String {
        format!("{}{file}", self.table)
    }
}
