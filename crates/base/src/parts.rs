//! Optional parts of the program, which are cargo's features.

/// `Ok` if the part is compiled in, otherwise the reason why it cannot be used, with a hint.
pub type Part = Result<(), &'static str>;

/// Returns the [`Part`] of a feature of the calling crate.
#[macro_export]
macro_rules! part {
    ($feature:tt, $what:tt) => {
        if cfg!(feature = $feature) {
            Ok(())
        } else {
            Err(concat!(
                "this program is built without ",
                $what,
                "; build it with cargo's feature \"",
                $feature,
                "\""
            ))
        }
    };
}
