//! The table at the end of a run: each figure with its reference and its requirement.

use std::fmt::Write;

/// Rows in order of arrival.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Row>,
}

/// One figure.
#[derive(Debug)]
pub(crate) struct Row {
    /// What was measured.
    pub(crate) figure: String,
    /// The program's own number, with its unit.
    pub(crate) tunnel: String,
    /// The number it is compared with, with its unit; may be empty.
    pub(crate) reference: String,
    /// Numbers of other proxies; may be empty.
    pub(crate) others: String,
    /// The value that the requirement applies to: usually a ratio.
    pub(crate) value: f64,
    /// The requirement; `None` if the row only informs.
    pub(crate) bound: Option<Bound>,
}

/// A bound of a value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    /// At least the first value; the second is the goal.
    Least(f64, f64),
    /// At most the first value; the second is the goal.
    Most(f64, f64),
}

impl Table {
    /// Adds a row, and prints it at once.
    pub(crate) fn add(&mut self, row: Row) {
        eprintln!("{}", row.cells().join(" | "));
        self.rows.push(row);
    }

    /// Returns the table as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let heads = ["figure", "tunnel", "reference", "others", "value", "required", "goal", ""];
        grid(&heads.map(str::to_owned), self.rows.iter().map(Row::cells))
    }

    /// Returns the number of requirements that were met, as a sentence.
    pub(crate) fn verdict(&self) -> String {
        let bounded = self.rows.iter().filter(|row| row.bound.is_some()).count();
        let met = |row: &&Row| row.bound.is_some_and(|bound| bound.kept(row.value));
        format!("{} of {bounded} requirements met.", self.rows.iter().filter(met).count())
    }
}

impl Row {
    fn cells(&self) -> [String; 8] {
        let (required, goal, verdict) = match self.bound {
            None => (String::new(), String::new(), ""),
            Some(bound) => {
                let (sign, must, goal) = match bound {
                    Bound::Least(must, goal) => ("≥", must, goal),
                    Bound::Most(must, goal) => ("≤", must, goal),
                };
                let verdict = match (bound.kept(self.value), bound.reached(self.value)) {
                    (true, true) => "ok, goal",
                    (true, false) => "ok",
                    (false, _) => "**MISS**",
                };
                (format!("{sign} {must}"), format!("{sign} {goal}"), verdict)
            }
        };
        let value = if self.value.is_nan() { String::new() } else { short(self.value) };
        let [figure, tunnel, reference, others] =
            [&self.figure, &self.tunnel, &self.reference, &self.others].map(Clone::clone);
        [figure, tunnel, reference, others, value, required, goal, verdict.to_owned()]
    }
}

impl Bound {
    /// Returns true if the requirement is met. A value that could not be measured (NaN) meets none.
    fn kept(self, value: f64) -> bool {
        match self {
            Self::Least(must, _) => value >= must,
            Self::Most(must, _) => value <= must,
        }
    }

    fn reached(self, value: f64) -> bool {
        match self {
            Self::Least(_, goal) => value >= goal,
            Self::Most(_, goal) => value <= goal,
        }
    }
}

/// Returns a table as Markdown.
pub(crate) fn grid(heads: &[String], rows: impl IntoIterator<Item: AsRef<[String]>>) -> String {
    let mut text = format!("| {} |\n|{}\n", heads.join(" | "), " --- |".repeat(heads.len()));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.as_ref().join(" | "));
    }
    text
}

/// Formats a number with its significant digits.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        size if size.is_nan() => "-".to_owned(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Converts bytes to MiB.
#[expect(clippy::cast_precision_loss, reason = "no process has 2^52 bytes")]
pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Returns the median of some values; NaN if there are none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let upper = values.get(values.len() / 2);
    let lower = values.get(values.len().saturating_sub(1) / 2);
    upper.zip(lower).map_or(f64::NAN, |(a, b)| (a + b) / 2.0)
}

/// Returns the second smallest and second largest of ten values or more: the true median is between them with a
/// probability of at least 97 %, whatever the distribution. `None` for fewer values.
pub(crate) fn interval(values: &[f64]) -> Option<[f64; 2]> {
    if values.len() < 10 {
        return None;
    }
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    Some([values[1], values[values.len() - 2]])
}

/// Returns the largest of some values; NaN if there are none.
pub(crate) fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NAN, f64::max)
}
