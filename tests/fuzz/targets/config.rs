//! What an operator may write into a config file: either a config, or errors with a reason, one per line.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tunnel::config::{ConfigErrors, Environment};
use tunnel::edge::config::EdgeConfig;
use tunnel::server::config::ServerConfig;

fuzz_target!(|text: &str| {
    let env = Environment::default();
    check(ServerConfig::read(text, &env).err());
    check(EdgeConfig::read(text, &env).err());
});

fn check(errors: Option<ConfigErrors>) {
    let Some(errors) = errors else { return };
    let text = errors.to_string();
    assert!(errors.iter().count() > 0, "rejected without a reason");
    assert_eq!(text.lines().count(), errors.iter().count(), "{text}");
    // Errors must not contain escape sequences of the file, as a terminal would interpret them.
    assert!(!text.contains('\u{1b}'), "{text:?}");
}
