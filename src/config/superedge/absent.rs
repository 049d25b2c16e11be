//! Stands in for the translation of SuperEdge's files in a build without it: they are refused.

use toml::de::DeTable;

use crate::config::{Diagnostics, Environment, ParsedConfig};
use crate::parts;

/// Returns the file without SuperEdge's tables, which are an error.
pub(crate) fn translate<'t>(mut file: DeTable<'t>, _: &Environment, report: &mut Diagnostics) -> DeTable<'t> {
    if let (Some((mode, _)), Err(why)) = (file.remove_entry("mode"), parts::SUPEREDGE) {
        let found = Some("the table of SuperEdge's files".to_owned());
        report.place_fault(Some(mode.span().start), "mode", found, why);
    }
    file
}

/// Returns an error: this build cannot convert SuperEdge's files.
pub fn convert(text: &str) -> ParsedConfig<toml::Table> {
    let mut report = Diagnostics::default();
    if let Err(why) = parts::SUPEREDGE {
        report.place_fault(None, "mode", None, why);
    }
    report.finish(text, toml::Table::new())
}
