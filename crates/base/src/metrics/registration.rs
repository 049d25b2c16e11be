//! Names and help texts of the metrics.

use prometheus_client::registry::{Registry, Unit};

use crate::metrics::Metrics;

impl Metrics {
    pub(crate) fn register_links(&self, to: &mut Registry) {
        to.register("tunnel_links_open", "Number of open links, by kind of remote", self.links.each.clone());
        let help = "Number of open links to programs of SuperEdge, by dialect";
        to.register("tunnel_plain_links_open", help, self.plain_links.each.clone());
        let help = "Total number of links closed, by reason";
        to.register("tunnel_links_closed", help, self.links_closed.each.clone());
        let help = "Total number of links rejected, by reason";
        to.register("tunnel_links_rejected", help, self.links_rejected.each.clone());
        let help = "Total number of failed attempts to dial a link, by reason";
        to.register("tunnel_link_dial_failures", help, self.link_dial_failures.each.clone());
        let help = "Total number of times two running processes used the same node name";
        to.register("tunnel_node_name_conflicts", help, self.node_name_conflicts.clone());
        let help = "Total number of times an edge dialled its server again, successfully or not";
        to.register("tunnel_link_reconnects", help, self.link_reconnects.clone());
        let help = "Total number of backup links dialled next to an unresponsive link: used (it answered first), \
                    unneeded (the old link did), failed";
        to.register("tunnel_backup_links", help, self.backup_links.each.clone());
        let help = "Total number of edges asked to link to a server with fewer nodes";
        to.register("tunnel_edges_rebalanced", help, self.edges_rebalanced.clone());
        let help = "Round-trip time of a link";
        to.register_with_unit("tunnel_link_rtt", help, Unit::Seconds, self.rtt.clone());
        let help = "Total number of times reading a plain link paused for a slow reader";
        to.register("tunnel_link_read_pauses", help, self.read_pauses.clone());
    }

    pub(crate) fn register_sessions(&self, to: &mut Registry) {
        let help = "Number of open sessions, by listener";
        to.register("tunnel_sessions_open", help, self.sessions.now.clone());
        let help =
            "Total number of sessions closed, by listener and result; includes requests that never opened";
        to.register("tunnel_sessions_closed", help, self.sessions.total.clone());
        let help = "Time from a session's request to its response, successful or not";
        to.register_with_unit(
            "tunnel_session_open_duration",
            help,
            Unit::Seconds,
            self.open_duration.clone(),
        );
        let help = "Number of HTTP requests in flight, by method and kind of path";
        to.register("tunnel_http_requests_in_flight", help, self.requests.0.clone());
        let help = "Total number of sessions reset before their end, by reason";
        to.register("tunnel_sessions_reset", help, self.resets.each.clone());
        let help = "Total number of aborted sessions that were not delivered in full, by reason";
        to.register("tunnel_sessions_truncated", help, self.truncated.each.clone());
        let help = "Total number of times a session was resumed over another path";
        to.register("tunnel_sessions_resumed", help, self.resumed.clone());
        let help = "Number of sessions relayed by this server";
        to.register("tunnel_sessions_relayed", help, self.sessions_relayed.clone());
        let help = "Bytes used of each budget: reserved (promised to remotes), unacknowledged (not yet received by \
                    the remote, or a little more), relayed (on the way to another link), unreserved (sent by plain \
                    remotes, not read yet)";
        to.register_with_unit("tunnel_buffer", help, Unit::Bytes, self.buffers.used.clone());
        let help = "Limit of each budget in bytes; see memory in the config";
        to.register_with_unit("tunnel_buffer_limit", help, Unit::Bytes, self.buffers.limit.clone());
    }

    /// Registers the metrics of rejections, of published records and of certificates.
    pub(crate) fn register_refused(&self, to: &mut Registry) {
        let help = "Total number of frames dropped, by reason";
        to.register("tunnel_frames_dropped", help, self.frames_dropped.each.clone());
        let help = "Total number of client connections closed without a session, by reason";
        to.register("tunnel_connections_rejected", help, self.connections_rejected.each.clone());
        to.register("tunnel_dns_records", "Number of records published for DNS", self.dns_records.clone());
        let help = "Total number of failed attempts to write records for DNS";
        to.register("tunnel_dns_publish_failures", help, self.dns_publish_failures.clone());
        let help = "Number of devices of users that end within 14 days unless they are used";
        to.register("tunnel_devices_ending", help, self.devices_ending.clone());
        let help = "Expiration time of the certificate that a config key names, since the Unix epoch";
        let name = "tunnel_certificate_expiration_timestamp";
        to.register_with_unit(name, help, Unit::Seconds, self.certificates.0.clone());
    }
}
