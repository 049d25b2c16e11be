//! Durations, sizes and untrusted texts, formatted for people.

/// Formats seconds in their two largest units: `45s`, `3m20s`, `5h12m`, `12d3h`.
pub(crate) fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    let days = whole / 86_400;
    let hours = whole / 3600 % 24;
    let minutes = whole / 60 % 60;
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{whole}s"),
        (0, 0, _) => format!("{minutes}m{}s", whole % 60),
        (0, ..) => format!("{hours}h{minutes}m"),
        _ => format!("{days}d{hours}h"),
    }
}

/// Formats seconds as milliseconds, with as many digits as are significant.
pub(crate) fn round_trip(seconds: f64) -> String {
    let millis = seconds * 1000.0;
    if millis < 10.0 { format!("{millis:.2} ms") } else { format!("{millis:.0} ms") }
}

/// Formats bytes in a suitable unit.
pub(crate) fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}
