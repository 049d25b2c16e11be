//! Checks the language of the pages: old words, the length of sentences and of pages, and the list of pages.
//!
//! Fenced code and headings are ignored. A piece of inline code is one word, and so is a list of such pieces.

use super::{Project, root};

/// Words and phrases that pages no longer use; docs/reference/glossary.md has the words in use.
const BANNED_WORDS: &str = "anew, any more, are to be, as far as, as it stands, asks, at the least, at the most, \
                         authorities, authority, back end, be had, begun, believed, believes, beside, by itself, \
                         by themselves, caught, comes in, counts for, everybody, falls silent, far end, fault, faults, \
                         for want of, for who, front end, front ends, gives way, goes on, gone, grace time, heard, hears, \
                         in vain, is asked for, is to be, leads to, led to, let in, lets in, look at, looks at, looks for, \
                         mend, nobody, of late, of our own, of who, one that, one which, or else, says, sibling, siblings, \
                         so long, so many, so often, somebody, stands, stood, tells, those that, those who, told, \
                         under way, verdict, wanted, wants, whoever, whose, without end";
/// Maximum number of words of a sentence, and of one of the README.
const MAX_WORDS: usize = 40;
const MAX_README_WORDS: usize = 30;
/// Maximum median of the words of a page's sentences. Cells of tables are not counted.
const MAX_MEDIAN: usize = 18;
/// Maximum number of lines of a page, and of the README.
const MAX_LINES: usize = 250;
const MAX_README_LINES: usize = 140;
const README: &str = "README.md";
/// Pages that may be longer: two of record, and three that are generated.
const LONG_PAGES: [&str; 5] = [
    "docs/protocol.md",
    "docs/benchmarks.md",
    "docs/reference/config.md",
    "docs/reference/commands.md",
    "docs/reference/json.md",
];

#[test]
fn pages_use_plain_words_and_short_sentences_and_have_a_limited_length() {
    let project = Project::read(root());
    let pages = project.texts.iter().filter(|(file, _)| is_page(file));
    let errors: Vec<_> = pages.flat_map(|(file, text)| errors(file, text)).collect();
    assert!(errors.is_empty(), "{} errors:\n{}", errors.len(), errors.join("\n"));
}

#[test]
fn the_summary_lists_every_page() {
    let project = Project::read(root());
    let summary = &project.texts["docs/SUMMARY.md"];
    let pages = project.texts.keys().filter_map(|file| file.strip_prefix("docs/"));
    let pages = pages.filter(|page| page.ends_with(".md") && *page != "SUMMARY.md");
    let missing: Vec<_> = pages.filter(|page| !summary.contains(&format!("]({page})"))).collect();
    assert!(missing.is_empty(), "not in docs/SUMMARY.md: {missing:?}");
}

/// Returns true for files that people read in English: Markdown, and the configs to start from.
fn is_page(file: &str) -> bool {
    let is_english = !file.starts_with("tests/") && !file.starts_with("docs/zh/");
    let is_markdown = file.ends_with(".md") && is_english;
    is_markdown && file != "docs/SUMMARY.md" || file.starts_with("conf/") && file.ends_with(".toml")
}

/// Returns the errors of a page, each with its file and, if it has one, its line.
fn errors(file: &str, text: &str) -> Vec<String> {
    let (mut errors, mut lengths) = (Vec::new(), Vec::new());
    for Block { line, is_cell, words } in blocks(file, text) {
        for sentence in sentences(&words) {
            if sentence.len() > if file == README { MAX_README_WORDS } else { MAX_WORDS } {
                let start = sentence.iter().take(8).copied().collect::<Vec<_>>().join(" ");
                errors.push(format!("{file}:{line}: {} words: {start} …", sentence.len()));
            }
            if !is_cell {
                lengths.push(sentence.len());
            }
        }
        let plain: Vec<_> = words.iter().map(|word| unpunctuated(word)).collect();
        let plain = format!(" {} ", plain.join(" "));
        let old = BANNED_WORDS.split(", ").filter(|old| plain.contains(&format!(" {old} ")));
        errors.extend(old.map(|old| format!("{file}:{line}: {old}")));
    }
    lengths.sort_unstable();
    let median = lengths.get(lengths.len().saturating_sub(1) / 2).copied().unwrap_or_default();
    if median > MAX_MEDIAN {
        errors.push(format!("{file}: the median of its sentences is {median} words"));
    }
    let lines = text.lines().count();
    let most = if file == README { MAX_README_LINES } else { MAX_LINES };
    if lines > most && !LONG_PAGES.contains(&file) {
        errors.push(format!("{file}: {lines} lines"));
    }
    errors
}

/// A paragraph, an item of a list, or a cell of a table.
struct Block {
    line: usize,
    is_cell: bool,
    words: Vec<String>,
}

fn blocks(file: &str, text: &str) -> Vec<Block> {
    let (mut blocks, mut open) = (Vec::new(), None);
    let mut is_fenced = false;
    for (line, number) in text.lines().zip(1..) {
        let line = if file.ends_with(".md") { Some(line) } else { line.strip_prefix("# ") };
        let line = line.unwrap_or_default().trim();
        if line.starts_with("```") {
            is_fenced = !is_fenced;
            blocks.extend(open.take());
        } else if is_fenced || line.is_empty() || line.starts_with('#') {
            blocks.extend(open.take());
        } else if line.starts_with('|') {
            blocks.extend(open.take());
            let cells = line.trim_matches('|').split(" | ");
            blocks.extend(cells.map(|cell| Block { line: number, is_cell: true, words: words(cell) }));
        } else {
            let item = line.strip_prefix("- ").or_else(|| {
                let (count, item) = line.split_once(". ")?;
                count.parse::<u8>().ok().map(|_| item)
            });
            if item.is_some() {
                blocks.extend(open.take());
            }
            let start = || Block { line: number, is_cell: false, words: Vec::new() };
            let block = open.get_or_insert_with(start);
            block.words.push(item.unwrap_or(line).to_owned());
        }
    }
    blocks.extend(open);
    let join = |block: Block| Block { words: words(&block.words.join(" ")), ..block };
    blocks.into_iter().map(|block| if block.is_cell { block } else { join(block) }).collect()
}

/// Returns the words of a text. Inline code is the word `CODE`, and a list of such words is one. Targets of links are
/// left out.
fn words(text: &str) -> Vec<String> {
    let plain: Vec<_> =
        text.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { CODE }).collect();
    let plain = plain.concat();
    let mut parts = plain.split("](");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        shown += part.split_once(')').map_or(part, |(_, rest)| rest);
    }
    let mut words: Vec<String> = Vec::new();
    for word in shown.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)) {
        let is_listed = words.last().is_some_and(|last| matches!(last.as_str(), "CODE," | "CODE"));
        if is_listed && bare(word) == CODE {
            words.pop();
        }
        words.push(word.to_owned());
    }
    words
}

/// Returns the sentences in a list of words.
fn sentences(words: &[String]) -> Vec<Vec<&str>> {
    let mut sentences = vec![Vec::new()];
    for word in words {
        sentences.last_mut().expect("there is one").push(word.as_str());
        if word.trim_end_matches(['"', ')', ']', '*']).ends_with(['.', '?', '!']) {
            sentences.push(Vec::new());
        }
    }
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

/// Returns a word in lower case, with ` |` in the place of punctuation after it, as no phrase goes beyond that.
fn unpunctuated(word: &str) -> String {
    let end = if word.ends_with(char::is_alphanumeric) { "" } else { " |" };
    format!("{}{end}", bare(word).to_lowercase())
}

fn bare(word: &str) -> &str {
    word.trim_matches(|c: char| !c.is_alphanumeric())
}

const CODE: &str = "CODE";

#[test]
fn banned_words_long_sentences_and_long_pages_are_found() {
    let errors = |text: &str| errors("docs/a.md", text);
    assert_eq!(errors("# Whoever\n\nIt is plain. `whoever`\n```\nwhoever\n```\n"), Vec::<String>::new());
    assert_eq!(errors("a\n\nA line of a paragraph, and\nWhoever reads it."), ["docs/a.md:3: whoever"]);
    assert_eq!(errors("| a | none (at the most) |"), ["docs/a.md:1: at the most"]);
    assert_eq!(errors("It is the last one, which is long."), Vec::<String>::new());
    let long = |words: usize| format!("| {} |", "word ".repeat(words).trim_end());
    assert_eq!(errors(&long(40)), Vec::<String>::new());
    assert_eq!(errors(&long(41)).len(), 1);
    assert_eq!(errors(&"word ".repeat(18)), Vec::<String>::new());
    assert_eq!(errors(&"word ".repeat(19)), ["docs/a.md: the median of its sentences is 19 words"]);
    assert_eq!(errors(&"`code`, ".repeat(50)), Vec::<String>::new());
    assert_eq!(errors(&"\n".repeat(251)), ["docs/a.md: 251 lines"]);
    assert_eq!(
        errors("[a link](whoever.md) of one. Another of [two\nwords](x.md#told)"),
        Vec::<String>::new()
    );
}
