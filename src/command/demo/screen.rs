//! What the demo prints on stderr.

use std::io::{IsTerminal as _, Write as _};

use tokio::time::Instant;

use super::page::{LENGTH, MIB};

/// The lines of the demo, and under them a progress bar if stderr is a terminal.
#[derive(Debug)]
pub(crate) struct DemoScreen {
    started: Instant,
    has_bar: bool,
    is_terminal: bool,
    has_colours: bool,
}

impl DemoScreen {
    pub(crate) fn new() -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        // https://no-color.org
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { started: Instant::now(), has_bar: false, is_terminal, has_colours: is_terminal && !no_color }
    }

    /// Prints a line.
    pub(crate) fn line(&mut self, text: &str) {
        let clear = if std::mem::take(&mut self.has_bar) { "\r\x1b[K" } else { "" };
        // The demo continues without a terminal.
        let _ = writeln!(std::io::stderr(), "{clear}{text}");
    }

    /// Prints a line with the time since the demo's start.
    pub(crate) fn step(&mut self, text: &str) {
        let time = elapsed_text(self.started);
        self.line(&format!("{time:>7} {text}"));
    }

    /// Like [`DemoScreen::step`], on a terminal in that colour: [`RED`] for an interruption, [`GREEN`] for its end.
    pub(crate) fn coloured_step(&mut self, colour: &str, text: &str) {
        if self.has_colours {
            self.step(&format!("{colour}{text}{NO_COLOUR}"));
        } else {
            self.step(text);
        }
    }

    /// Draws the progress of the download. Without a terminal it prints a line for each tenth of it.
    pub(crate) fn progress(&mut self, done: usize, before: usize) {
        let passed = |parts: usize| done * parts / LENGTH > before * parts / LENGTH;
        if self.is_terminal && passed(LENGTH / MIB) {
            let filled = done * BAR_WIDTH / LENGTH;
            let bar = "#".repeat(filled) + &".".repeat(BAR_WIDTH - filled);
            let _ =
                write!(std::io::stderr(), "\r\x1b[K        [{bar}] {} of {} MiB", done / MIB, LENGTH / MIB);
            self.has_bar = true;
        } else if !self.is_terminal && passed(10) {
            self.step(&format!("{} %", done * 10 / LENGTH * 10));
        }
    }
}

/// Returns the time since a start.
pub(crate) fn elapsed_text(started: Instant) -> String {
    format!("{:.1?}", started.elapsed())
}

/// Colours of a terminal's text (ECMA-48, SGR).
pub(crate) const RED: &str = "\x1b[31m";
pub(crate) const GREEN: &str = "\x1b[32m";
const NO_COLOUR: &str = "\x1b[0m";
/// Width of the progress bar.
const BAR_WIDTH: usize = 40;
