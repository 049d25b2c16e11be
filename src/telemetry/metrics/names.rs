//! Names and help texts of the metrics.

use prometheus_client::registry::{Registry, Unit};

use crate::telemetry::Metrics;

impl Metrics {
    pub(super) fn register_links(&self, to: &mut Registry) {
        to.register("tunnel_links", "Links alive now", self.links.clone());
        to.register("tunnel_links_ended", "Links that ended, by cause", self.links_ended.0.clone());
        to.register(
            "tunnel_calls_refused",
            "Calls refused before they became links",
            self.calls_refused.0.clone(),
        );
        let help = "Times that two live processes had one node's name";
        to.register("tunnel_name_conflicts", help, self.name_conflicts.clone());
        to.register("tunnel_reconnects", "Times an edge dialled its cloud again", self.reconnects.clone());
        let help = "Second links beside one that had fallen silent: dialled; won (it answered first), lost (the old one did), failed";
        to.register("tunnel_second_links", help, self.second_links.0.clone());
        let help = "Edges that were asked to link to a pod that has fewer";
        to.register("tunnel_edges_moved", help, self.moved.clone());
        let help = "Time from a ping to its answer";
        to.register_with_unit("tunnel_link_round_trip", help, Unit::Seconds, self.round_trip.0.clone());
        to.register(
            "tunnel_link_stalls",
            "Times a plain link was left unread for a slow reader",
            self.stalls.clone(),
        );
    }

    pub(super) fn register_sessions(&self, to: &mut Registry) {
        to.register("tunnel_sessions", "Sessions alive now, by front end", self.sessions.now.clone());
        to.register(
            "tunnel_sessions_ended",
            "Sessions, by front end and result",
            self.sessions.total.clone(),
        );
        let help = "Time from a request to its answer";
        to.register_with_unit("tunnel_session_opening", help, Unit::Seconds, self.opening.0.clone());
        let help = "Requests of HTTP under way, by verb and kind of path";
        to.register("tunnel_requests_under_way", help, self.requests.0.clone());
        let help = "Bytes from clients towards targets";
        to.register_with_unit("tunnel_up", help, Unit::Bytes, self.bytes_up.clone());
        let help = "Bytes from targets towards clients";
        to.register_with_unit("tunnel_down", help, Unit::Bytes, self.bytes_down.clone());
        to.register(
            "tunnel_sessions_reset",
            "Sessions reset before their end, by cause",
            self.resets.0.clone(),
        );
        let help = "Sessions that broke off and were not delivered in full, by cause";
        to.register("tunnel_sessions_undelivered", help, self.undelivered.0.clone());
        to.register(
            "tunnel_sessions_resumed",
            "Times a session went on over another path",
            self.resumed.clone(),
        );
        to.register(
            "tunnel_sessions_passing",
            "Sessions that only pass through this pod",
            self.passing.clone(),
        );
        let help = "Bytes held of each budget: promised to far ends, kept until they have received it (or a little more), \
                    passing through to another link, unpromised (sent by plain peers, not read yet)";
        to.register_with_unit("tunnel_memory", help, Unit::Bytes, self.memory.used.clone());
        let help = "Bytes that each budget has; see memory in the config";
        to.register_with_unit("tunnel_memory_limit", help, Unit::Bytes, self.memory.limit.clone());
    }

    /// Registers the counters of refusals and of published records.
    pub(super) fn register_refused(&self, to: &mut Registry) {
        to.register("tunnel_frames_dropped", "Frames dropped, by cause", self.frames_dropped.0.clone());
        let help = "Client connections closed without a session, by cause";
        to.register("tunnel_connections_refused", help, self.connections_refused.0.clone());
        to.register(
            "tunnel_published_records",
            "Records that stand where DNS reads them",
            self.published.clone(),
        );
        let help = "When the certificate in the file that a key of the config names ends, since 1970";
        to.register_with_unit(
            "tunnel_certificate_not_after",
            help,
            Unit::Seconds,
            self.certificates.0.clone(),
        );
        let help = "Times that records could not be written";
        to.register("tunnel_publish_failures", help, self.publish_failures.clone());
    }
}
