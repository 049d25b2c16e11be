//! Commands for people.

#[cfg(feature = "kubernetes")]
mod approve;
mod args;
mod connect;
mod demo;
mod doctor;
mod folder;
mod init;
mod invite;
mod join;
mod manual;
#[cfg(feature = "kubernetes")]
mod migrate;
mod settings;
mod socket;
mod status;

#[cfg(feature = "kubernetes")]
pub use approve::{Approve, approve};
pub use args::{Args, Command, Form, Mode, is_wrong};
pub use connect::{Connect, connect};
pub use demo::{Module, run as demo};
pub use doctor::{Doctor, Findings, run as doctor};
pub use init::{Init, run as init};
pub use invite::{Invite, Revoke, invite, revoke};
pub use join::{Join, run as join};
pub use manual::{completions, man};
#[cfg(feature = "kubernetes")]
pub use migrate::{Migrate, run as migrate};
pub use settings::Settings;
pub use status::status;

/// Why a command for people was not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    /// The program's exit code, as in sysexits.h.
    pub code: u8,
    /// What is wrong, and the remedy.
    pub text: String,
}

impl Failure {
    /// What was asked for cannot be.
    fn usage(text: impl Into<String>) -> Self {
        Self { code: 64, text: text.into() }
    }

    /// A file that was named will not do.
    fn unusable(text: impl Into<String>) -> Self {
        Self { code: 78, text: text.into() }
    }

    /// Somebody does not let us.
    fn refused(text: impl Into<String>) -> Self {
        Self { code: 77, text: text.into() }
    }

    /// A file cannot be written.
    fn cannot_write(text: impl Into<String>) -> Self {
        Self { code: 73, text: text.into() }
    }

    /// Nobody answers.
    fn unavailable(text: impl Into<String>) -> Self {
        Self { code: 69, text: text.into() }
    }
}
