//! Modules that serve remotes write log lines by `limited!`, except lines whose number no remote decides.

use crate::{Token, Violation, error, is_tests, module_of, report, sources, tokens, without_tests};

/// Modules in which a remote may cause lines.
const LIMITED: [&str; 9] =
    ["acceptor", "admin", "invitations", "link", "listener", "registry", "route", "server", "session_io"];

/// Lines that the macros of `tracing` write: the file, their number, and why no remote decides how often.
const EXEMPT: [(&str, usize, &str); 18] = [
    ("admin/certificate_expiry.rs", 1, "once while the disk of the audit log is full"),
    ("admin/sessions.rs", 1, "an operator who has proved a name ends sessions that exist"),
    ("enrolment.rs", 5, "operators change rights; once for each join"),
    ("enrolment/grants.rs", 2, "operators change rights"),
    ("enrolment/seen.rs", 1, "at most a tenth of all devices in a day"),
    ("enrolment/shared_state.rs", 1, "the first of several failed reads of the store"),
    ("link/backup.rs", 4, "timers of this end decide when a link is unresponsive"),
    ("admission/auth.rs", 1, "the users file is read"),
    ("listener/intercept/reconciler.rs", 4, "start, stop, config, and changes of the kernel's answer"),
    ("listener/tcp.rs", 1, "once for each port"),
    ("registry/peers/addresses.rs", 1, "each new error of DNS, which a timer asks"),
    ("registry/peers/peer.rs", 2, "this server dials, with pauses"),
    ("server.rs", 1, "the start"),
    ("server/config_files.rs", 3, "start"),
    ("server/edge_links.rs", 5, "the token file is read, and operators revoke tokens"),
    ("server/listeners.rs", 2, "listeners open and close with the config"),
    ("server/shutdown.rs", 3, "the process stops"),
    ("session_io/judged.rs", 1, "operators change rights"),
];

#[test]
fn lines_that_remotes_cause_are_limited() {
    let errors: Vec<_> = sources().iter().flat_map(|(file, text)| violations(file, text)).collect();
    report(&errors);
}

#[test]
fn an_unlimited_line_and_an_empty_condition_are_found() {
    let lines_of = |text: &str| violations("server/x.rs", text).iter().map(|it| it.line).collect::<Vec<_>>();
    assert_eq!(
        lines_of("fn f() {\n    tracing::warn!(\"x\");\n    limited!(true => info, \"y\");\n}\n"),
        [2, 3]
    );
    assert!(
        lines_of("fn f() {\n    limited!(metrics.refuse(door, \"a\", ip) => info, \"y\");\n}\n").is_empty()
    );
    assert!(violations("edge.rs", "fn f() { warn!(\"x\"); }").is_empty(), "another module");
}

fn violations(file: &str, text: &str) -> Vec<Violation> {
    if is_tests(file) || !module_of(file).first().is_some_and(|room| LIMITED.contains(&room.as_str())) {
        return Vec::new();
    }
    let tokens = tokens(without_tests(text));
    let is_macro = |at: usize| tokens.get(at + 1).is_some_and(|next| next.text == "!");
    let named = |names: &[&str]| -> Vec<usize> {
        (0..tokens.len()).filter(|at| names.contains(&tokens[*at].text.as_str()) && is_macro(*at)).collect()
    };
    let exempt = EXEMPT.iter().find(|(exempt, ..)| *exempt == file).map_or(0, |(_, lines, _)| *lines);
    let unlimited = named(&["info", "warn", "error", "event"]);
    let mut errors = Vec::new();
    if unlimited.len() != exempt {
        let line = unlimited.last().map_or(1, |at| tokens[*at].line);
        let rule = format!("{} lines without a limit, {exempt} are exempt: use limited!", unlimited.len());
        errors.push(error(file, line, rule));
    }
    let unasked = named(&["limited"]).into_iter().filter(|at| !asks(&tokens[*at..]));
    errors.extend(unasked.map(|at| error(file, tokens[at].line, "limited! has no limit".into())));
    errors
}

/// Returns true if the condition of a `limited!` asks whether the line may be written.
fn asks(tokens: &[Token]) -> bool {
    let condition = tokens.iter().take_while(|token| token.text != ">");
    condition.into_iter().any(|token| token.text == "refuse" || token.text.starts_with("may_log"))
}
