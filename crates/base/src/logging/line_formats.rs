//! The forms of log lines: flat JSON objects, and an escape of unprintable characters.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::{Event, Subscriber};
use tracing_log::NormalizeEvent as _;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use tunnel_proto::printable::is_printable;

/// Formats a line as one flat JSON object, if fields are formatted as JSON, too.
///
/// An inner span's field replaces that of an outer span, and the line's own field replaces both. A field with the name
/// of one that every line has begins with [`CLASH`].
pub(crate) struct FlatJson;

/// One line. Its first fields come before the others.
#[derive(Serialize)]
struct JsonLine<'a> {
    timestamp: String,
    level: &'a str,
    target: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Value>,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

/// The names of the fields of [`JsonLine`].
const RESERVED: [&str; 4] = ["timestamp", "level", "target", "message"];
/// Start of a field's name that would otherwise be one of [`RESERVED`].
const CLASH: &str = "field_";

impl<S, N> FormatEvent<S, N> for FlatJson
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let of_log = event.normalized_metadata();
        let metadata = of_log.as_ref().unwrap_or_else(|| event.metadata());
        let mut timestamp = String::new();
        let mut own = String::new();
        SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
        ctx.format_fields(Writer::new(&mut own), event)?;
        let mut own = parse(&own);
        let message = own.remove("message");
        let mut fields = Map::new();
        // From the outermost span inwards, and the event last: of equal names the value nearest to the event stays.
        for span in ctx.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(of_span) = span.extensions().get::<FormattedFields<N>>() {
                fields.extend(renamed(parse(of_span)));
            }
        }
        fields.extend(renamed(own));
        let line = JsonLine {
            timestamp,
            level: metadata.level().as_str(),
            target: metadata.target(),
            message,
            fields,
        };
        to.write_str(&serde_json::to_string(&line).map_err(|_| fmt::Error)?)?;
        to.write_char('\n')
    }
}

/// Returns the fields in a formatted text. It is JSON unless a value could not be formatted; such a text has no fields.
fn parse(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).unwrap_or_default()
}

fn renamed(fields: Map<String, Value>) -> impl Iterator<Item = (String, Value)> {
    fields.into_iter().map(|(name, value)| {
        let is_reserved = RESERVED.contains(&name.as_str());
        (if is_reserved { format!("{CLASH}{name}") } else { name }, value)
    })
}

/// A wrapper around another format that escapes unprintable characters in messages, fields and spans: a line stays one
/// line, and cannot control a terminal.
#[derive(Debug)]
pub(crate) struct EscapingFormat<F> {
    pub(crate) form: F,
    /// Whether escapes are JSON's; otherwise they are Rust's.
    pub(crate) json: bool,
}

impl<S, N, F> FormatEvent<S, N> for EscapingFormat<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = String::new();
        self.form.format_event(ctx, Writer::new(&mut line), event)?;
        let line = line.strip_suffix('\n').unwrap_or(&line);
        let mut rest = line;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| !is_printable(*c)) {
            let (plain, behind) = rest.split_at(at);
            to.write_str(plain)?;
            match (self.json, u32::from(c)) {
                (true, code) => write!(to, "\\u{code:04x}")?,
                (false, _) => write!(to, "{}", c.escape_debug())?,
            }
            rest = behind.get(c.len_utf8()..).unwrap_or_default();
        }
        to.write_str(rest)?;
        to.write_char('\n')
    }
}

#[cfg(test)]
mod tests {
    use tracing::field::Empty;
    use tracing::{debug_span, info, info_span, warn};

    use crate::logging::AUDIT;
    use crate::logging::tests::lines_of;

    use super::*;

    fn line_of(work: impl FnOnce()) -> Value {
        serde_json::from_str(&lines_of(true, work)).unwrap()
    }

    #[test]
    fn a_json_line_has_all_fields_at_its_top_level() {
        let text = lines_of(true, || {
            let outer = info_span!("link", node = "node1", session = Empty).entered();
            outer.record("session", 7);
            let _inner = debug_span!("hidden at this level", node = "node2").entered();
            let _inner = info_span!("session", client = %"10.0.0.1:5").entered();
            info!(target: AUDIT, bytes = 5_u64, is_new = true, seconds = 0.5, why = ?Some("x"), "link closed");
        });
        assert!(text.starts_with("{\"timestamp\":\"20"), "{text}");
        let mut line: Value = serde_json::from_str(&text).unwrap();
        let timestamp = line.as_object_mut().unwrap().remove("timestamp").unwrap();
        assert!(timestamp.as_str().unwrap().ends_with('Z'), "{timestamp}");
        let expected = serde_json::json!({
            "level": "INFO", "target": "tunnel::audit", "message": "link closed", "node": "node1", "session": 7,
            "client": "10.0.0.1:5", "bytes": 5, "is_new": true, "seconds": 0.5, "why": "Some(\"x\")",
        });
        assert_eq!(line, expected);
    }

    #[test]
    fn of_fields_with_one_name_the_innermost_is_kept_and_reserved_names_are_extended() {
        let line = line_of(|| {
            let _outer = info_span!("outer", a = 1, b = 1, c = 1, message = "of a span").entered();
            let _inner = info_span!("inner", b = 2, c = 2).entered();
            warn!(c = 3, target = "node1:22", level = 9, timestamp = "noon", "text");
        });
        assert_eq!([&line["a"], &line["b"], &line["c"]], [1, 2, 3]);
        assert_eq!([&line["level"], &line["message"]], ["WARN", "text"]);
        assert_eq!(line["target"], module_path!());
        assert_eq!([&line["field_target"], &line["field_timestamp"]], ["node1:22", "noon"]);
        assert_eq!((&line["field_level"], &line["field_message"]), (&9.into(), &"of a span".into()));
    }

    #[test]
    fn a_json_line_without_a_text_has_no_message() {
        let line = line_of(|| info!(a = 1));
        assert_eq!((line.get("message"), &line["a"]), (None, &1.into()));
    }
}
