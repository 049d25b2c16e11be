//! Invitations, created and revoked through the admin socket of a server.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;

use crate::admin::invitations::{
    InvitationResponse, MAX_INVITATION_SECONDS, MAX_KEY_SECONDS, MAX_USES, MIN_INVITATION_SECONDS,
};
use crate::admin::requester::{AdminRequest, LinkedUser};
use crate::admin::responses::{AdminAnswer, AdminResponse, json, plain_text, read_json};
use crate::admin::server::ServerAdmin;
use crate::enrolment::{NewInvitation, SharedEnrolments};
use crate::invitations::invitee::Invitee;
use tunnel_proto::names::Target;

/// The JSON body of a request to create or revoke an invitation, at the admin socket of a server.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct InvitationRequest {
    /// Whom to invite, or what to revoke: an [`Invitee`].
    subject: Option<String>,
    /// Validity of the invitation.
    seconds: Option<u64>,
    /// Number of nodes that may use the join key.
    uses: Option<u32>,
    /// ID of the join key to revoke, instead of a subject.
    key: Option<String>,
    /// Whether to revoke the nodes that came by that key, too.
    with_nodes: bool,
    /// Whether the user's device remains even if it is unused.
    keep: bool,
}

/// Returns the response to `POST /invitations`.
pub(crate) async fn invite(server: &ServerAdmin, request: AdminRequest<'_>) -> AdminAnswer {
    let who = request.requester.to_string();
    let (enrolment, invitee, wish) = parse_request(server, request).await?;
    let (invitee, lasting) = check_invitation(invitee, &wish)
        .map_err(|why| plain_text(StatusCode::BAD_REQUEST, format!("{why}\n")))?;
    let made = enrolment.invite(&invitee, wish.uses, lasting, wish.keep, &who).await;
    let NewInvitation { code, until, key, host } = made.map_err(|why| enrolment_error(&why))?;
    let port = server.port;
    let cloud = host.map_or_else(|| format!("CLOUD:{port}"), |host| Target { host, port }.to_string());
    Ok(json(&InvitationResponse { code: code.to_string(), until, cloud, key, grant: None }))
}

/// Returns whom to invite, and for how long.
fn check_invitation(
    invitee: Option<Invitee>,
    wish: &InvitationRequest,
) -> Result<(Invitee, Duration), String> {
    let invitee = invitee.ok_or("subject: missing")?;
    let max_seconds = match (&invitee, wish.uses) {
        (Invitee::Device(_), _) => return Err("subject: a device is named when it joins".into()),
        (Invitee::Node(_) | Invitee::Nodes(_), _) if wish.keep => return Err("keep: nodes never end".into()),
        (Invitee::Nodes(_), Some(1..=MAX_USES)) => MAX_KEY_SECONDS,
        (Invitee::Nodes(_), _) => return Err(format!("uses: expected 1 to {MAX_USES}")),
        (_, Some(_)) => return Err("uses: only a pattern of nodes has a number of uses".into()),
        (_, None) => MAX_INVITATION_SECONDS,
    };
    let seconds = wish.seconds.filter(|seconds| (MIN_INVITATION_SECONDS..=max_seconds).contains(seconds));
    let seconds =
        seconds.ok_or_else(|| format!("seconds: expected {MIN_INVITATION_SECONDS} to {max_seconds}"))?;
    Ok((invitee, Duration::from_secs(seconds)))
}

/// Returns the response to `GET /invitations`: those that have joined or are invited.
pub(crate) async fn list(enrolment: Option<&Arc<SharedEnrolments>>) -> AdminAnswer {
    let all = enrolment.ok_or_else(no_invitations)?.list().await;
    all.map(|all| json(&all)).map_err(|why| enrolment_error(&why))
}

/// Returns the response to `POST /revocations`.
pub(crate) async fn revoke(server: &ServerAdmin, request: AdminRequest<'_>) -> AdminAnswer {
    let who = request.requester.to_string();
    let (enrolment, subject, InvitationRequest { key, with_nodes, .. }) =
        parse_request(server, request).await?;
    // A join key is revoked by its ID alone, because several keys may have one pattern.
    let (revoked, none) = match (key, subject) {
        (Some(key), _) => {
            let none = format!(
                "no open join key has the ID {key}; tunnel invitations list prints the keys, and --with-nodes revokes \
                 the nodes that came by a closed one\n"
            );
            (enrolment.end_key(&key, with_nodes, &who).await, none)
        }
        (None, None | Some(Invitee::Nodes(_))) => {
            let why = "subject: expected a node or a user, or the key's ID\n";
            return Err(plain_text(StatusCode::BAD_REQUEST, why));
        }
        (None, Some(subject)) => {
            let revoked = enrolment.revoke(&subject, &who).await;
            let name = subject.to_string();
            let all = enrolment.list().await.unwrap_or_default();
            let is_user = all.iter().any(|one| one.user.as_ref() == Some(&name));
            let user = if is_user { format!("; {name} is a user: set --user {name}") } else { String::new() };
            let none = format!(
                "{} has not joined by an invitation, and has no open one{user}; tunnel invitations list prints those \
                 that have. A token of the token file is revoked there\n",
                name.trim_end_matches('/')
            );
            (revoked, none)
        }
    };
    Ok(revocation(revoked, "revoked\n", none))
}

/// Returns the answer to a revocation.
fn revocation(revoked: Result<bool, String>, done: &'static str, none: String) -> AdminResponse {
    match revoked {
        Ok(true) => plain_text(StatusCode::OK, done),
        Ok(false) => plain_text(StatusCode::NOT_FOUND, none),
        Err(why) => enrolment_error(&why),
    }
}

/// Returns the response to `POST /leave` of a user's device: its token is revoked. She needs no other right for that.
pub(crate) async fn leave(enrolment: Option<&Arc<SharedEnrolments>>, user: &LinkedUser) -> AdminAnswer {
    let device = &user.device;
    // Before it is revoked, because that ends the link of this request.
    user.leaves.store(true, Relaxed);
    let subject = Invitee::Device(device.clone());
    let left = enrolment.ok_or_else(no_invitations)?.revoke(&subject, &device.to_string()).await;
    Ok(revocation(left, "left\n", "this device has not joined by an invitation\n".to_owned()))
}

async fn parse_request<'a>(
    server: &'a ServerAdmin,
    AdminRequest { http, requester }: AdminRequest<'_>,
) -> Result<(&'a Arc<SharedEnrolments>, Option<Invitee>, InvitationRequest), AdminResponse> {
    let enrolment = server.enrolment.get().ok_or_else(no_invitations)?;
    let wish: InvitationRequest = read_json(http).await?;
    let wrong = |why| plain_text(StatusCode::BAD_REQUEST, format!("subject: {why}\n"));
    let subject = wish.subject.as_deref().map(str::parse::<Invitee>).transpose().map_err(wrong)?;
    let checked = requester.check_user(subject.as_ref().and_then(Invitee::user));
    checked.map_err(|why| plain_text(StatusCode::FORBIDDEN, why))?;
    Ok((enrolment, subject, wish))
}

pub(super) fn no_invitations() -> AdminResponse {
    let why =
        "this server takes no invitations; set store in [server.invitations] of the config of each server\n";
    plain_text(StatusCode::NOT_FOUND, why)
}

pub(super) fn enrolment_error(why: &str) -> AdminResponse {
    plain_text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n"))
}
