//! `tunnel status`: what a pod or edge of this machine does now.

mod table;
mod words;

use std::path::PathBuf;

use http::Method;

use super::Failure;
use super::socket::{ask, socket};
use crate::admin::{LinkStatus, Status};
use crate::config::Environment;
use table::Table;
use words::{bytes, clean, duration, round_trip};

/// Asks a pod or edge of this machine what it does, as a table, or as the JSON of its answer. The table is preceded by
/// the sockets of other programs that run here.
///
/// # Errors
///
/// Nobody answers.
pub async fn status(named: Option<PathBuf>, json: bool, env: &Environment) -> Result<String, Failure> {
    let socket = socket(named, &["cloud", "edge"], env).await?;
    let path = &socket.path;
    let (code, body) = ask(path, Method::GET, "/status", "").await?;
    if code != 200 {
        let text = format!("{} answered {code}: {}", path.display(), clean(&String::from_utf8_lossy(&body)));
        return Err(Failure::unavailable(text));
    }
    if json {
        return Ok(String::from_utf8_lossy(&body).into_owned());
    }
    let told: Status = serde_json::from_slice(&body).map_err(|cause| {
        Failure::unavailable(format!("{} is of another version: {cause}", path.display()))
    })?;
    Ok(socket.choice() + &text(&told))
}

/// The status for people.
fn text(told: &Status) -> String {
    let what = told.node.as_ref().map_or_else(|| "pod".to_owned(), |node| format!("edge of {}", clean(node)));
    let state = if told.ready { "ready" } else { "not ready" };
    let up = duration(told.now - told.started);
    let mut lines =
        vec![format!("{what} {}, version {}, up {up}, {state}", told.process, clean(&told.version))];
    let totals = told.totals;
    lines.push(format!(
        "{} sessions, {} more pass through; {} to targets, {} from them",
        totals.sessions,
        totals.passing,
        bytes(totals.up_bytes),
        bytes(totals.down_bytes)
    ));
    lines.extend(told.notes.iter().map(|note| format!("! {}", clean(note))));
    if let Some(publisher) = &told.publisher {
        let error = publisher.error.as_ref().map(|error| format!("; failing: {}", clean(error)));
        lines.push(format!(
            "published: {} records ({}), {} failures{}",
            publisher.records,
            clean(&publisher.store),
            publisher.failures,
            error.unwrap_or_default()
        ));
    }
    let (pod, now) = (told.mode == "cloud", told.now);
    lines.push(String::new());
    lines.push(links(if pod { "NODE" } else { "LINK" }, &told.links, now));
    if told.links.is_empty() {
        lines.push(if pod { "no node is linked" } else { "not linked: the line above says why" }.to_owned());
    }
    if !told.gone.is_empty() {
        let mut table = Table::new(&["GONE", "AGO", "WHY"]);
        for gone in &told.gone {
            let why = gone.error.as_ref().map_or("-".to_owned(), |error| clean(&error.text));
            table.row(vec![clean(&gone.name), duration(now - gone.at), why]);
        }
        lines.extend([String::new(), table.to_string()]);
    }
    if !told.siblings.is_empty() {
        lines.extend([String::new(), links("OTHER POD", &told.siblings, now)]);
    }
    lines.join("\n")
}

fn links(title: &'static str, links: &[LinkStatus], now: f64) -> String {
    let mut table = Table::new(&[
        title,
        "STATE",
        "LINKED",
        "RTT",
        "SESSIONS",
        "SENT",
        "RECEIVED",
        "VERSION",
        "DIALECT",
        "FROM",
        "LAST ERROR",
    ]);
    let or_dash = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), clean);
    for link in links {
        let error = link.error.as_ref().map_or("-".to_owned(), |error| {
            let ago = error.at.map(|at| format!(" ({} ago)", duration(now - at)));
            clean(&error.text) + &ago.unwrap_or_default()
        });
        table.row(vec![
            clean(&link.name),
            clean(&link.state),
            link.since.map_or("-".to_owned(), |since| duration(now - since)),
            link.round_trip.map_or("-".to_owned(), round_trip),
            link.sessions.to_string(),
            bytes(link.sent_bytes),
            bytes(link.received_bytes),
            or_dash(&link.version),
            or_dash(&link.dialect),
            or_dash(&link.address),
            error,
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests;
