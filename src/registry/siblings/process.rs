//! Looking for one certain pod: by its process, or for a sign of life.

use std::net::IpAddr;
use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt as _};

use super::{PONG_TIMEOUT, Siblings, Unreachable};
use crate::names::Instance;
use crate::protocol::LinkSender;

impl Siblings {
    /// A link to the pod that is this process, made if need be. Takes 1 s at most. Cancel safe.
    ///
    /// # Errors
    ///
    /// None of those that could be asked is it. Returns those that could not.
    pub async fn process(&self, instance: Instance) -> Result<Arc<LinkSender>, Vec<Unreachable>> {
        let is = |link: &Arc<LinkSender>| link.instance == Some(instance) && !link.is_closed();
        // Of two links to one pod, one may be dead and not known to be.
        if let Some(link) = self.links().into_iter().filter(is).min_by_key(|link| link.silence()) {
            return Ok(link);
        }
        let pods = self.all();
        let mut links: FuturesUnordered<_> = pods.iter().map(|pod| pod.link()).collect();
        let mut trouble = Vec::new();
        while let Some(link) = links.next().await {
            match link {
                Ok(link) if is(&link) => return Ok(link),
                Ok(_) | Err(Unreachable::Itself(_)) => {}
                Err(why) => trouble.push(why),
            }
        }
        Err(trouble)
    }

    /// Whether the pod at an address, its gRPC port being `port`, answers over a link, made if need be. An accepted
    /// connection proves nothing: it may be a proxy's on the way. Takes 2 s at most. Cancel safe.
    pub async fn answers(&self, ip: IpAddr, port: u16) -> bool {
        for pod in self.at(ip, port) {
            if let Ok(link) = pod.link().await
                && link.answers_within(PONG_TIMEOUT).await
            {
                return true;
            }
        }
        false
    }
}
