//! Stands for the intercept listener in a build without it.

use std::sync::Arc;

use crate::listener::{ListenerConfig, ListenerKind, ListenerTables};
use crate::parts;

pub(crate) const KIND: ListenerKind =
    ListenerKind { name: "intercept", about: "nothing: not compiled in", by_address: true, read };

/// Records an error if the table is present. Its keys are not checked.
fn read(tables: &mut ListenerTables<'_, '_>) -> Option<Arc<dyn ListenerConfig>> {
    let table = tables.server.table(KIND.name, tables.report);
    if let (true, Err(why)) = (table.is_present(), parts::INTERCEPT) {
        table.error("networks", None, why, tables.report);
    }
    None
}
