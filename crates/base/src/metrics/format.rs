//! The two exposition formats: OpenMetrics, and the older one that every scraper can read.

use std::fmt::Write as _;

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

/// A text format in which metrics are returned to the scraper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// OpenMetrics 1.0.
    Open,
    /// Prometheus text format, version 0.0.4.
    Plain,
}

impl ExpositionFormat {
    /// Chooses the format by a scraper's `Accept` header: OpenMetrics if it is accepted and not weighted below plain
    /// text.
    pub fn from_accept(accept: &str) -> Self {
        let weight = |kind: &str| {
            let mut weights = accept.split(',').filter_map(|part| {
                let mut parts = part.split(';').map(str::trim);
                parts.next().filter(|found| found.eq_ignore_ascii_case(kind))?;
                let given = parts.find_map(|part| part.strip_prefix("q=")?.trim().parse::<f32>().ok());
                Some(given.unwrap_or(1.0))
            });
            weights.next()
        };
        match (weight("application/openmetrics-text"), weight("text/plain")) {
            (Some(open), plain) if open > 0.0 && open >= plain.unwrap_or(0.0) => Self::Open,
            _ => Self::Plain,
        }
    }

    /// Returns the content type.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Open => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Returns the text of these metrics.
    pub(crate) fn text(self, metrics: &Registry) -> String {
        let mut text = String::with_capacity(TEXT_BYTES);
        // Writing to a String fails only if a metric's own encoding fails; the text before it is still served.
        if encode(&mut text, metrics).is_err() {
            tracing::error!("cannot encode all metrics");
        }
        match self {
            Self::Open => text,
            Self::Plain => to_plain_format(&text),
        }
    }
}

/// Converts OpenMetrics text to the plain format: counters are named like their samples, and units and the end marker
/// are omitted.
fn to_plain_format(open: &str) -> String {
    let mut text = String::with_capacity(open.len());
    let mut help = None;
    for line in open.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            // HELP comes before TYPE, which alone decides whether the name needs a suffix.
            (Some("#"), Some("HELP"), Some(name), help_text) => {
                help = Some((name, help_text.unwrap_or_default()))
            }
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let suffix = if kind == "counter" { "_total" } else { "" };
                if let Some((_, help_text)) = help.take().filter(|(of, _)| *of == name) {
                    let _ = writeln!(text, "# HELP {name}{suffix} {help_text}");
                }
                let _ = writeln!(text, "# TYPE {name}{suffix} {kind}");
            }
            (Some("#"), ..) => {}
            _ => {
                let _ = writeln!(text, "{line}");
            }
        }
    }
    text
}

/// Initial capacity of the text in bytes, to avoid reallocations.
const TEXT_BYTES: usize = 8 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openmetrics_is_chosen_if_the_accept_header_prefers_it() {
        let prometheus =
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, form) in [
            (prometheus, ExpositionFormat::Open),
            ("application/openmetrics-text", ExpositionFormat::Open),
            ("Application/OpenMetrics-Text; version=0.0.1", ExpositionFormat::Open),
            ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;q=0.2", ExpositionFormat::Plain),
            ("application/openmetrics-text;q=0", ExpositionFormat::Plain),
            ("text/plain", ExpositionFormat::Plain),
            ("*/*", ExpositionFormat::Plain),
            ("", ExpositionFormat::Plain),
        ] {
            assert_eq!(ExpositionFormat::from_accept(accept), form, "{accept}");
        }
    }

    #[test]
    fn the_plain_format_names_counters_like_their_samples_and_omits_units() {
        let open = "# HELP a Ones.\n# TYPE a counter\na_total 1\n# HELP b_seconds Twos.\n# TYPE b_seconds histogram\n\
                    # UNIT b_seconds seconds\nb_seconds_sum 2.0\n# TYPE c gauge\nc{x=\"# y\"} 3\n# EOF\n";
        assert_eq!(
            to_plain_format(open),
            "# HELP a_total Ones.\n# TYPE a_total counter\na_total 1\n# HELP b_seconds Twos.\n\
             # TYPE b_seconds histogram\nb_seconds_sum 2.0\n# TYPE c gauge\nc{x=\"# y\"} 3\n"
        );
    }
}
