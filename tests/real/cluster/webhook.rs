//! A webhook on the node, which kube-apiserver calls for each new ConfigMap.

use std::path::Path;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};

use super::Cluster;
use crate::network::address;
use crate::process::{Running, TIMEOUT};
use crate::wait::wait_until;

/// How kube-apiserver finds the webhook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WebhookAddress {
    /// By a Service with an endpoint on the node.
    Service,
    /// By a URL with the node's name.
    Url,
}

impl Cluster {
    /// Starts the webhook on `node1`, checks that kube-apiserver gets its responses, and removes its configuration.
    pub(crate) fn webhook_answers(&self, hook: WebhookAddress) {
        let mut webhook = self.webhook();
        let place = match hook {
            WebhookAddress::Service => {
                self.apply("hook", &service());
                self.apply("hook-endpoints", &endpoints());
                json!({"service": {"namespace": "default", "name": "hook"}})
            }
            WebhookAddress::Url => json!({"url": format!("https://node1:{PORT}/")}),
        };
        let ca = BASE64_STANDARD.encode(self.network.place.authority.0.cert());
        self.apply("webhook", &configuration(place, &ca));
        // `failurePolicy` is `Fail`: without its response, objects are refused.
        wait_until("kube-apiserver receives the webhook's refusal", 3 * TIMEOUT, || {
            let output = self.network.try_sh("kubectl create configmap unwelcome --dry-run=server");
            !output.status.success() && output.stderr.contains("node1 says no")
        });
        self.sh("kubectl create configmap welcome --dry-run=server");
        webhook.wait_for_log("asked of welcome");
        self.sh(&format!("kubectl delete validatingwebhookconfiguration {NAME}"));
    }

    fn webhook(&self) -> Running {
        let (dir, authority) = (self.network.place.path(), &self.network.place.authority.0);
        let (cert, key) = (dir.join("webhook.crt"), dir.join("webhook.key"));
        authority.server(&["node1", "hook.default.svc"]).unwrap().write(&cert, &key).unwrap();
        let mut socat = self.network.edges[0].command("socat");
        socat.arg(format!(
            "OPENSSL-LISTEN:{PORT},fork,reuseaddr,verify=0,cert={},key={}",
            cert.display(),
            key.display()
        ));
        socat.arg(format!("EXEC:{}", Path::new(SOURCES).join("webhook.sh").display()));
        Running::start("webhook", dir, &mut socat)
    }
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "hook"},
        "spec": {"ports": [{"port": 443}]},
    })
}

fn endpoints() -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "hook-1", "labels": {"kubernetes.io/service-name": "hook"}},
        "endpoints": [{"addresses": [address(1)], "nodeName": "node1"}], "ports": [{"port": PORT}],
    })
}

fn configuration(place: Value, ca: &str) -> Value {
    let mut client = place;
    client["caBundle"] = ca.into();
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": NAME},
        "webhooks": [{
            "name": "webhook.example.org", "clientConfig": client, "admissionReviewVersions": ["v1"],
            "sideEffects": "None", "failurePolicy": "Fail", "timeoutSeconds": 10,
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
        }],
    })
}

/// The port where it listens on the node.
pub(crate) const PORT: u16 = 9443;

const NAME: &str = "at-the-edge";
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/real/cluster");
