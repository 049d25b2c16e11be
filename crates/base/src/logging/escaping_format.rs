//! Escapes unprintable characters: a log line stays one line and cannot control a terminal.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use tunnel_proto::printable::is_printable;

/// A wrapper around another format that escapes unprintable characters in messages, fields and spans.
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
