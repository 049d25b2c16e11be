//! What a client may write after CONNECT: either parsed or rejected, and unchanged when printed and parsed again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tunnel_proto::names::Target;

fuzz_target!(|text: &str| {
    if let Ok(target) = text.parse::<Target>() {
        assert!(target.port != 0);
        assert_eq!(target.to_string().parse::<Target>().as_ref(), Ok(&target), "{text:?}");
    }
});
