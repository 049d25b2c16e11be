//! Why the TLS handshake with the cloud failed, for whoever runs the edge: what was found, which key, the remedy.

use std::io;

use crate::names::Target;
use crate::net::tls::Fault;

/// The whole sentence; `name` is what the cloud's certificate has to carry.
pub(super) fn no_tls(error: &io::Error, at: &Target, name: &str) -> String {
    let fault = Fault::of(error);
    let remedy = remedy(&fault);
    let then = if remedy.is_empty() { "" } else { "; " };
    format!("TLS with the cloud as {name:?} failed, at {at}: {fault}{then}{remedy}")
}

/// Which key of the edge or its cloud mends it; may be empty.
pub fn remedy(fault: &Fault) -> &'static str {
    match fault {
        Fault::Authority => {
            "mode.edge.stream.client.cert has to hold the authority that has signed it: get that file from whoever runs \
             the cloud, unless another server than the cloud answers there"
        }
        Fault::Name(_) => {
            "set mode.edge.stream.client.dns to a name that it is for, or have the cloud's mode.cloud.stream.server.cert \
             issued anew with this one"
        }
        Fault::Expired(..) => {
            "the cloud needs a new mode.cloud.stream.server.cert, which it reads without a restart; if the clock is \
             wrong, set it"
        }
        Fault::TooEarly(..) => "set this machine's clock if it is wrong, or wait",
        Fault::IsAuthority | Fault::Purpose | Fault::OtherCertificate(_) => {
            "the cloud's mode.cloud.stream.server.cert has to be issued anew, for servers"
        }
        Fault::NoTls => {
            "that port speaks no TLS: is it the CONNECT port? mode.edge.stream.client.server_name has to name the port of \
             the cloud's mode.cloud.stream.server.listen, by default 9000"
        }
        Fault::Protocol => {
            "that port takes no links: is it the one for egress or HTTPS? mode.edge.stream.client.server_name has to name \
             the port of the cloud's mode.cloud.stream.server.listen, by default 9000"
        }
        Fault::Disbelieves(_) => {
            "an edge shows no certificate to its cloud: is that its port for links, mode.cloud.stream.server.listen?"
        }
        Fault::Closed => {
            "is that the cloud's port for links (mode.cloud.stream.server.listen), and does a firewall or balancer stand \
             between?"
        }
        Fault::Other(_) => "",
    }
}
