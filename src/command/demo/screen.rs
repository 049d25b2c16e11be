//! What the demo prints on stderr.

use std::io::{IsTerminal as _, Write as _};

use tokio::time::Instant;

use super::{LENGTH, MIB};

/// The lines of the demo, and under them a progress bar if stderr is a terminal.
#[derive(Debug, Clone, Copy)]
pub(super) struct DemoScreen {
    started: Instant,
    is_terminal: bool,
    has_colours: bool,
}

impl DemoScreen {
    pub(super) fn new() -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        // https://no-color.org
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { started: Instant::now(), is_terminal, has_colours: is_terminal && !no_color }
    }

    /// Prints a line instead of the progress bar, with its colours if stderr is a terminal.
    pub(super) fn line(&self, text: &str) {
        let clear = if self.is_terminal { CLEAR } else { "" };
        let codes: &[_] = if self.has_colours { &[] } else { &[RED, GREEN, NO_COLOUR] };
        let text = codes.iter().fold(text.to_owned(), |text, code| text.replace(code, ""));
        // The demo continues without a terminal.
        let _ = writeln!(std::io::stderr(), "{clear}{text}");
    }

    /// Prints a line with the time since the demo's start.
    pub(super) fn step(&self, text: &str) {
        self.timed(self.started, text);
    }

    /// Prints a line with the time since `started`.
    pub(super) fn timed(&self, started: Instant, text: &str) {
        let time = format!("{:.1?}", started.elapsed());
        self.line(&format!("{time:>7} {text}"));
    }

    /// Draws the progress of the download. Without a terminal it prints a line for each tenth of it.
    pub(super) fn progress(&self, done: usize, before: usize) {
        if self.is_terminal && done / MIB > before / MIB {
            let filled = done * BAR_WIDTH / LENGTH;
            let bar = "#".repeat(filled) + &".".repeat(BAR_WIDTH - filled);
            let text = format!("        [{bar}] {} of {} MiB", done / MIB, LENGTH / MIB);
            let _ = write!(std::io::stderr(), "{CLEAR}{text}");
        } else if !self.is_terminal && done * 10 / LENGTH > before * 10 / LENGTH {
            self.step(&format!("{} %", done * 10 / LENGTH * 10));
        }
    }
}

/// Colours of a terminal's text (ECMA-48, SGR): of an interruption, of its end, and none.
pub(super) const RED: &str = "\x1b[31m";
pub(super) const GREEN: &str = "\x1b[32m";
pub(super) const NO_COLOUR: &str = "\x1b[0m";
/// Clears the line of a terminal.
const CLEAR: &str = "\r\x1b[K";
/// Width of the progress bar.
const BAR_WIDTH: usize = 40;
