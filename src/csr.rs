//! Certificates that a cluster's own signers issue (CertificateSigningRequests): asked for and renewed by those who show
//! them, and approved, or denied, by who alone may.
//!
//! There are three [`Profile`]s, YurtTunnel's. A [`Keeper`] keeps one file issued: the key is made on this machine and
//! stands with its certificate in that file, which others follow like any file of certificates. An [`Approver`] looks at
//! what is asked for, and at who asks.

mod apiserver;
mod approver;
mod asked;
mod content;
mod error;
mod judge;
mod keeper;
mod names;
mod node;
mod profile;
mod reach;
mod renewal;
mod request;

pub use apiserver::Apiserver;
pub use approver::Approver;
pub use asked::Asked;
pub use content::Content;
pub use error::CsrError;
pub use judge::{Facts, Verdict, judge};
pub use keeper::{Keeper, Names};
pub use profile::Profile;
pub use reach::Reach;
