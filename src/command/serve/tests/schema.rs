//! The JSON Schemas of the config files, for editors. They are generated from the same tables and keys as the
//! reference, and from what the program accepts as values. `UPDATE_REFERENCE=1` rewrites them.
//!
//! A schema knows the keys, their types and limits. Only the program knows which keys belong together.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value as Json, json};
use toml::Value;

use crate::config::value::forms::{DURATIONS, SIZES};

use super::reference::{INHERITED, Key, Place, TableReference, client, tables};
use super::*;

/// Taplo, which checks TOML in editors, knows this draft.
const DRAFT: &str = "http://json-schema.org/draft-04/schema#";

/// Returns the schema of a table with these keys.
fn object(about: &str, properties: &Map<String, Json>) -> Json {
    let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
    if !about.is_empty() {
        schema["description"] = about.into();
    }
    schema
}

/// Returns the pattern of a whole number with one of these units.
fn quantity<const N: usize>(units: [(&str, u64); N]) -> Json {
    json!({ "type": "string", "pattern": format!("^[0-9]+ ?({})$", units.map(|(name, _)| name).join("|")) })
}

/// Returns the schema of texts of which the program's errors say that this is allowed.
fn text(allowed: &str) -> Json {
    if allowed.starts_with('"') {
        json!({ "enum": allowed.split('"').skip(1).step_by(2).collect::<Vec<_>>() })
    } else if allowed.starts_with("a duration") {
        quantity(DURATIONS)
    } else if allowed.starts_with("a size") {
        quantity(SIZES)
    } else if allowed.starts_with("unix:") {
        json!({ "type": "string", "pattern": "^unix:/" })
    } else {
        json!({ "type": "string" })
    }
}

/// Returns the schema of whole numbers, with the limits in what is allowed.
fn number(allowed: &str) -> Json {
    let limits: Vec<u64> = allowed.split(' ').filter_map(|word| word.parse().ok()).collect();
    match limits[..] {
        [least, most] => json!({ "type": "integer", "minimum": least, "maximum": most }),
        _ => json!({ "type": "integer" }),
    }
}

/// Returns the schema of the values at a place that are like the sample, and of the other kinds that the program
/// accepts there.
fn schema(place: &Place, sample: &Value) -> Json {
    let allowed = place.allowed();
    let like_sample = match sample {
        Value::String(_) => text(&allowed),
        Value::Integer(_) => number(&allowed),
        Value::Boolean(_) => json!({ "type": "boolean" }),
        Value::Array(items) => {
            let item = items.first().cloned().unwrap_or_else(|| Value::String(String::new()));
            json!({ "type": "array", "items": schema(&place.item(), &item) })
        }
        Value::Table(sample) => table(place, sample),
        other => panic!("{}: {other}", place.key()),
    };
    let is_text = sample.is_str();
    match sample {
        Value::Integer(_) if place.accepts("\"1\"") => {
            json!({ "anyOf": [like_sample, { "type": "string", "pattern": "^[0-9]+$" }] })
        }
        _ if is_text && place.accepts("1") => json!({ "anyOf": [like_sample, number(&allowed)] }),
        _ => like_sample,
    }
}

/// Returns a value of the kind that is allowed, for a key without an example.
fn like(allowed: &str) -> Value {
    if allowed.starts_with("a list") {
        Value::Array(Vec::new())
    } else if allowed.starts_with("true") {
        Value::Boolean(true)
    } else {
        Value::String(String::new())
    }
}

/// Returns the schema of an inline table: its keys, or names that the user chooses.
fn table(place: &Place, sample: &toml::Table) -> Json {
    let known = place.known_keys();
    if known.is_empty() {
        let (name, value) = sample.iter().next().unwrap();
        return json!({ "type": "object", "additionalProperties": schema(&place.named(name), value) });
    }
    let property = |key: String| {
        let place = place.field(&key);
        let value = sample.get(&key).cloned().unwrap_or_else(|| like(&place.allowed()));
        (key, schema(&place, &value))
    };
    object("", &known.into_iter().map(property).collect())
}

/// Returns the schema of a key.
fn property(table: &str, key: &Key) -> (String, Json) {
    let mut property = schema(&Place::of(table, &key.name), &key.sample());
    property["description"] = key.description().into();
    if let Some(default) = key.default.as_ref().filter(|_| key.default().is_some_and(|text| text != "none")) {
        property["default"] = serde_json::to_value(default).unwrap();
    }
    (key.name.clone(), property)
}

/// Returns the place of a table in the schema of its parent, which is created if it is missing.
fn slot<'s>(root: &'s mut Json, name: &str) -> &'s mut Json {
    let (tables, named) = match name.split_once(".\"") {
        Some((tables, _)) => (tables, true),
        None => (name, false),
    };
    let mut at = root;
    for part in tables.split('.') {
        at = &mut at["properties"][part];
        if at.is_null() {
            *at = object("", &Map::new());
        }
    }
    if named { &mut at["additionalProperties"] } else { at }
}

/// Returns the schema of the config of a role.
fn of_role(role: &str, other: &str) -> Json {
    let mut root = object("", &Map::new());
    let tables = tables(role);
    let all: BTreeMap<String, Json> =
        tables.iter().find(|table| table.name == "server.connect").map_or_else(BTreeMap::new, |table| {
            table.keys.iter().map(|key| property(&table.name, key)).collect()
        });
    for table in &tables {
        let mut properties: Map<String, Json> =
            table.keys.iter().map(|key| property(&table.name, key)).collect();
        if table.inherits {
            let (names, _) = INHERITED.split_once(": ").unwrap();
            properties.extend(names.split(", ").map(|name| (name.to_owned(), all[name].clone())));
        }
        insert(slot(&mut root, &table.name), table, properties);
    }
    root["$schema"] = DRAFT.into();
    root["title"] = format!("Config of tunnel {role}").into();
    let about = format!("Config of tunnel {other}, ignored by tunnel {role}.");
    root["properties"][other] = json!({ "type": "object", "description": about });
    root
}

/// Inserts a table at its place: next to the tables below it, or with its short form if its name is chosen by the user.
fn insert(slot: &mut Json, table: &TableReference, properties: Map<String, Json>) {
    if *slot == Json::Bool(false) {
        let short = json!({ "type": "string" });
        *slot = json!({ "anyOf": [short, object(&table.about(), &properties)] });
        return;
    }
    slot["description"] = table.about().into();
    if let Some(given) = slot["properties"].as_object_mut() {
        given.extend(properties);
    }
}

fn of_client() -> Json {
    let table = client();
    let property = |key: &Key| {
        let schema = if key.allowed.starts_with("a list") {
            json!({ "type": "array", "items": { "type": "string" }, "description": key.about })
        } else if key.allowed.starts_with("a table") {
            let file = json!({ "type": "string" });
            json!({ "type": "object", "additionalProperties": file, "description": key.about })
        } else {
            json!({ "type": "string", "description": key.about })
        };
        (key.name.clone(), schema)
    };
    let mut root = object(&table.about(), &table.keys.iter().map(property).collect());
    root["$schema"] = DRAFT.into();
    root["title"] = "Config of a user of tunnel".into();
    root
}

/// Returns the full keys of a schema that have no keys below them, as in the documented config.
fn keys(schema: &Json, path: &str, found: &mut Vec<String>) {
    for (name, below) in schema["properties"].as_object().unwrap() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let of_named = &below["additionalProperties"]["anyOf"][1];
        match (below["properties"].is_object(), of_named.is_object()) {
            (_, true) => keys(of_named, &format!("{path}.\"[::]:6443\""), found),
            (true, _) => keys(below, &path, found),
            (false, false) => found.push(path),
        }
    }
}

#[test]
fn the_schemas_match_the_sources() {
    for (name, schema) in
        [("server", of_role("server", "edge")), ("edge", of_role("edge", "server")), ("client", of_client())]
    {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("conf/{name}.schema.json"));
        let expected = serde_json::to_string_pretty(&schema).unwrap() + "\n";
        if std::env::var_os("UPDATE_REFERENCE").is_some() {
            std::fs::write(&file, &expected).unwrap();
        }
        let found = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(found == expected, "{} is old; run this test with UPDATE_REFERENCE=1", file.display());
    }
}

#[test]
fn a_schema_has_exactly_the_documented_keys() {
    for (role, other, file) in [("server", "edge", CLOUD), ("edge", "server", EDGE)] {
        let mut schema = of_role(role, other);
        schema["properties"].as_object_mut().unwrap().remove(other);
        let (mut found, mut documented) = (Vec::new(), documented(file));
        keys(&schema, "", &mut found);
        found.sort();
        documented.sort();
        assert_eq!(found, documented);
    }
}
