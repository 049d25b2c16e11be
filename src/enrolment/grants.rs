//! Grants of users, in a text of their own next to that of invitations.

use serde::Deserialize as _;
use serde_json::Value;
use tracing::field::display;
use tracing::info;

use crate::enrolment::store::Enrolments;
use crate::enrolment::{SharedEnrolments, revocation_message};
use crate::invitations::GrantSelection;
use tunnel_base::logging::AUDIT;
use tunnel_base::policy::grants::{Grant, UserGrants, giver};
use tunnel_base::unix_time::now;

impl SharedEnrolments {
    /// Gives a grant, and removes those that have ended.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be used, or is full.
    pub async fn grant(&self, grant: &Grant) -> Result<(), String> {
        let most = self.most_grants;
        let new = serde_json::to_value(grant).map_err(|cause| cause.to_string())?;
        let give = |all: &mut Enrolments| {
            // Once, although a write whose response was lost is tried again.
            all.grants.retain(|one| is_live(one) && one["id"] != new["id"]);
            all.grants.push(new.clone());
            // An admin may give under the names of many devices.
            let of_admin = giver(&grant.by).map(|admin| (Some(admin), most.div_ceil(10)));
            for (by, most) in of_admin.into_iter().chain([(None, most)]) {
                let of = all.grants.iter().filter(|one| by.is_none() || giver_of(one) == by);
                let sizes: Vec<_> = of.map(|one| one.to_string().len()).collect();
                if sizes.len() > most || sizes.iter().sum::<usize>() > most.saturating_mul(MEAN_BYTES) {
                    let whose = if by.is_some() { " by one admin" } else { "" };
                    return Err(format!(
                        "no room for more than {most} grants of {MEAN_BYTES} bytes{whose}; revoke some"
                    ));
                }
            }
            Ok(())
        };
        self.grants.change(give).await?;
        let Grant { id, user, nodes, ports, with_join_keys, until, by } = grant;
        let ports = ports.iter().flatten().map(|port| port.0).collect::<Vec<_>>();
        info!(target: AUDIT, actor = by, grant = id, %user, ?nodes, ?ports, with_join_keys, until, "grant given");
        Ok(())
    }

    /// Revokes the grants that are selected and that the actor `who` `may` revoke. Returns how many there were.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be used.
    pub(crate) async fn revoke_grants(
        &self,
        selection: &GrantSelection,
        may: impl Fn(&Value) -> bool,
        who: &str,
    ) -> Result<usize, String> {
        let is_selected = |one: &mut Value| contains(selection, one) && may(one);
        let revoke = |all: &mut Enrolments| Ok(all.grants.extract_if(.., is_selected).count());
        let revoked = self.grants.change(revoke).await;
        let is_done = revoked.as_ref().map(|grants| *grants > 0);
        if let Some(message) = revocation_message(&is_done, "grants revoked") {
            let GrantSelection { id, user, by } = selection;
            let error = revoked.as_ref().err().map(display);
            info!(target: AUDIT, actor = who, grant = id, user, by, error, "{message}");
        }
        revoked
    }

    /// Returns the grants that have not ended, as last read.
    pub fn live_grants(&self) -> Vec<Value> {
        self.grants.known().grants.iter().filter(|one| is_live(one)).cloned().collect()
    }

    /// Returns the grants as last read, by user, without those of newer servers. While it is not known which nodes came
    /// by join keys, there are only those that were known `before`.
    pub fn user_grants(&self, before: &UserGrants) -> UserGrants {
        // First, as a read may end meanwhile.
        let is_read = self.was_read() && self.grants.was_read();
        let is_current = self.is_current();
        let known = self.grants.known();
        let understood = known.grants.iter().filter_map(|one| Grant::deserialize(one).ok());
        let understood = understood.filter(|grant| is_current || before.contains(grant));
        UserGrants::new(understood, is_read.then(|| self.known().joined_by_key()))
    }
}

fn is_live(one: &Value) -> bool {
    one["until"].as_u64().is_none_or(|until| until > now())
}

fn contains(GrantSelection { id, user, by }: &GrantSelection, one: &Value) -> bool {
    let has = |key: &str, wanted: &Option<String>| wanted.as_ref().is_some_and(|wanted| one[key] == *wanted);
    // A user includes all her devices.
    let giver = giver_of(one);
    has("id", id) || has("user", user) || has("by", by) || giver.is_some() && giver == by.as_deref()
}

pub(crate) fn giver_of(one: &Value) -> Option<&str> {
    one["by"].as_str().and_then(giver)
}

/// Average size of the grants for which a store has room, in bytes. So those in a Secret leave room for invitations.
const MEAN_BYTES: usize = 200;
