//! Exit codes. Those above 1 are from sysexits.h, with the names there.

/// The command line is wrong.
pub const USAGE: u8 = 64;
/// A port is unavailable, or a service does not answer.
pub const UNAVAILABLE: u8 = 69;
/// The system lacks something that any program needs.
pub const OS_ERROR: u8 = 71;
/// A file cannot be written.
pub const CANNOT_CREATE: u8 = 73;
/// A session was interrupted.
pub const IO_ERROR: u8 = 74;
/// This user lacks a permission.
pub const NO_PERMISSION: u8 = 77;
/// The config, or a file that it names, is wrong.
pub const CONFIG: u8 = 78;

/// All exit codes with their meanings, the most severe error first. docs/reference/exit-codes.md has details.
pub const ALL: [(u8, &str); 9] = [
    (0, "success, or stopped by a signal"),
    (1, "the demo, or a check of the doctor, failed"),
    (USAGE, "the command line is wrong"),
    (CONFIG, "the config, or a file that it names, is wrong"),
    (NO_PERMISSION, "permission denied, or the request was refused"),
    (IO_ERROR, "a session was interrupted"),
    (CANNOT_CREATE, "a file cannot be written"),
    (OS_ERROR, "the system lacks a resource"),
    (UNAVAILABLE, "a port is unavailable, or there is no answer"),
];

/// Returns the lines for the program's help.
pub(crate) fn help() -> String {
    let lines = ALL.map(|(code, meaning)| format!("  {code:>2}  {meaning}"));
    format!("Exit codes (the first that applies):\n{}", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_has_a_row_for_each_exit_code() {
        let reference = std::fs::read_to_string("docs/reference/exit-codes.md").unwrap();
        let rows = reference.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
        let rows: Vec<_> = rows.filter_map(|(code, rest)| Some((code.parse::<u8>().ok()?, rest))).collect();
        let rows: Vec<_> =
            rows.into_iter().map(|(code, rest)| (code, rest.split(" | ").next().unwrap())).collect();
        assert_eq!(rows, ALL);
    }
}
