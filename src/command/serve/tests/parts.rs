//! Tables of parts that a build may lack, in builds with and without them.

use super::*;
use crate::parts::{KUBERNETES, SUPEREDGE};

/// Returns the errors of a server's config.
fn server(text: &str) -> Vec<String> {
    let text = format!("[server.connect]\nlisten = \"127.0.0.1:22\"\n{text}");
    let read = ServerConfig::read(&text, &inside());
    read.err().map(|errors| errors.iter().map(ToString::to_string).collect()).unwrap_or_default()
}

/// Returns the errors of an edge's config.
fn edge(text: &str) -> Vec<String> {
    let text =
        format!("[edge.uplink]\nnode = \"a\"\nservers = [\"tunnel.test:9000\"]\ntoken = \"t\"\n{text}");
    let read = EdgeConfig::read(&text, &inside());
    read.err().map(|errors| errors.iter().map(ToString::to_string).collect()).unwrap_or_default()
}

fn inside() -> Environment {
    Environment {
        kubernetes_service_host: Some("10.96.0.1".to_owned()),
        pod_ip: Some("10.0.0.1".to_owned()),
        ..Environment::default()
    }
}

#[test]
fn a_table_of_a_feature_that_is_not_compiled_in_is_an_error_that_names_it() {
    for text in [
        "[server.dns]\npublish = \"configmap\"\n",
        "[server.peers]\nkubernetes_service = \"tunnel\"\n",
        "[server.invitations]\nstore = \"secret\"\n",
        "[server.addresses]\nkubernetes = true\n",
        "[server.csr]\nprofiles = [\"proxy-client\"]\n",
        "[server.node_ports]\n",
        "[server.node_names]\n",
    ] {
        match (KUBERNETES, server(text).as_slice()) {
            (Ok(()), errors) => assert!(errors.is_empty(), "{text}: {errors:?}"),
            (Err(why), [error]) => assert!(error.contains(why), "{text}: {error}"),
            (Err(_), errors) => panic!("{text}: {errors:?}"),
        }
    }
    match (KUBERNETES, edge("[edge.csr]\nenabled = true\n").as_slice()) {
        (Ok(()), errors) => assert!(errors.is_empty(), "{errors:?}"),
        (Err(why), errors) => assert!(errors.len() == 1 && errors[0].contains(why), "{errors:?}"),
    }
}

#[test]
fn a_superedge_file_is_an_error_in_a_build_without_superedge() {
    let read = ServerConfig::read("[mode.cloud.ssh]\nport = 22\n", &Environment::default());
    match (SUPEREDGE, read) {
        (Ok(()), read) => assert!(read.is_ok()),
        (Err(why), read) => {
            let errors = read.unwrap_err();
            let keys: Vec<_> = errors.iter().map(|error| error.key.as_str()).collect();
            assert!(keys == ["mode"] && errors.to_string().contains(why), "{errors}");
        }
    }
}
