//! A Kubernetes with a kube-controller-manager that signs certificates, and with the permissions of `deploy`.

use std::path::Path;
use std::process::Command;

use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use serde_json::json;

use crate::apiserver;
use crate::kubernetes::Kubernetes;
use crate::parts::{cached_program, free_port};
use crate::process::{Running, TIMEOUT, run_command};
use crate::tunnel::tunnel;
use crate::wait::wait_until;

pub(crate) struct Signer {
    // Fields drop in order: clients of kube-apiserver before it.
    approver: Option<Running>,
    _manager: Running,
    pub(crate) kubernetes: Kubernetes,
}

impl Signer {
    /// Starts one that signs certificates for `duration`. Returns `None` if its programs are not installed. Approves
    /// nothing yet.
    pub(crate) fn start(duration: &str) -> Option<Self> {
        let (manager, kubectl) = (
            cached_program("kubernetes-1.36.3/kube-controller-manager")?,
            cached_program("kubernetes-1.36.3/kubectl")?,
        );
        let kubernetes = Kubernetes::start()?;
        apply(&kubernetes, &kubectl, "csr");
        let place = kubernetes.place();
        let mut command = apiserver::signer(Command::new(manager), place, free_port(), duration);
        let manager = Running::start("controller-manager", place.path(), &mut command);
        Some(Self { approver: None, _manager: manager, kubernetes })
    }

    /// Starts `tunnel approve`, and waits until it watches requests.
    pub(crate) fn approve(&mut self) {
        let (place, health) = (self.kubernetes.place(), free_port());
        let mut command = apiserver::approver(tunnel(), place, health);
        let mut approver = Running::start("approver", place.path(), &mut command);
        approver.wait_for_exact_answer(health, "/readyz", "ok\n");
        self.approver = Some(approver);
    }
}

fn apply(kubernetes: &Kubernetes, kubectl: &Path, part: &str) {
    let rights = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kustomize").join(part);
    wait_until(&format!("{part} is applied"), 3 * TIMEOUT, || {
        let mut command = Command::new(kubectl);
        command.arg("--kubeconfig").arg(kubernetes.admin()).args(["apply", "-k"]).arg(&rights);
        run_command("kubectl", &mut command, None, TIMEOUT).status.success()
    });
}

/// Allows an account to request certificates.
pub(crate) fn permit_requests(kubernetes: &Kubernetes, user: &str) {
    let rbac = "rbac.authorization.k8s.io";
    kubernetes.apply_everywhere::<ClusterRoleBinding>(&json!({
        "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "others"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "tunnel-csr"},
        "subjects": [{"apiGroup": rbac, "kind": "User", "name": user}],
    }));
}
