//! Grants, given and revoked through the admin socket of a server, or over the link of an admin.

use http::StatusCode;
use serde::Deserialize as _;
use serde_json::Value;

use crate::admin::grants::GrantRequest;
use crate::admin::requester::{AdminRequest, AdminRequester};
use crate::admin::responses::{AdminAnswer, AdminResponse, json, plain_text, read_json};
use crate::admin::server::ServerAdmin;
use crate::admin::server::invitations::{enrolment_error, no_invitations};
use crate::enrolment::grants::giver_of;
use crate::invitations::GrantSelection;
use tunnel_base::policy::grants::{FOR_EVER, Grant};
use tunnel_base::unix_time::now;

/// Returns the response to `GET /grants`: those that have not ended, also those of newer servers.
pub(crate) fn list(server: &ServerAdmin) -> AdminResponse {
    json(&server.enrolment.get().map_or_else(Vec::new, |enrolment| enrolment.live_grants()))
}

/// Returns the response to `POST /grants`.
pub(crate) async fn give(server: &ServerAdmin, request: AdminRequest<'_>) -> AdminAnswer {
    let requester = request.requester;
    let enrolment = server.enrolment.get().ok_or_else(no_invitations)?;
    let GrantRequest { user, nodes, ports, seconds, with_join_keys } = read_json(request.http).await?;
    let refused = |why: String| plain_text(StatusCode::FORBIDDEN, why);
    requester.check_user(Some(&user)).map_err(refused)?;
    let (rights, from) = match requester {
        AdminRequester::Linked(linked) => (linked.rights.clone(), Some(linked.from.ip())),
        _ => ((server.rights)(), None),
    };
    let most = if from.is_some() { rights.bounds.max_admin_grant.as_secs() } else { FOR_EVER };
    let seconds = seconds.unwrap_or(most.min(DEFAULT_SECONDS));
    let is_long = nodes.len().max(ports.as_ref().map_or(0, Vec::len)) > MAX_PATTERNS;
    if nodes.is_empty() || is_long {
        return Err(refused(format!(
            "expected 1 to {MAX_PATTERNS} nodes and at most {MAX_PATTERNS} ports\n"
        )));
    }
    if !(MIN_SECONDS..=most).contains(&seconds) {
        let over = from.map_or("", |_| " over a link (max_admin_grant of [server.clients])");
        let lasts = format!("a grant lasts at least {MIN_SECONDS} s, and at most {most} s{over}");
        return Err(refused(format!("seconds: {seconds} s: {lasts}; choose another time (--for)\n")));
    }
    let id = format!("{:010x}", rand::random::<u64>() >> 24);
    let until = now().saturating_add(seconds).min(FOR_EVER);
    let grant = Grant { id, user, nodes, ports, with_join_keys, until, by: requester.to_string() };
    if !rights.permit(&grant, from) {
        let rules = if from.is_some() { ", or what its rules give you" } else { "" };
        return Err(refused(format!("it exceeds ceiling of [server.clients] of this server{rules}\n")));
    }
    enrolment.grant(&grant).await.map_err(|why| enrolment_error(&why))?;
    // Another server may have revoked the device meanwhile, and all grants that it had given by then.
    if let AdminRequester::Linked(linked) = requester
        && linked.until.is_none()
    {
        let read = enrolment.refresh().await;
        if read.is_err() || !enrolment.known().has_joined(&requester.to_string()) {
            let selection = GrantSelection { id: Some(grant.id), user: None, by: None };
            enrolment
                .revoke_grants(&selection, |_| true, &grant.by)
                .await
                .map_err(|why| enrolment_error(&why))?;
            read.map_err(|why| enrolment_error(&why))?;
            return Err(refused("your device was revoked\n".to_owned()));
        }
    }
    Ok(json(&grant))
}

/// Returns the response to `POST /grants/revoke`: how many there were. Over her link an admin may revoke those that she
/// has given, and those that her rules let her give.
pub(crate) async fn revoke(server: &ServerAdmin, request: AdminRequest<'_>) -> AdminAnswer {
    let requester = request.requester;
    let enrolment = server.enrolment.get().ok_or_else(no_invitations)?;
    let selection: GrantSelection = read_json(request.http).await?;
    let may = |one: &Value| match requester {
        AdminRequester::Linked(linked) => {
            let admin = linked.device.user.as_str();
            let covers = |grant: Grant| linked.rights.may_give(admin, &grant, Some(linked.from.ip()));
            giver_of(one) == Some(admin) || Grant::deserialize(one).is_ok_and(covers)
        }
        _ => true,
    };
    let revoked = enrolment.revoke_grants(&selection, may, &requester.to_string()).await;
    match revoked.map_err(|why| enrolment_error(&why))? {
        0 => Err(plain_text(StatusCode::NOT_FOUND, NONE)),
        revoked => Ok(json(&revoked)),
    }
}

/// The answer if no grant was revoked.
const NONE: &str = "there is no such grant; tunnel grants lists them. Over a link, admins revoke those that they gave, and \
                    those of which their rules in [server.clients] give them all\n";
/// How long a grant lasts in seconds, by default and at least.
const DEFAULT_SECONDS: u64 = 90 * 24 * 3600;
const MIN_SECONDS: u64 = 60;
/// Maximum number of patterns of nodes, and of ports, of a grant.
const MAX_PATTERNS: usize = 64;
