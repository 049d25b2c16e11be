//! Tables with aligned columns.

use std::fmt;

/// A table of text with aligned columns, printed by commands.
#[derive(Debug)]
pub(crate) struct Table {
    pub(super) rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(titles: &[&str]) -> Self {
        Self { rows: vec![titles.iter().map(|title| (*title).to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let cells = |column: usize| self.rows.iter().filter_map(move |row| row.get(column));
        let width = |column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or_default();
        // Wider columns cannot be formatted.
        let widths: Vec<usize> =
            (0..columns).map(|column| width(column).min(usize::from(u16::MAX))).collect();
        for (number, row) in self.rows.iter().enumerate() {
            if number > 0 {
                f.write_str("\n")?;
            }
            let line: String =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  ")).collect();
            f.write_str(line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_may_be_longer_than_a_width_can_be() {
        let mut table = Table::new(&["ID", "USER"]);
        let id = "x".repeat(100_000);
        table.row(vec![id.clone(), "alice".into()]);
        assert!(table.to_string().ends_with(&format!("{id}  alice")));
    }
}
