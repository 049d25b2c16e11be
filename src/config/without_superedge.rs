//! What reads a file instead of `superedge` in a build without it: SuperEdge's table is an error.

use toml::de::DeTable;

use crate::config::Environment;
use crate::config::diagnostics::ConfigDiagnostics;
use crate::parts;

pub(crate) fn translate<'t>(
    mut file: DeTable<'t>,
    _: &Environment,
    report: &mut ConfigDiagnostics,
) -> DeTable<'t> {
    if let (Some((mode, _)), Err(why)) = (file.remove_entry("mode"), parts::SUPEREDGE) {
        let found = Some("the table of SuperEdge's files".to_owned());
        report.place_error(Some(mode.span().start), "mode", found, why);
    }
    file
}
