//! Links to servers, which an edge and a user's program keep alike.

pub mod client;
mod interactive;
pub mod link_dialer;
mod moves;
pub mod path_report;
pub mod proxy;
pub mod reconnect;
