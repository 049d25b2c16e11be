//! Keys of SuperEdge's files that are known but not served yet: no fault, but one warning each.

use super::fold::{Report, Table};
use super::{Concern, value};

/// The debugging service of gRPC; an empty address turns it off.
pub(super) fn channelz(table: &mut Table<'_>, report: &mut Report) {
    if table.read("channelz_addr", value::text, report).is_some_and(|addr| !addr.is_empty()) {
        warn(table, "channelz_addr", report);
    }
}

/// Warns of a key that is not served yet.
pub(super) fn warn(parent: &Table<'_>, name: &str, report: &mut Report) {
    let text = "SuperEdge's key is understood, but what it asks for is not served yet: it is left out";
    report.warn(parent.key(name), Concern::NotServed, text);
}
