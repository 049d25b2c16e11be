//! The forms of types that are a text outside of the program: names here, patterns and rules elsewhere.

/// Implements `Debug` like `Display`.
#[macro_export]
macro_rules! debug_as_display {
    ($($of:ty),*) => {$(
        impl std::fmt::Debug for $of {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    )*};
}

/// Serializes types through `Display` and deserializes them through `FromStr`.
#[macro_export]
macro_rules! serde_as_text {
    ($($of:ty),*) => {$(
        impl serde::Serialize for $of {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $of {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <String as serde::Deserialize>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}
