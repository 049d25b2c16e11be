//! Follows the config while the program runs: what says who may reach what counts for whoever comes next, and all else
//! is named as what waits for a start.

use std::path::PathBuf;

use tracing::{error, info, info_span, warn};

use crate::config::{Changed, Concern, Environment, Reading, Warning};
use crate::drain::Drain;
use crate::net::reload::Reload;
use crate::telemetry::AUDIT;

/// The config as the program was started with it.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    /// Where it stands.
    pub path: PathBuf,
    /// What it said.
    pub text: String,
    /// What else was read with it.
    pub environment: Environment,
}

/// The file as it was last read without a fault.
#[derive(Debug)]
struct Read<T> {
    text: String,
    settings: T,
    warnings: Vec<Warning>,
}

impl ConfigFile {
    /// Reads the file again when it changes, until draining begins, and hands its settings to `apply`. A file with a
    /// fault changes nothing, and its faults are logged.
    pub fn follow<T: Send + Sync + 'static>(
        self,
        examine: fn(&str, &Environment) -> Reading<T>,
        drain: &Drain,
        apply: impl Fn(&T) + Send + 'static,
    ) {
        let Self { path, text, environment } = self;
        let parse = move |content: &[u8]| {
            let text = String::from_utf8_lossy(content).into_owned();
            let (settings, warnings) =
                examine(&text, &environment).whole().map_err(|faults| faults.to_string())?;
            Ok(Read { text, settings, warnings })
        };
        let config = match Reload::file(path, parse) {
            Ok(config) => config,
            Err(cause) => return error!(%cause, "changes of the config are not followed"),
        };
        let (mut changes, mut text) = (config.changes(), text);
        drain.spawn(info_span!("config"), config.clone().watch(drain.clone()));
        let draining = drain.clone();
        drain.spawn(info_span!("config"), async move {
            loop {
                let read = config.load();
                if read.text != text {
                    tell(&text, &read);
                    apply(&read.settings);
                    text.clone_from(&read.text);
                }
                tokio::select! {
                    () = draining.draining() => return,
                    changed = changes.changed() => if changed.is_err() { return },
                }
            }
        });
    }
}

/// Logs what the operator should know of a config.
pub fn tell_warnings(warnings: &[Warning]) {
    for Warning { key, kind, text } in warnings {
        match kind {
            Concern::OpenDoor => error!(%key, "OPEN DOOR: {text}"),
            Concern::NotServed | Concern::Surprise => warn!(%key, "{text}"),
        }
    }
}

fn tell<T>(old: &str, new: &Read<T>) {
    let Changed { live, at_start } = Changed::between(old, &new.text);
    if !live.is_empty() {
        info!(
            target: AUDIT,
            who = "the config",
            keys = shown(&live),
            "the config says anew who may reach what: it counts for whoever comes next"
        );
        tell_warnings(&new.warnings);
    }
    if !at_start.is_empty() {
        warn!(keys = shown(&at_start), "changed in the config, and counts only from the next start on");
    }
}

/// The first of the keys, with how many there are besides.
fn shown(keys: &[String]) -> String {
    let mut text = keys.iter().take(MOST_SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if let Some(more) = keys.len().checked_sub(MOST_SHOWN).filter(|more| *more > 0) {
        text += &format!(", and {more} more");
    }
    text
}

/// Keys that one line names.
const MOST_SHOWN: usize = 20;
