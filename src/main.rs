//! Command line, logging, runtime; alone sets exit codes.

fn main() {}
