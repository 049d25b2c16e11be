//! The tokens of a server's nodes: in its file, in its store of invitations, and of nodes that are linked to peers.

use crate::admin::nodes::NodesResponse;
use crate::command::doctor::running::{AdminAddress, fetch_page};
use crate::command::doctor::{DoctorFindings, Finding, TIMEOUT, Tested};
use crate::server::config::ServerConfig;
use crate::server::invitations;
use tunnel_base::files;
use tunnel_base::policy::tokens::{NodeTokens, TokenLineState};
use tunnel_base::silence::unless_silent;
use tunnel_net::resolver::Resolver;
use tunnel_proto::names::NodeName;
use tunnel_proto::printable::one_line;

/// Counts the nodes with a token, and reports tokens that are missing, faulty, shared or unknown to a peer.
pub(super) async fn check_tokens(
    settings: &ServerConfig,
    admin: &AdminAddress,
    resolver: &Resolver,
    found: &mut DoctorFindings,
) -> Tested {
    let joined = unless_silent(TIMEOUT, invitations::joined(settings, resolver)).await.ok_or_else(|| {
        let text = format!("the store of invitations did not answer within {TIMEOUT:?}");
        let hint = "check that it runs and is reachable";
        Finding::error("token", text, "the store of invitations", hint)
    })?;
    let joined = joined.transpose().map_err(|why| {
        let hint = "check store and its keys in [server.invitations]";
        Finding::error("token", why, "the store of invitations", hint)
    })?;
    let by_cluster =
        settings.service_account.is_some() || settings.csr.as_ref().is_some_and(|csr| csr.edge_ca.is_some());
    let file = &settings.links.token_file;
    let Ok(text) = files::read_text(file) else { return Ok(()) };
    let tokens = NodeTokens::parse(&text);
    let is_own =
        |(name, entry): &&(&str, TokenLineState)| *name != "default" && *entry != TokenLineState::Blocked;
    let own = tokens.entries().iter().filter(is_own).count();
    let by_invitation = joined.as_ref().map(|nodes| format!(", {} joined by invitation", nodes.len()));
    let by_invitation = by_invitation.unwrap_or_default();
    let own = format!("nodes with their own token: {own} in the token file{by_invitation}");
    if tokens.has_default() {
        let hint = "anyone with the shared token can use any name; give each node its own line";
        found.add_warning("token", format!("{own}; all others share one token"), hint);
    } else if tokens.is_empty() && joined.is_none() && !by_cluster {
        let hint =
            "add a line NODE:TOKEN for each node, or set store in [server.invitations] and invite them";
        found.add_warning("token", format!("{own}, so every edge is refused"), hint);
    } else {
        found.add_ok("token", format!("{own}; no other token is valid"));
    }
    for (line, error) in tokens.errors() {
        found.add_warning("token", format!("{}, line {line}: {error}", file.display()), "");
    }
    if !tokens.has_default() && !by_cluster {
        let joined = joined.unwrap_or_default();
        let has_joined = |node: &NodeName| joined.contains(&node.as_str().to_ascii_lowercase());
        let is_known =
            |node: &NodeName| !tokens.is_blocked(node) && (tokens.has_line(node) || has_joined(node));
        check_unknown_nodes(admin, is_known, found).await;
    }
    Ok(())
}

/// Reports nodes that are linked to peers, but that this server would refuse: not all servers have the same tokens.
async fn check_unknown_nodes(
    admin: &AdminAddress,
    is_known: impl Fn(&NodeName) -> bool,
    found: &mut DoctorFindings,
) {
    // Without a running server there is no list; another check reports that.
    let Ok((200, body)) = fetch_page(admin, "/nodes").await else { return };
    let Ok(NodesResponse { servers, nodes, .. }) = serde_json::from_str(&body) else { return };
    // The first one is this server.
    for peer in servers.iter().skip(1) {
        let at_peer = nodes.iter().filter(|node| node.server == peer.name);
        let names = at_peer.filter_map(|node| node.name.parse::<NodeName>().ok());
        let strangers: Vec<_> = names.filter(|node| !is_known(node)).collect();
        let text = match strangers.as_slice() {
            [] => continue,
            [one] => format!("this server would refuse node {one} of peer {}", one_line(&peer.name)),
            [one, ..] => format!(
                "this server would refuse {} nodes of peer {}, for example {one}",
                strangers.len(),
                one_line(&peer.name)
            ),
        };
        let hint = "give all servers the same token_file and one store (server.invitations)";
        found.add_warning("token", text, hint);
    }
}
