//! Keys of SuperEdge's files that are known but not served yet: no fault, but one warning each.

use super::Concern;
use super::fold::{Report, Table};

/// Warns of a key that is not served yet.
pub(super) fn warn(parent: &Table<'_>, name: &str, report: &mut Report) {
    let text = "SuperEdge's key is understood, but what it asks for is not served yet: it is left out";
    report.warn(parent.key(name), Concern::NotServed, text);
}
