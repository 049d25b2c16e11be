//! What the objects of an old deployment say.

use std::collections::BTreeMap;

use serde_json::Value;

/// What was found of YurtTunnel.
#[derive(Debug, Default)]
pub(super) struct Old {
    /// The server's flags, in their order, without dashes.
    pub(super) server: Option<Vec<(String, String)>>,
    /// The agent's.
    pub(super) agent: Option<Vec<(String, String)>>,
    /// What the ConfigMap of ports holds, and its namespace.
    pub(super) ports: Option<(String, BTreeMap<String, String>)>,
    /// Whether there is the ConfigMap of node names.
    pub(super) has_names: bool,
    /// Service and type of each Service of it.
    pub(super) services: Vec<(String, String)>,
}

impl Old {
    /// Takes in the objects of a text, which are several documents or lists of them.
    ///
    /// # Errors
    ///
    /// It is neither YAML nor JSON.
    pub(super) fn add(&mut self, text: &str) -> Result<(), String> {
        let objects: Vec<Value> = serde_saphyr::from_multiple(text)
            .map_err(|cause| format!("neither YAML nor JSON as kubectl prints it: {}", first_line(&cause)))?;
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
            "ConfigMap" if name == NAMES => self.has_names = true,
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

/// Name and value of each flag: `--name=value`, `--name value`, or a switch.
fn flags(words: &[&str]) -> Vec<(String, String)> {
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

/// Texts by their keys; a number that somebody has written without quotes is one.
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
const NAMES: &str = "yurt-tunnel-nodes";
const SERVICES: &str = "x-tunnel-server-";

/// What `kubectl get` prints are lists of objects; of more than a few in each other there is no need.
const LISTS_IN_LISTS: usize = 3;
