//! Reads a table into a struct through serde, and records all errors of its values at once.
//!
//! serde stops at the first error. [`ConfigTableReader::fields`] records it and reads the table again without that value,
//! until there is no further error.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, Expected, MapAccess, SeqAccess, Unexpected,
    Visitor,
};
use serde::forward_to_deserialize_any;
use toml::de::{DeTable, DeValue};

use crate::config::table::ConfigTableReader;
use crate::config::value::{self, suggestion};

impl ConfigTableReader<'_> {
    /// Reads the keys that are fields of `T`. A key that is absent or has an error, which is recorded, keeps its
    /// default. Several structs may share a table.
    pub(crate) fn fields<T: DeserializeOwned + Default>(&mut self) -> T {
        let mut settings = T::default();
        self.read_fields(&mut |table| {
            settings = T::deserialize(table)?;
            Ok(())
        });
        settings
    }

    /// Reads the table by `read` until there is no further error. It is compiled once for all structs.
    fn read_fields(&mut self, read: &mut dyn FnMut(TableDeserializer<'_, '_>) -> Result<(), FieldError>) {
        let mut pass = ConfigTableState::default();
        let mut errors = Vec::new();
        let mut unlisted = None;
        // serde stops at the first error. Each pass skips the keys with errors so far, so that one check reports them
        // all.
        while let Err(error) = read(TableDeserializer { table: self, pass: &pass }) {
            if errors.len() == MAX_ERRORS {
                unlisted = error.place;
                break;
            }
            pass.skip.insert(error.key.clone());
            errors.push(error);
        }
        let ConfigTableState { skip, fields, nested } = pass;
        // An error of a whole list follows from errors of its items.
        let is_inner =
            |key: &str, of: &str| key.strip_prefix(of).is_some_and(|rest| rest.starts_with(['[', '.']));
        errors.retain(|error| !skip.iter().any(|key| is_inner(key, &error.key)));
        for FieldError { key, place, found, expected } in errors {
            self.report().place_error(place, &self.key(key), found, expected);
        }
        if unlisted.is_some() {
            let found = Some(format!("more than {MAX_ERRORS} errors"));
            let expected = "correct the listed ones first; the rest of the table is not checked";
            self.report().place_error(unlisted, self.path(), found, expected);
        }
        for (key, (place, expected)) in nested.into_inner() {
            self.report().unknown(place, &self.key(key), &expected);
        }
        // A key with an error is taken as well, or it would be reported as unknown, too.
        for field in fields.get() {
            let is_wrong = skip.iter().any(|key| key == field || is_inner(key, field));
            if self.take(field).is_some() && !is_wrong {
                self.report().given.insert(self.key(field));
            }
        }
    }
}

/// The state of reading a table once.
#[derive(Default)]
struct ConfigTableState {
    /// The values that are skipped, by keys relative to the table, as they have errors.
    skip: BTreeSet<String>,
    /// The fields of the struct.
    fields: Cell<&'static [&'static str]>,
    /// Unknown keys of tables in lists, with their position and a hint.
    nested: RefCell<BTreeMap<String, (usize, String)>>,
}

/// The table that a struct is read from.
struct TableDeserializer<'r, 't> {
    table: &'r ConfigTableReader<'t>,
    pass: &'r ConfigTableState,
}

/// A value in the table.
#[derive(Clone)]
struct Value<'r, 't> {
    value: &'r DeValue<'t>,
    /// Its position in the file.
    place: usize,
    /// Its key, relative to the table.
    key: String,
    pass: &'r ConfigTableState,
}

/// The fields of a struct, or the entries of a map, that are present and not skipped.
struct PresentFields<'r, 't> {
    rest: std::vec::IntoIter<(&'r str, Value<'r, 't>)>,
    next: Option<Value<'r, 't>>,
}

/// The items of a list that are not skipped.
struct TomlItems<'r, 't>(std::vec::IntoIter<Value<'r, 't>>);

/// The error of a value.
#[derive(Debug, thiserror::Error)]
#[error("{expected}")]
struct FieldError {
    /// The key of the value, relative to the table; empty until it is known.
    key: String,
    place: Option<usize>,
    /// The value found, unless it is secret.
    found: Option<String>,
    /// What is allowed.
    expected: String,
}

impl<'de> Deserializer<'de> for TableDeserializer<'_, '_> {
    type Error = FieldError;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, FieldError> {
        Err(FieldError::custom("a table is read into a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        visitor.visit_map(self.present(fields))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'r, 't> TableDeserializer<'r, 't> {
    fn present(self, fields: &'static [&'static str]) -> PresentFields<'r, 't> {
        self.pass.fields.set(fields);
        PresentFields::new(fields.iter().filter_map(|field| {
            let (place, value) = self.table.entry(field)?;
            Some((*field, Value { value, place, key: (*field).to_owned(), pass: self.pass }))
        }))
    }
}

impl<'r, 't> Value<'r, 't> {
    /// Returns false if the value had an error in an earlier pass.
    fn is_read(&self) -> bool {
        !self.pass.skip.contains(&self.key)
    }

    /// Adds key, position and value to an error, unless it is of an inner value.
    fn placed(&self, is_secret: bool, error: FieldError) -> FieldError {
        if error.place.is_some() {
            return error;
        }
        let found = if is_secret { value::kind(self.value).to_owned() } else { value::shown(self.value) };
        FieldError { key: self.key.clone(), place: Some(self.place), found: Some(found), ..error }
    }

    fn table(&self) -> Result<&'r DeTable<'t>, FieldError> {
        match self.value {
            DeValue::Table(table) => Ok(table),
            _ => Err(FieldError::custom("expected table: { … }")),
        }
    }

    /// Returns the fields of a struct that a table in a list has, and notes keys that are not its fields.
    fn present(&self, fields: &'static [&'static str]) -> Result<PresentFields<'r, 't>, FieldError> {
        let table = self.table()?;
        for name in table.keys().filter(|name| !fields.contains(&name.get_ref().as_ref())) {
            let unknown = (name.span().start, suggestion(name.get_ref(), fields.iter().copied()));
            let key = format!("{}.{}", self.key, value::excerpt(name.get_ref()));
            self.pass.nested.borrow_mut().insert(key, unknown);
        }
        Ok(PresentFields::new(fields.iter().filter_map(|field| {
            let (name, value) = table.get_key_value(*field)?;
            let place = name.span().start;
            let key = format!("{}.{field}", self.key);
            Some((*field, Value { value: value.get_ref(), place, key, pass: self.pass }))
        })))
    }

    /// Returns the items of a list.
    fn items(&self) -> Result<TomlItems<'r, 't>, FieldError> {
        let DeValue::Array(items) = self.value else {
            return Err(FieldError::custom("expected a list: [\"…\"]"));
        };
        let items = items.iter().enumerate().map(|(i, item)| Value {
            value: item.get_ref(),
            place: item.span().start,
            key: format!("{}[{i}]", self.key),
            pass: self.pass,
        });
        Ok(TomlItems(items.filter(Value::is_read).collect::<Vec<_>>().into_iter()))
    }
}

impl<'de> Deserializer<'de> for Value<'_, '_> {
    type Error = FieldError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match self.value {
            DeValue::String(text) => visitor.visit_str(text),
            DeValue::Boolean(flag) => visitor.visit_bool(*flag),
            DeValue::Integer(number) => match value::integer(number) {
                Some(number) => visitor.visit_i64(number),
                None => Err(FieldError::custom("expected a smaller number")),
            },
            _ => Err(FieldError::custom("expected a text, a number, or true or false")),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match self.value {
            DeValue::String(text) => visitor.visit_str(text),
            _ => Err(FieldError::custom("expected a text in quotes")),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match self.value {
            DeValue::Boolean(flag) => visitor.visit_bool(*flag),
            _ => Err(FieldError::custom("expected true or false")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        let result = visitor.visit_newtype_struct(self.clone());
        result.map_err(|error| if name == "SecretString" { self.placed(true, error) } else { error })
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        visitor.visit_seq(self.items()?)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        visitor.visit_map(self.present(fields)?)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        let entries = self.table()?.iter().map(|(name, value)| {
            let key = format!("{}.\"{}\"", self.key, value::excerpt(name.get_ref()));
            let entry = Value { value: value.get_ref(), place: name.span().start, key, pass: self.pass };
            (name.get_ref().as_ref(), entry)
        });
        visitor.visit_map(PresentFields::new(entries))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        match self.value {
            DeValue::String(text) => visitor.visit_enum(StrDeserializer::new(text)),
            _ => Err(FieldError::custom("expected a text in quotes")),
        }
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct identifier
        ignored_any
    }
}

impl<'r, 't> PresentFields<'r, 't> {
    fn new(present: impl Iterator<Item = (&'r str, Value<'r, 't>)>) -> Self {
        Self {
            rest: present.filter(|(_, value)| value.is_read()).collect::<Vec<_>>().into_iter(),
            next: None,
        }
    }
}

impl<'de> MapAccess<'de> for PresentFields<'_, '_> {
    type Error = FieldError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, FieldError> {
        let Some((name, value)) = self.rest.next() else { return Ok(None) };
        let key = seed.deserialize(StrDeserializer::new(name)).map(Some).map_err(|error| FieldError {
            key: value.key.clone(),
            place: Some(value.place),
            found: Some(format!("{:?}", value::excerpt(name))),
            ..error
        });
        self.next = Some(value);
        key
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, FieldError> {
        let Some(next) = self.next.take() else { return Err(FieldError::custom("expected a value")) };
        seed.deserialize(next.clone()).map_err(|error| next.placed(false, error))
    }
}

impl<'de> SeqAccess<'de> for TomlItems<'_, '_> {
    type Error = FieldError;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, FieldError> {
        let Some(next) = self.0.next() else { return Ok(None) };
        seed.deserialize(next.clone()).map(Some).map_err(|error| next.placed(false, error))
    }
}

impl Error for FieldError {
    fn custom<T: fmt::Display>(expected: T) -> Self {
        Self { key: String::new(), place: None, found: None, expected: expected.to_string() }
    }

    fn invalid_type(_found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::custom(format_args!("expected {expected}"))
    }

    fn invalid_value(_found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::custom(format_args!("expected {expected}"))
    }

    fn unknown_variant(_found: &str, expected: &'static [&'static str]) -> Self {
        let Some((last, rest)) = expected.split_last() else { return Self::custom("expected nothing") };
        let rest: Vec<_> = rest.iter().map(|name| format!("{name:?}")).collect();
        if rest.is_empty() {
            return Self::custom(format_args!("expected {last:?}"));
        }
        Self::custom(format_args!("expected {} or {last:?}", rest.join(", ")))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::custom(format_args!("set {field} in it"))
    }
}

/// Maximum number of errors that are recorded for a table. Each costs one more pass.
const MAX_ERRORS: usize = 100;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;
    use crate::config::table::read_file;
    use crate::config::value::forms::{self, ByteSize, Millis};
    use crate::config::{Environment, ParsedConfig, SecretString};

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Sample {
        name: String,
        password: SecretString,
        is_on: bool,
        kind: Option<Kind>,
        list: Vec<tunnel_base::policy::NodeGlob>,
        rules: Vec<Inner>,
        #[serde(with = "Millis::<100, 60_000>")]
        wait: Option<std::time::Duration>,
        #[serde(deserialize_with = "forms::count::<9, _>")]
        count: usize,
        #[serde(with = "ByteSize::<1024>")]
        size: Option<usize>,
    }

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Inner {
        nodes: Option<Vec<String>>,
        port: u16,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        None,
        Hosts,
        Etcd,
    }

    fn read(text: &str) -> ParsedConfig<Sample> {
        read_file(text, &Environment::default(), |file| {
            let mut table = file.table("t");
            let sample = table.fields();
            table.finish();
            sample
        })
    }

    #[test]
    fn a_table_is_read_as_a_struct_and_absent_keys_have_defaults() {
        let parsed = read(
            "[t]\nname = \"a\"\nkind = \"etcd\"\nrules = [{ nodes = [\"n\"], port = 7 }]\nwait = \"5s\"\n",
        );
        assert!(parsed.errors.is_empty(), "{:?}", parsed.errors);
        let rules = vec![Inner { nodes: Some(vec!["n".to_owned()]), port: 7 }];
        let wait = Some(std::time::Duration::from_secs(5));
        let expected = Sample { name: "a".into(), kind: Some(Kind::Etcd), rules, wait, ..Sample::default() };
        assert_eq!(parsed.settings, expected);
        assert_eq!(parsed.given.into_iter().collect::<Vec<_>>(), ["t.kind", "t.name", "t.rules", "t.wait"]);
        assert_eq!(read("").settings, Sample::default());
    }

    #[test]
    fn all_errors_of_a_table_are_reported_at_once() {
        let parsed = read(
            "[t]\nname = 7\npassword = 8\nis_on = \"yes\"\nkind = \"disk\"\nlist = [\"a b\", \"c\", 5]\n\
             rules = [{ nodes = \"n\", prt = 1 }, 5]\nwait = 60\ncount = 10\nsize = \"4MB\"\nlst = []\n",
        );
        let expected = [
            "line 2: t.name: 7: expected a text in quotes",
            "line 3: t.password: a number: expected a text in quotes",
            "line 4: t.is_on: \"yes\": expected true or false",
            "line 5: t.kind: \"disk\": expected \"none\", \"hosts\" or \"etcd\"",
            "line 6: t.list[0]: \"a b\": not a node name; expected letters, digits, '-', '_', '.', and '*' for any run of them",
            "line 6: t.list[2]: 5: expected a text in quotes",
            "line 7: t.rules[0].nodes: \"n\": expected a list: [\"…\"]",
            "line 7: t.rules[0].prt: unknown key: did you mean port?",
            "line 7: t.rules[1]: 5: expected table: { … }",
            "line 8: t.wait: 60: expected a whole number with its unit (ms, s, m, h or d) in quotes, for example \"5s\" or \"500ms\"",
            "line 9: t.count: 10: expected a whole number from 1 to 9",
            "line 10: t.size: \"4MB\": expected a whole number with its unit (KiB, MiB or GiB) in quotes, for example \"4MiB\"",
            "line 11: t.lst: unknown key: did you mean list?",
        ];
        let errors: Vec<_> = parsed.errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors, expected);
        let kept =
            Sample { list: vec!["c".parse().unwrap()], rules: vec![Inner::default()], ..Sample::default() };
        assert_eq!(parsed.settings, kept);
    }

    #[test]
    fn an_unknown_key_similar_to_none_gets_the_list_of_known_keys() {
        let suggested = |key| suggestion(key, ["server", "edge"].into_iter());
        assert_eq!(suggested("servr"), "did you mean server?");
        assert_eq!(suggested("unknown"), "known here are server, edge");
    }

    #[test]
    fn errors_of_a_table_are_limited_and_the_cut_is_reported() {
        let parsed = read(&format!("[t]\nlist = [{}]\n", "1, ".repeat(10_000)));
        let last = parsed.errors.last().unwrap().to_string();
        let expected = "line 2: t: more than 100 errors: correct the listed ones first; the rest of the table is not checked";
        assert_eq!((parsed.errors.len(), last.as_str()), (MAX_ERRORS + 1, expected));
    }

    proptest! {
        #[test]
        fn no_invalid_value_yields_an_error_text_of_serde(value in "true|7|-1|1\\.5|\"x\"|\"1h\"|\\[\\]|\\[1\\]|\\{\\}|1979-05-27|99999999999999999999") {
            for key in ["name", "password", "is_on", "kind", "list", "rules", "wait", "count", "size"] {
                for error in read(&format!("[t]\n{key} = {value}\n")).errors {
                    let text = error.to_string();
                    prop_assert!(text.contains("expected") || text.contains("not a node name"), "{}", text);
                    prop_assert!(!text.contains("invalid") && !text.contains("sequence"), "{}", text);
                }
            }
        }
    }
}
