//! What an edge shows to prove its name.

use serde::{Deserialize, Serialize};

use crate::protocol::wire::hello::HelloError;

/// The JSON in `authorization`. As in Go, the case of member names does not matter.
#[derive(Serialize, Deserialize)]
pub(super) struct Credentials {
    pub(super) nodename: String,
    pub(super) token: String,
}

impl Credentials {
    pub(super) fn read(json: &str) -> Result<Self, HelloError> {
        let members: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(json).map_err(|e| HelloError::NotJson(e.to_string()))?;
        let member = |name: &str| {
            let found = members.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            match found {
                None => Ok(String::new()),
                Some((_, serde_json::Value::String(text))) => Ok(text.clone()),
                Some(_) => Err(HelloError::NotJson(format!("{name} is not a string"))),
            }
        };
        Ok(Self { nodename: member("nodename")?, token: member("token")? })
    }
}
