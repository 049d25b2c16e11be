//! The processes on both sides of a line between two namespaces.

use std::path::PathBuf;

use anyhow::Result;

use super::Bench;
use crate::line::{Carry, Ends};
use crate::place::{Certificates, Place};
use crate::process::Process;
use crate::proxy::Proxy;
use crate::relay;
use crate::targets::Targets;
use crate::tunnel::Tunnel;
use crate::way::Ways;

/// Clients and servers on one side, the edge and its targets on the other. Dropped in this order: processes first, the
/// line last.
#[derive(Debug)]
pub(crate) struct OverLine {
    /// The program, if one is tested, and the direct route over the line.
    pub(crate) proxies: Vec<Proxy>,
    /// Routes of clients to the targets through the second server.
    pub(crate) far: Option<Ways>,
    /// Namespace of the clients.
    pub(crate) space: String,
    targets: Targets,
    place: Place,
    _second: Option<Process>,
    _over_line: Targets,
    _ends: Ends,
}

impl Bench {
    /// Creates the line and starts all processes; with `servers` also a second server.
    pub(crate) fn over_line(&self, carry: Carry, congestion: &str, servers: bool) -> Result<OverLine> {
        self.over_line_within(carry, congestion, servers, [const { Vec::new() }; 2])
    }

    /// Like [`Self::over_line`], with server and edge in the control groups of `doors`.
    pub(crate) fn over_line_within(
        &self,
        carry: Carry,
        congestion: &str,
        servers: bool,
        limiters: [Vec<PathBuf>; 2],
    ) -> Result<OverLine> {
        let ends = Ends::lay(carry, congestion)?;
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let [cloud_space, edge_space] = ends.spaces.clone();
        let [cloud_address, edge_address] = ends.addresses;
        let place = Place {
            cloud_space: Some(cloud_space.clone()),
            edge_space: Some(edge_space.clone()),
            cloud_address,
            edge_address,
            certificates: Certificates::make(&dir)?,
            dir,
        };
        let targets = Targets::start(Some(&edge_space), [127, 0, 0, 1].into())?;
        let over_line = Targets::start(Some(&edge_space), edge_address)?;
        let (mut proxies, mut far, mut second) = (Vec::new(), None, None);
        if let Some(binary) = &self.binary {
            let near = Tunnel::configure(&place, &targets, binary)?.within(limiters);
            let peer = if servers { Some(near.peer(&place, &targets)?) } else { None };
            proxies.push(near.reachable()?);
            far = peer.as_ref().map(Tunnel::ways);
            second = peer.map(|peer| peer.server()).transpose()?;
        }
        let ways = over_line.straight();
        proxies.push(Proxy { name: "direct", ways, processes: Vec::new(), port: None });
        Ok(OverLine {
            proxies,
            far,
            space: cloud_space,
            targets,
            place,
            _second: second,
            _over_line: over_line,
            _ends: ends,
        })
    }
}

impl OverLine {
    /// Adds the bare relay to the proxies.
    pub(crate) fn with_relay(mut self) -> Result<Self> {
        self.proxies.push(relay::start(&self.place, &self.targets)?);
        Ok(self)
    }
}
