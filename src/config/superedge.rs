//! Translates SuperEdge's files, whose tables are `[mode.cloud]` and `[mode.edge]`, into the program's schema.
//!
//! Only this file and its `rows` know SuperEdge's spellings and its defaults. All of SuperEdge's parsers ignore case
//! and `_`, so both are ignored here too.

pub(crate) mod rows;
mod values;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::superedge::rows::{EDGE, KeyTranslation, SERVER, ValueConversion};
use crate::config::superedge::values::ValueError;
use crate::config::value::{self, suggestion};
use crate::config::{Environment, ParsedConfig, WarningKind, cluster};

use ValueConversion::{Dropped, Filled, List, Port, Split, TlsVersion};

/// Returns the file in the program's schema. A file without the table `mode` is in it already.
pub(crate) fn translate<'t>(
    file: DeTable<'t>,
    env: &Environment,
    report: &mut ConfigDiagnostics,
) -> DeTable<'t> {
    translate_for(TranslationPurpose::Run(env), file, report)
}

/// Converts a file of SuperEdge. What depends on the cluster is kept wherever this runs.
pub fn convert(text: &str) -> ParsedConfig<toml::Table> {
    let mut report = ConfigDiagnostics::default();
    let file = report.parse(text);
    let file = translate_for(TranslationPurpose::Convert, file, &mut report);
    let table = file
        .iter()
        .map(|(name, value)| (name.get_ref().to_string(), values::plain(value.get_ref())))
        .collect();
    report.finish(text, table)
}

/// Why a file is translated.
#[derive(Debug, Clone, Copy)]
enum TranslationPurpose<'e> {
    /// The program runs with it, in this environment.
    Run(&'e Environment),
    /// A command prints it in the program's schema.
    Convert,
}

/// Returns true if both values are equal. A number may be in quotes. Tables and lists are never equal, as they are not
/// compared.
fn same(a: &DeValue<'_>, b: &DeValue<'_>) -> bool {
    let scalar = |of: &DeValue<'_>| match of {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => value::integer(number).map(|n| n.to_string()),
        DeValue::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    };
    scalar(a).is_some() && scalar(a) == scalar(b)
}

fn translate_for<'t>(
    purpose: TranslationPurpose<'_>,
    mut file: DeTable<'t>,
    report: &mut ConfigDiagnostics,
) -> DeTable<'t> {
    let Some(name) = file.keys().find(|name| fold(name.get_ref()) == "mode").cloned() else { return file };
    let place = name.span().start;
    let Some(mode) = file.remove(&name) else { return file };
    if let Some(ours) = ["server", "edge"].into_iter().find(|ours| file.contains_key(*ours)) {
        let found = Some(format!("[{ours}] is also in this file"));
        report.place_error(Some(place), "mode", found, format!("keep [{ours}], or SuperEdge's tables"));
        return file;
    }
    let DeValue::Table(roles) = mode.into_inner() else {
        let found = Some("not a table".to_owned());
        report.place_error(Some(place), "mode", found, "expected [mode.cloud] or [mode.edge]");
        return file;
    };
    for (role, settings) in roles {
        let (new, rows) = match fold(role.get_ref()).as_str() {
            "cloud" => ("server", rows(SERVER)),
            "edge" => ("edge", rows(EDGE)),
            unknown => {
                let key = format!("mode.{}", value::excerpt(role.get_ref()));
                let hint = suggestion(unknown, ["cloud", "edge"].into_iter());
                report.unknown(role.span().start, &key, &hint);
                continue;
            }
        };
        let shown = format!("mode.{}", role.get_ref());
        if file.contains_key(new) {
            let at = Some(role.span().start);
            let found = Some("a second table of that name".to_owned());
            report.place_error(at, &shown, found, "upper and lower case are alike; keep one");
            continue;
        }
        report.spelling.0.insert(new.to_owned(), shown.clone());
        for row in rows.iter().filter(|row| !row.old.contains(&"*".to_owned())) {
            spell(row, new, &shown, report);
        }
        let place = settings.span();
        let DeValue::Table(settings) = settings.into_inner() else {
            report.place_error(Some(place.start), &shown, Some("not a table".to_owned()), "expected a table");
            continue;
        };
        let mut translation =
            Translation { role: new, rows: &rows, leaves: Vec::new(), table: DeTable::new(), report };
        translation.gather(settings, &[], &shown);
        let table = translation.finish(purpose);
        file.insert(
            Spanned::new(role.span(), Cow::Borrowed(new)),
            Spanned::new(role.span(), DeValue::Table(table)),
        );
    }
    file
}

/// Names a key and its table as SuperEdge spells them, for errors about a key that the file lacks.
fn spell(row: &TranslationRow, role: &str, shown: &str, report: &mut ConfigDiagnostics) {
    let (Some((_, table)), Some((old_table, _))) = (row.new.split_last(), row.written.rsplit_once('.'))
    else {
        return;
    };
    let full = |path: &[String]| format!("{role}.{}", values::path(path));
    report.spelling.0.entry(full(&row.new)).or_insert_with(|| format!("{shown}.{}", row.written));
    report.spelling.0.entry(full(table)).or_insert_with(|| format!("{shown}.{old_table}"));
}

/// A row with its patterns split, and the old one folded.
struct TranslationRow {
    /// The old key as it is documented.
    written: String,
    old: Vec<String>,
    new: Vec<String>,
    change: ValueConversion,
}

fn rows(rows: &[KeyTranslation]) -> Vec<TranslationRow> {
    let split = |(old, new, change): &KeyTranslation| TranslationRow {
        written: (*old).to_owned(),
        old: old.split('.').map(fold).collect(),
        new: new.split('.').filter(|part| !part.is_empty()).map(str::to_owned).collect(),
        change: *change,
    };
    rows.iter().map(split).collect()
}

/// A value of the file that is a row's.
struct SuperEdgeValue<'t> {
    /// The folded path below the role. Names that the user chose are not folded.
    path: Vec<String>,
    /// The full key as written.
    shown: String,
    place: Range<usize>,
    value: DeValue<'t>,
}

/// The table of one role while it is translated.
struct Translation<'r, 't> {
    /// `server` or `edge`.
    role: &'static str,
    rows: &'r [TranslationRow],
    leaves: Vec<SuperEdgeValue<'t>>,
    /// The result.
    table: DeTable<'t>,
    report: &'r mut ConfigDiagnostics,
}

impl<'t> Translation<'_, 't> {
    /// Collects the values of the role's tables, and records unknown keys.
    fn gather(&mut self, table: DeTable<'t>, path: &[String], shown: &str) {
        for (name, value) in table {
            let place = name.span();
            let written = name.get_ref();
            let folded = fold(written);
            let part = |part: &str| self.rows.iter().any(|row| row.continues(path, part));
            let (part, quoted) = match part("*") && !part(&folded) {
                true => (written.to_string(), format!("\"{}\"", value::excerpt(written))),
                false => (folded, value::excerpt(written)),
            };
            let path: Vec<_> = path.iter().cloned().chain([part]).collect();
            let shown = format!("{shown}.{quoted}");
            let rows = || self.rows.iter().filter(|row| row.begins_with(&path));
            let exact = rows().any(|row| row.old.len() == path.len());
            let deeper = rows().any(|row| row.old.len() > path.len());
            match value.into_inner() {
                DeValue::Table(table) if deeper => {
                    self.open_table(&path, &shown, &place);
                    self.gather(table, &path, &shown);
                }
                value @ DeValue::Table(_) if exact => {
                    let found = Some(value::shown(&value));
                    self.report.place_error(Some(place.start), &shown, found, "expected a value");
                }
                value if exact => self.leaves.push(SuperEdgeValue { path, shown, place, value }),
                value if deeper => {
                    let found = Some(value::shown(&value));
                    self.report.place_error(Some(place.start), &shown, found, "expected a table");
                }
                _ => self.unknown(&path, &shown, place.start),
            }
        }
    }

    /// Records an unknown key, with the most similar known one.
    fn unknown(&mut self, path: &[String], shown: &str, place: usize) {
        let Some((last, table)) = path.split_last() else { return };
        let below = self.rows.iter().filter(|row| row.begins_with(table));
        let known: BTreeSet<_> = below.filter_map(|row| row.written.split('.').nth(table.len())).collect();
        self.report.unknown(place, shown, &suggestion(last, known.into_iter().filter(|part| *part != "*")));
    }

    /// Creates the table that an old one becomes, so that it is present even if it is empty.
    fn open_table(&mut self, path: &[String], shown: &str, place: &Range<usize>) {
        let Some(row) = self.rows.iter().find(|row| row.begins_with(path) && !row.new.is_empty()) else {
            return;
        };
        let Some(length) =
            (row.new.len() + path.len()).checked_sub(row.old.len()).filter(|length| *length > 0)
        else {
            return;
        };
        let new = row.renamed(path, length);
        self.report.spelling.0.insert(self.full(&new), shown.to_owned());
        let mut table = Some(&mut self.table);
        for part in new {
            table = table.and_then(|table| child(table, &part, place));
        }
    }

    /// Translates the collected values, and adds SuperEdge's defaults.
    fn finish(mut self, purpose: TranslationPurpose<'_>) -> DeTable<'t> {
        let mut leaves = std::mem::take(&mut self.leaves);
        leaves.sort_by_key(|leaf| leaf.place.start);
        self.kubernetes(&leaves, purpose);
        let proxy_ip = self.proxy_ip(&leaves);
        let mut set = BTreeMap::new();
        for leaf in leaves {
            let ip = proxy_ip.filter(|_| leaf.path.first().is_some_and(|table| table == PROXY));
            let rows = self.rows;
            let row = rows.iter().find(|row| row.old.len() == leaf.path.len() && row.begins_with(&leaf.path));
            let Some(row) = row else { continue };
            let new = row.renamed(&leaf.path, row.new.len());
            if let Some(difference) = difference(row, &leaf.value) {
                self.report.warn(leaf.shown.clone(), WarningKind::Unexpected, difference);
            }
            self.set(leaf, row, &new, ip, &mut set);
        }
        self.defaults(purpose);
        self.table
    }

    /// Sets the key of the schema. `set` are the values so far, with the keys that set them.
    fn set(
        &mut self,
        leaf: SuperEdgeValue<'t>,
        row: &TranslationRow,
        new: &[String],
        ip: Option<IpAddr>,
        set: &mut BTreeMap<Vec<String>, (String, DeValue<'t>)>,
    ) {
        let SuperEdgeValue { shown, place, value, .. } = leaf;
        let value = match changed(value, row.change, ip, &place) {
            Ok(Some(value)) => value,
            Ok(None) => return,
            Err(wrong) => {
                self.wrong(&place, &shown, wrong);
                // What depends on the key still sees that it is present.
                self.report.refused.insert(self.full(new));
                return;
            }
        };
        match (row.change, &value) {
            (TlsVersion, DeValue::String(version)) if version.starts_with("VersionTLS") => {
                let text = format!("{version} is insecure and not supported; the oldest version is TLS 1.2");
                return self.report.warn(shown, WarningKind::Unexpected, text);
            }
            (Port(_), DeValue::String(address)) if address.ends_with(":0") => {
                let text = "0 selects a free port, a different one at each start; the log reports it";
                self.report.warn(shown.clone(), WarningKind::Unexpected, text);
            }
            _ => {}
        }
        match set.get(new) {
            Some((_, twin)) if same(twin, &value) => return,
            Some((twin, _)) => {
                let found = Some(format!("{twin} sets the same and has a different value"));
                return self.report.place_error(Some(place.start), &shown, found, "keep one of them");
            }
            None => {}
        }
        self.report.spelling.0.insert(self.full(new), shown.clone());
        set.insert(new.to_vec(), (shown, value.clone()));
        self.put(new, place, value);
    }

    /// Records an error about a value.
    fn wrong(&mut self, place: &Range<usize>, shown: &str, wrong: ValueError) {
        self.report.place_error(Some(place.start), shown, Some(wrong.found), wrong.expected);
    }

    /// Records a warning about a conversion. A start logs what it needs to.
    fn remark(&mut self, purpose: TranslationPurpose<'_>, shown: &str, text: &str) {
        if let TranslationPurpose::Convert = purpose {
            self.report.warn(shown, WarningKind::Unexpected, text);
        }
    }

    /// Sets the keys whose defaults were others in SuperEdge.
    fn defaults(&mut self, purpose: TranslationPurpose<'_>) {
        for (table, key, value) in DEFAULTS {
            let Some(table) = table.strip_prefix(self.role).and_then(|table| table.strip_prefix('.')) else {
                continue;
            };
            let found = self.table.get(table).map(Spanned::get_ref);
            let is_set = matches!(found, Some(DeValue::Table(found)) if found.contains_key(key));
            let path = [table.to_owned(), key.to_owned()];
            let full = self.full(&path);
            if is_set || self.report.refused.contains(&full) {
                continue;
            }
            if table == "connect" {
                let text =
                    "SuperEdge opens port 22 to any client without this table, and so does [server.connect]";
                self.remark(purpose, "mode.cloud.ssh", text);
            }
            self.report.implied.insert(full);
            self.put(&path, 0..0, DeValue::String(value.into()));
        }
    }

    /// Returns the address that `ip` or `proxyip` of the HTTP proxy sets.
    fn proxy_ip(&mut self, leaves: &[SuperEdgeValue<'t>]) -> Option<IpAddr> {
        let mut found = None;
        for SuperEdgeValue { path, shown, place, value } in leaves {
            if path != &[PROXY, "ip"] && path != &[PROXY, "proxyip"] {
                continue;
            }
            match values::parsed(value) {
                Ok(ip) => found = found.or(Some(ip)),
                Err(wrong) => self.wrong(place, shown, wrong),
            }
        }
        found
    }

    /// Translates the tables `dns` and `register`: the ConfigMap to publish in, and the Service that lists the servers.
    /// Outside of a cluster they have no effect, so SuperEdge's files load anywhere.
    fn kubernetes(&mut self, leaves: &[SuperEdgeValue<'t>], purpose: TranslationPurpose<'_>) {
        let find = |path: [&str; 3]| leaves.iter().find(|leaf| leaf.path == path);
        let mut text = |path| {
            let leaf = find(path)?;
            let name = values::text(&leaf.value)
                .and_then(|text| cluster::parse_name(&text).map_err(|why| values::wrong(&leaf.value, why)))
                .map_err(|wrong| self.wrong(&leaf.place, &leaf.shown, wrong));
            name.ok().flatten().map(|name| (name, leaf))
        };
        let configmap = text(["stream", "dns", "configmap"]);
        let older = text(["stream", "dns", "service"]);
        let newer = text(["stream", "register", "service"]);
        let service = newer.or(older);
        if let Some(leaf) = find(["stream", "dns", "debug"]) {
            match values::flag(&leaf.value) {
                Ok(false) => {}
                Ok(true) => {
                    let text = "true: no names are published and no peers searched, so [server.dns] and [server.peers] are absent";
                    return self.remark(purpose, &leaf.shown, text);
                }
                Err(wrong) => self.wrong(&leaf.place, &leaf.shown, wrong),
            }
        }
        if let TranslationPurpose::Run(env) = purpose
            && let Err(why) = cluster::reached(env)
        {
            let used = [&configmap, &service].into_iter().flatten();
            let tables: BTreeSet<_> =
                used.filter_map(|(_, leaf)| Some(leaf.shown.rsplit_once('.')?.0)).collect();
            for table in tables {
                let text = format!("nothing is published in a ConfigMap, and no Service lists peers: {why}");
                self.report.warn(table, WarningKind::Unsupported, text);
            }
            return;
        }
        if let Some((name, leaf)) = configmap {
            self.imply(&["dns", "publish"], leaf, "configmap");
            self.imply(&["dns", "configmap"], leaf, &name);
        }
        if let Some((name, leaf)) = service {
            self.imply(&["peers", "kubernetes_service"], leaf, &name);
            let text = "several servers also need peer_ca of [server.links], and the right to list and watch endpointslices";
            self.remark(purpose, &leaf.shown, text);
        }
    }

    /// Sets a key that the file does not have.
    fn imply(&mut self, path: &[&str], leaf: &SuperEdgeValue<'t>, text: &str) {
        let path: Vec<_> = path.iter().map(|part| (*part).to_owned()).collect();
        self.report.spelling.0.insert(self.full(&path), leaf.shown.clone());
        self.report.implied.insert(self.full(&path));
        self.put(&path, leaf.place.clone(), DeValue::String(text.to_owned().into()));
    }

    fn full(&self, path: &[String]) -> String {
        format!("{}.{}", self.role, values::path(path))
    }

    /// Sets a key of the schema. Two spellings of a table whose keys the user chose may have one of them with a value
    /// and with a table, which is an error.
    fn put(&mut self, path: &[String], place: Range<usize>, value: DeValue<'t>) {
        let Some((last, tables)) = path.split_last() else { return };
        let table = tables.iter().try_fold(&mut self.table, |table, part| child(table, part, &place));
        if let Some(table) = table {
            table.insert(Spanned::new(place.clone(), last.clone().into()), Spanned::new(place, value));
        } else {
            let found = Some("the table has another value elsewhere".to_owned());
            let key = self.full(path);
            self.report.place_error(Some(place.start), &key, found, "keep one of them");
        }
    }
}

impl TranslationRow {
    /// Returns true if the old key begins with this path.
    fn begins_with(&self, path: &[String]) -> bool {
        path.len() <= self.old.len() && self.old.iter().zip(path).all(|(old, part)| old == "*" || old == part)
    }

    /// Returns true if the old key has this part below this path.
    fn continues(&self, path: &[String], part: &str) -> bool {
        self.begins_with(path) && self.old.get(path.len()).is_some_and(|old| old == part)
    }

    /// Returns the first parts of the new key, with the name that the user chose.
    fn renamed(&self, path: &[String], length: usize) -> Vec<String> {
        let chosen = self.old.iter().position(|part| part == "*").and_then(|at| path.get(at));
        let part = |part: &String| if part == "*" { chosen.unwrap_or(part).clone() } else { part.clone() };
        self.new.iter().take(length).map(part).collect()
    }
}

/// Returns the nested table of this name, which is created if it is absent; `None` if another value has the name.
fn child<'a, 't>(
    table: &'a mut DeTable<'t>,
    name: &str,
    place: &Range<usize>,
) -> Option<&'a mut DeTable<'t>> {
    let entry = table
        .entry(Spanned::new(place.clone(), Cow::Owned(name.to_owned())))
        .or_insert_with(|| Spanned::new(place.clone(), DeValue::Table(DeTable::new())));
    if let DeValue::Table(table) = entry.get_mut() { Some(table) } else { None }
}

/// Returns the difference from SuperEdge if a value has another effect here, or none.
fn difference(row: &TranslationRow, value: &DeValue<'_>) -> Option<&'static str> {
    let beyond = |target: &str| target.parse::<SocketAddr>().is_ok_and(|target| !target.ip().is_loopback());
    match (row.written.as_str(), value) {
        ("stream.dns.hosts", _) => {
            Some("no effect: no mounted copy is read, as servers ask each other for nodes")
        }
        ("egress.kubeconfig", _) => Some("no effect: the flag --kubeconfig names that file"),
        ("https.addr.*", DeValue::String(target)) if beyond(target) => Some(
            "SuperEdge did not verify this target's certificate, but edges do unless it is on loopback: set ca in \
             [edge.target_tls] of every edge, in the file that `tunnel migrate superedge` prints",
        ),
        _ => None,
    }
}

/// Changes a value. Returns `None` if the key is left out.
fn changed<'t>(
    value: DeValue<'t>,
    change: ValueConversion,
    ip: Option<IpAddr>,
    place: &Range<usize>,
) -> Result<Option<DeValue<'t>>, ValueError> {
    Ok(Some(match (change, value) {
        (Dropped, _) => return Ok(None),
        (Port(default), value) => {
            let port = values::port_number(&value)?;
            let ip = ip.map_or_else(
                || default.parse().map_err(|_| values::wrong(&value, "expected an address")),
                Ok,
            )?;
            DeValue::String(SocketAddr::new(ip, port).to_string().into())
        }
        (Filled, DeValue::String(text)) if text.is_empty() => return Ok(None),
        (Split, DeValue::String(list)) => {
            let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
            let item = |name: &str| Spanned::new(place.clone(), DeValue::String(name.to_owned().into()));
            DeValue::Array(names.map(item).collect())
        }
        (List, text @ DeValue::String(_)) => {
            DeValue::Array([Spanned::new(place.clone(), text)].into_iter().collect())
        }
        (TlsVersion, DeValue::String(text)) => match text.as_ref() {
            "" => return Ok(None),
            "VersionTLS12" => DeValue::String("1.2".into()),
            "VersionTLS13" => DeValue::String("1.3".into()),
            "VersionTLS10" | "VersionTLS11" => DeValue::String(text),
            _ => return Err(values::wrong(&DeValue::String(text), "expected VersionTLS12 or VersionTLS13")),
        },
        (_, value) => value,
    }))
}

/// Ignores case and `_`: SuperEdge's old spelling is its new one without `_`, and its parser ignores case.
fn fold(key: &str) -> String {
    key.chars().filter(|c| *c != '_').flat_map(char::to_lowercase).take(MAX_KEY_LEN).collect()
}

/// Maximum number of characters of a key that are compared. Known keys are much shorter, and the similarity search is
/// quadratic.
const MAX_KEY_LEN: usize = 64;

/// SuperEdge's defaults that differ from this program's: table, key and value. It opens port 22 even if its file does
/// not set it, and its manifests probe port 51010.
const DEFAULTS: [(&str, &str, &str); 5] = [
    ("server.connect", "listen", "0.0.0.0:22"),
    ("server.links", "cert", "/etc/tunnel/certs/cloud.crt"),
    ("server.links", "key", "/etc/tunnel/certs/cloud.key"),
    ("server.links", "admin_listen", ADMIN),
    ("edge.uplink", "admin_listen", ADMIN),
];

/// The table of the HTTP proxy, folded.
const PROXY: &str = "httpproxy";

/// The address of SuperEdge's admin listener.
const ADMIN: &str = "127.0.0.1:51010";
