//! The objects of an old deployment.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::parts::with_kubernetes;

/// The objects of YurtTunnel that were found.
#[derive(Debug, Default)]
pub(crate) struct YurtTunnelDeployment {
    /// The server's flags, in their order, without dashes.
    pub(crate) server: Option<Vec<(String, String)>>,
    /// The agent's flags.
    pub(crate) agent: Option<Vec<(String, String)>>,
    /// Namespace and contents of the ConfigMap of ports.
    pub(crate) ports: Option<(String, BTreeMap<String, String>)>,
    /// Whether the ConfigMap of node names exists.
    pub(crate) has_names: bool,
    /// Name and type of each of its Services.
    pub(crate) services: Vec<(String, String)>,
}

impl YurtTunnelDeployment {
    /// Adds the objects of a text, which consists of documents or lists of objects.
    ///
    /// # Errors
    ///
    /// Returns an error if it is neither YAML nor JSON.
    pub(crate) fn add(&mut self, text: &str) -> Result<(), String> {
        let objects =
            with_kubernetes!(api::objects(text).map_err(|cause| first_line(&cause)), else Ok(Vec::new()));
        let objects: Vec<Value> = objects
            .map_err(|cause: String| format!("neither YAML nor JSON as kubectl prints it: {cause}"))?;
        objects.iter().for_each(|object| self.take(object, LISTS_IN_LISTS));
        Ok(())
    }

    fn take(&mut self, object: &Value, depth: usize) {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        match object["kind"].as_str().unwrap_or_default() {
            list if list.ends_with("List") && depth > 0 => {
                object["items"].as_array().into_iter().flatten().for_each(|item| self.take(item, depth - 1));
            }
            "ConfigMap" if name == PORTS => {
                let namespace = object["metadata"]["namespace"].as_str().unwrap_or("kube-system");
                self.ports = Some((namespace.to_owned(), data(&object["data"])));
            }
            "ConfigMap" if name == OLD_NAMES => self.has_names = true,
            "Service" if name.starts_with(SERVICES) => {
                let kind = object["spec"]["type"].as_str().unwrap_or("ClusterIP");
                self.services.push((name.to_owned(), kind.to_owned()));
            }
            "Deployment" | "DaemonSet" | "StatefulSet" => self.workload(&object["spec"]["template"]["spec"]),
            "Pod" => self.workload(&object["spec"]),
            _ => {}
        }
    }

    fn workload(&mut self, spec: &Value) {
        for container in spec["containers"].as_array().into_iter().flatten() {
            let words: Vec<_> = ["command", "args"]
                .iter()
                .flat_map(|key| container[key].as_array().into_iter().flatten())
                .filter_map(Value::as_str)
                .collect();
            let says = |program: &str| {
                let named = [&container["name"], &container["image"]];
                let named = named.into_iter().filter_map(Value::as_str).chain(words.first().copied());
                named.into_iter().any(|text| text.contains(program))
            };
            if says(SERVER) {
                self.server = Some(flags(&words));
            } else if says(AGENT) {
                self.agent = Some(flags(&words));
            }
        }
    }
}

/// Returns name and value of each flag: `--name=value`, `--name value`, or a switch.
pub(super) fn flags(words: &[&str]) -> Vec<(String, String)> {
    let mut flags = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let name = word.trim_start_matches('-');
        if name.len() == word.len() || name.is_empty() {
            continue;
        }
        let (name, value) = match name.split_once('=') {
            Some((name, value)) => (name, value),
            None => (name, words.next_if(|next| !next.starts_with('-')).copied().unwrap_or("true")),
        };
        flags.push((name.to_owned(), value.to_owned()));
    }
    flags
}

/// Returns texts by their keys. A number without quotes is read as a text.
fn data(data: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    data.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), text(value))).collect()
}

fn first_line(cause: &impl ToString) -> String {
    cause.to_string().lines().next().unwrap_or_default().to_owned()
}

const SERVER: &str = "yurt-tunnel-server";
const AGENT: &str = "yurt-tunnel-agent";
const PORTS: &str = "yurt-tunnel-server-cfg";
const OLD_NAMES: &str = "yurt-tunnel-nodes";
const SERVICES: &str = "x-tunnel-server-";

/// Maximum nesting of lists. `kubectl get` prints lists of objects, so few levels are enough.
const LISTS_IN_LISTS: usize = 3;
