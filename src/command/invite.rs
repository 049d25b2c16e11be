//! `tunnel invite` and `tunnel revoke`: who may join a cloud, said to a pod of this machine.

use std::path::PathBuf;
use std::time::Duration;

use http::Method;
use serde_json::json;

use super::Failure;
use super::socket::{ask, socket};
use crate::admin::Invited;
use crate::config::Environment;
use crate::names::NodeName;

/// Whom to invite.
#[derive(Debug, Clone, clap::Args)]
pub struct Invite {
    /// The node that the machine becomes.
    #[arg(long, value_name = "NAME")]
    pub node: NodeName,
    /// For how long: a whole number with s, m or h, from 1m to 168h.
    #[arg(long = "for", value_name = "TIME", default_value = "1h", value_parser = lasting)]
    pub lasting: Duration,
    /// Its admin socket. [default: that of a pod of this user; its log says where]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Whose token to revoke.
#[derive(Debug, Clone, clap::Args)]
pub struct Revoke {
    /// The node that has joined, or was invited.
    #[arg(long, value_name = "NAME")]
    pub node: NodeName,
    /// Its admin socket. [default: that of a pod of this user; its log says where]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Has a pod make an invitation. The line for the machine that is to join.
///
/// # Errors
///
/// No pod answers here, or it does not invite.
pub async fn invite(asked: Invite, env: &Environment) -> Result<String, Failure> {
    let body = json!({ "node": asked.node.as_str(), "seconds": asked.lasting.as_secs() });
    let (answer, choice) = told(asked.socket, "/invitations", body.to_string(), env).await?;
    let invited: Invited = serde_json::from_slice(&answer)
        .map_err(|cause| Failure::unavailable(format!("the pod is of another version: {cause}")))?;
    let Invited { code, cloud, .. } = invited;
    Ok(format!(
        "{choice}on {node}, within {lasting}, as root:\n  tunnel join {cloud} --invite {code} --node {node}\n\
         It works once, and lets whoever has it be {node}: send it by a way that others do not read.\n",
        node = asked.node,
        lasting = words(asked.lasting),
    ))
}

/// Has a pod forget a node's token.
///
/// # Errors
///
/// No pod answers here, or there is nothing to revoke.
pub async fn revoke(asked: Revoke, env: &Environment) -> Result<String, Failure> {
    let body = json!({ "node": asked.node.as_str() });
    let (_, choice) = told(asked.socket, "/revocations", body.to_string(), env).await?;
    Ok(format!("{choice}revoked: the links of {} end within a few seconds\n", asked.node))
}

/// The pod's answer, and which pod of this machine was asked if there are several.
async fn told(
    named: Option<PathBuf>,
    path: &str,
    body: String,
    env: &Environment,
) -> Result<(Vec<u8>, String), Failure> {
    let socket = socket(named, &["cloud"], env).await?;
    let (code, answer) = ask(&socket.path, Method::POST, path, body).await?;
    if code == 200 {
        return Ok((answer.to_vec(), socket.choice()));
    }
    Err(Failure::unavailable(crate::telemetry::printable(String::from_utf8_lossy(&answer).trim_end())))
}

/// As people say it.
fn words(lasting: Duration) -> String {
    let seconds = lasting.as_secs();
    match seconds {
        s if s % 3600 == 0 => format!("{} h", s / 3600),
        s if s % 60 == 0 => format!("{} min", s / 60),
        s => format!("{s} s"),
    }
}

fn lasting(text: &str) -> Result<Duration, String> {
    let wanted = "want a whole number with s, m or h, from 1m to 168h";
    let unit = text.chars().last().and_then(|unit| UNITS.iter().find(|(name, _)| *name == unit));
    let (unit, seconds) = unit.ok_or(wanted)?;
    let number: u64 = text.strip_suffix(*unit).unwrap_or_default().parse().map_err(|_| wanted)?;
    let lasting = Duration::from_secs(number.saturating_mul(*seconds));
    if (LEAST..=MOST).contains(&lasting) { Ok(lasting) } else { Err(wanted.to_owned()) }
}

const UNITS: [(char, u64); 3] = [('s', 1), ('m', 60), ('h', 3600)];
/// Enough to carry a line to another machine.
const LEAST: Duration = Duration::from_secs(60);
/// A week.
const MOST: Duration = Duration::from_secs(168 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_needs_its_unit_and_has_limits() {
        assert_eq!(lasting("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(lasting("168h"), Ok(MOST));
        for bad in ["", "1", "h", "59s", "169h", "-1h", "1hh", "1d", "99999999999999999999h"] {
            assert!(lasting(bad).unwrap_err().contains("from 1m to 168h"), "{bad}");
        }
        assert_eq!([3600, 5400, 90].map(|s| words(Duration::from_secs(s))), ["1 h", "90 min", "90 s"]);
    }
}
