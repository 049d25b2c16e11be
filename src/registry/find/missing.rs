//! Why a node was not found, in words.

use std::fmt;
use std::time::Duration;

use crate::registry::siblings::Unreachable;

/// No pod has the node: the pods that were asked, and their answers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NotFound {
    /// How long ago the node was last linked here, or known to be at another pod, here or to a pod that was asked, if ever.
    pub seen: Option<Duration>,
    /// Why DNS named no pod, if DNS was asked.
    pub dns: Option<String>,
    /// How many other pods answered that the node is not there.
    pub asked: usize,
    /// The other pods that could not be reached.
    pub trouble: Vec<Unreachable>,
    /// It was found, but as another process than the one that is sought.
    pub another: bool,
    /// It was linked a moment ago, and may be linking to another pod.
    pub moving: bool,
}

impl NotFound {
    /// No link from that node is remembered anywhere: it may have no edge at all.
    pub fn is_of_a_stranger(&self) -> bool {
        self.seen.is_none() && !self.moving && !self.another
    }

    /// The whole of it, behind the node's name.
    pub fn sentence(&self) -> String {
        let seen = self.seen.map(|seen| format!(", last seen {} ago", short(seen))).unwrap_or_default();
        format!("is not connected{seen}{self}")
    }
}

impl fmt::Display for NotFound {
    /// Goes on where a sentence on the node has ended.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(dns) = &self.dns {
            write!(f, "; {dns}")?;
        }
        match self.asked {
            0 => {}
            1 => f.write_str("; not at the other pod")?,
            n => write!(f, "; not at {n} other pods")?,
        }
        for trouble in &self.trouble {
            write!(f, "; {trouble}")?;
        }
        if self.another { f.write_str("; it is linked as another process") } else { Ok(()) }
    }
}

/// A duration in its largest whole unit: `45s`, `3m`, `2h`.
fn short(d: Duration) -> String {
    match d.as_secs() {
        s @ 0..120 => format!("{s}s"),
        s @ 120..7200 => format!("{}m", s / 60),
        s => format!("{}h", s / 3600),
    }
}
