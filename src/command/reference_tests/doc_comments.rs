//! Reads doc comments and attributes in the sources, from which pages of the reference are generated.

use std::path::{Path, PathBuf};

use syn::{Attribute, Expr, ExprLit, Item, Lit, Meta};

/// Returns the items of all source files of the crate base and of the program, in the order of the files' names.
pub(crate) fn items() -> Vec<Item> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let all = ["crates/base/src", "src"].map(|part| sources(&root.join(part))).concat();
    all.iter().flat_map(|source| syn::parse_file(source).unwrap().items).collect()
}

/// Returns the sources below a directory.
fn sources(directory: &Path) -> Vec<String> {
    let mut entries: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    let read = |path: PathBuf| match path.extension() {
        None => sources(&path),
        Some(kind) if kind == "rs" => vec![std::fs::read_to_string(path).unwrap()],
        Some(_) => Vec::new(),
    };
    entries.into_iter().flat_map(read).collect()
}

/// Returns the doc comment of an item.
pub(crate) fn doc_comment(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(doc) if doc.path.is_ident("doc") => match &doc.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value().trim().to_owned()),
            _ => None,
        },
        _ => None,
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the words in an attribute of this name, such as those of `derive`.
pub(crate) fn words_of(attributes: &[Attribute], name: &str) -> String {
    let lists = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident(name) => Some(list.tokens.to_string()),
        _ => None,
    });
    lists.collect::<Vec<_>>().join(", ")
}
