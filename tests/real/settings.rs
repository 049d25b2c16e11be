//! The settings as other programs read them: JSON Schemas, and the man page of the package.

use std::path::Path;

use crate::parts::{are_installed, skip};
use crate::process::{ProcessOutput, TIMEOUT, run};
use crate::tunnel::{PROGRAM, TestDir};

/// Prints the first error of a TOML file by a schema.
const VALIDATE: &str = "
import json, sys, tomllib
from jsonschema import Draft4Validator
schema = json.load(open(sys.argv[1]))
Draft4Validator.check_schema(schema)
for error in Draft4Validator(schema).iter_errors(tomllib.load(open(sys.argv[2], 'rb'))):
    sys.exit('.'.join(map(str, error.absolute_path)) + ': ' + error.message)
";

fn path(file: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file).display().to_string()
}

fn validate(schema: &str, file: &str) -> ProcessOutput {
    let schema = path(&format!("conf/{schema}.schema.json"));
    run("python3", &["-c", VALIDATE, &schema, file], None, TIMEOUT)
}

/// Returns true if Python has the validator and a parser of TOML; otherwise skips the test.
fn has_validator() -> bool {
    are_installed(&["python3"])
        && (run("python3", &["-c", "import jsonschema, tomllib"], None, TIMEOUT).status.success()
            || skip("Python lacks jsonschema or tomllib"))
}

#[test]
fn the_configs_to_start_from_and_all_documented_settings_fit_their_schemas() {
    if !has_validator() {
        return;
    }
    for (schema, file) in [
        ("server", "conf/server.toml"),
        ("edge", "conf/edge.toml"),
        ("server", "docs/reference/server.toml"),
        ("edge", "docs/reference/edge.toml"),
    ] {
        let output = validate(schema, &path(file));
        assert!(output.status.success(), "{file}: {output:?}");
    }
    // Every key with its example or default, also those that are commented out.
    let place = TestDir::new();
    for role in ["server", "edge"] {
        let text = std::fs::read_to_string(path(&format!("docs/reference/{role}.toml"))).unwrap();
        let is_setting = |line: &&str| {
            line.starts_with('[') && line.ends_with(']')
                || line.split_once(" = ").is_some_and(|(key, _)| is_key(key))
        };
        let lines = text.lines().map(|line| line.trim_start_matches("# ")).filter(is_setting);
        let file = place.config(role, &lines.collect::<Vec<_>>().join("\n")).display().to_string();
        let output = validate(role, &file);
        assert!(output.status.success(), "{role}: {output:?}");
    }
}

fn is_key(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

#[test]
fn values_in_effect_fit_the_schema() {
    if !has_validator() {
        return;
    }
    let place = TestDir::new();
    let text = "[server.tcp]\n\"127.0.0.1:5\" = \"node1/127.0.0.1:6443\"\n[server.connect]\nlisten = \"127.0.0.1:1\"\n\
                rules = [{ nodes = [\"a\"], ports = [22] }]\n[server.http]\nports = { \"10255\" = \"host\" }\n";
    let file = place.config("server", text).display().to_string();
    let shown = run(PROGRAM, &["config", "show", &file], None, TIMEOUT);
    assert!(shown.status.success(), "{shown:?}");
    let output = validate("server", &place.config("shown", &shown.stdout).display().to_string());
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_schema_refuses_wrong_keys_types_and_limits_like_the_program() {
    if !has_validator() {
        return;
    }
    let place = TestDir::new();
    for (role, text, expected) in [
        ("server", "[server.links]\nlisen = \"[::]:9000\"", "'lisen' was unexpected"),
        ("server", "[server.link]\nlisten = \"[::]:9000\"", "'link' was unexpected"),
        ("server", "[server.links]\nlisten = 9000", "server.links.listen: 9000 is not of type 'string'"),
        ("server", "[server.session]\nmax_sessions = 0", "server.session.max_sessions: 0 is less than"),
        ("server", "[server.session]\nresume_timeout = \"60\"", "'60' does not match"),
        ("server", "[server.dns]\npublish = \"host\"", "'host' is not one of"),
        ("server", "[server.tls]\nmin_version = 1.2", "1.2 is not one of"),
        ("server", "[server.connect]\nallow_from = \"10.0.0.0/8\"", "is not of type 'array'"),
        ("server", "[server.connect]\nrules = [{ port = [22] }]", "'port' was unexpected"),
        ("server", "[server.connect]\nrules = [{ ports = [0] }]", "server.connect.rules.0.ports.0"),
        ("server", "[server.http_proxy]\nauth = true", "server.http_proxy.auth: True is not one of"),
        ("server", "[server.tcp]\n\"127.0.0.1:1\" = 5", "server.tcp.127.0.0.1:1"),
        ("server", "[server.tcp.\"127.0.0.1:1\"]\ntarget = \"a:1\"\nnode = \"b\"", "server.tcp.127.0.0.1:1"),
        ("edge", "[edge.uplink]\nserver = [\"a:1\"]", "'server' was unexpected"),
        ("edge", "[edge.uplink]\nservers = [1]", "edge.uplink.servers.0: 1 is not of type 'string'"),
        ("edge", "[edge.session]\nbuffer_memory = \"1MB\"", "'1MB' does not match"),
    ] {
        let file = place.config("wrong", text).display().to_string();
        let output = validate(role, &file);
        assert!(!output.status.success() && output.stderr.contains(expected), "{text}: {output:?}");
        let checked = run(PROGRAM, &["config", "check", &file], None, TIMEOUT);
        assert_eq!(checked.status.code(), Some(78), "{text}: {checked:?}");
    }
    let client = place.config("client", "servers = [\"a:9000\"]\nuser = \"alice\"\ntoken = \"t\"\n");
    let output = validate("client", &client.display().to_string());
    assert!(output.status.success(), "{output:?}");
    let client = place.config("client", "servers = [\"a:9000\"]\npassword = \"p\"\n");
    let output = validate("client", &client.display().to_string());
    assert!(output.stderr.contains("'password' was unexpected"), "{output:?}");
}

#[test]
fn the_man_page_has_each_table_and_key_and_no_markup() {
    if !are_installed(&["awk"]) {
        return;
    }
    let (script, reference) = (path("deploy/debian/tunnel.toml.awk"), path("docs/reference/config.md"));
    let page = run("awk", &["-v", "version=1", "-f", &script, &reference], None, TIMEOUT).stdout;
    let text = std::fs::read_to_string(&reference).unwrap();
    let headings = text.lines().filter_map(|line| {
        let key = line.strip_prefix("### ").map(|key| format!(".SS {key}"));
        key.or_else(|| line.strip_prefix("## ").map(|table| format!(".SH {table}")))
    });
    let headings: Vec<_> = headings.collect();
    assert!(headings.len() > 150 && headings.contains(&".SS client.toml: servers".to_owned()));
    for heading in headings {
        assert!(page.lines().any(|line| line == heading), "{heading}");
    }
    assert!(!page.contains("](") && !page.contains('`') && !page.contains("\n#"), "{page}");
    if are_installed(&["groff"]) {
        let place = TestDir::new();
        let file = place.path().join("tunnel.toml.5");
        std::fs::write(&file, page).unwrap();
        let output =
            run("groff", &["-Kutf8", "-man", "-Tutf8", "-ww", "-z", file.to_str().unwrap()], None, TIMEOUT);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}
