//! The built program among real ones.
