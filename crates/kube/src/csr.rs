//! Certificates issued by a cluster's signers through CertificateSigningRequests: requested and renewed by servers and
//! edges, and approved or denied by the approver.
//!
//! There are three profiles, compatible with YurtTunnel. A `CertificateRenewer` keeps one file up to date: it
//! generates the key locally and stores it with its certificate in that file, which is reloaded like any other. An
//! `Approver` authorizes requests by their content and requester.

pub mod apiserver_names;
pub mod approver;
pub mod content;
pub mod decision;
pub mod error;
pub mod profile;
pub(crate) mod renewal;
pub mod renewer;
pub(crate) mod request;
pub mod server_name_sources;
