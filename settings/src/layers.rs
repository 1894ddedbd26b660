//! From layers to [`Loaded`]: defaults < Horovod's variables < file < environment < flags.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    path::PathBuf,
};

use config::{File, FileFormat, Map, Source, Value, ValueKind};
use gradwire_collectives::Rules;

use gradwire_keys::{
    Checked, Given, Key, Kind, Origin, SettingsError, horovod,
    layers::{self, Layer, merge, unknown},
    section::values,
};

use crate::{
    rules,
    table::{KEYS, Settings},
};

/// Variables that begin with `GRADWIRE_` but are not settings. The launcher sets them for the
/// processes of a job, and users set two of them (`ALONE`, `CONFIG`). Any other variable without
/// `__` is refused as a misspelt setting.
pub const RESERVED_VARIABLES: &[&str] = &[
    "GRADWIRE_ADDRESS",
    "GRADWIRE_BIND",
    "GRADWIRE_ALONE",
    "GRADWIRE_CONFIG",
    "GRADWIRE_COORDINATOR",
    "GRADWIRE_COORDINATOR_METRICS",
    "GRADWIRE_CROSS_RANK",
    "GRADWIRE_CROSS_SIZE",
    "GRADWIRE_DAEMON_METRICS",
    "GRADWIRE_ELASTIC",
    "GRADWIRE_EPOCH",
    "GRADWIRE_HOST",
    "GRADWIRE_JOB",
    "GRADWIRE_LAUNCHED",
    "GRADWIRE_LOCAL_RANK",
    "GRADWIRE_LOCAL_SIZE",
    "GRADWIRE_NODES",
    "GRADWIRE_SERVERS",
    "GRADWIRE_ORDER",
    "GRADWIRE_PATIENCE_MS",
    "GRADWIRE_RANK",
    "GRADWIRE_RANKS",
    "GRADWIRE_RECORD",
    "GRADWIRE_RECORD_BYTES",
    "GRADWIRE_RENDEZVOUS",
    "GRADWIRE_REPLAY",
    "GRADWIRE_SECRET",
    "GRADWIRE_SECRET_FILE",
    "GRADWIRE_SIZE",
    "GRADWIRE_SLOTS",
    "GRADWIRE_SOCKET",
    "GRADWIRE_STDERR",
    "GRADWIRE_SURVIVORS",
    "GRADWIRE_WORKER",
    "GRADWIRE_WORKERS",
];

/// The layers above the defaults, lowest first.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    /// A TOML file that must exist.
    pub file: Option<PathBuf>,
    /// The process's environment. Only variables that begin with `GRADWIRE_` and
    /// [`horovod::VARIABLES`] are read.
    pub environment: HashMap<String, String>,
    /// The arguments of `--set`, each `section.key=value`; the last one for a key counts.
    pub flags: Vec<String>,
}

/// A key with its value and the value's origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The key.
    pub key: &'static Key,
    /// The value in its written form.
    pub value: String,
    /// Where it was written.
    pub origin: Origin,
}

/// Settings, and the origin of each.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The typed values.
    pub settings: Settings,
    /// One row for each key, in the order of [`KEYS`].
    pub rows: Vec<Row>,
    /// Horovod's variables that are set but have no counterpart here.
    pub without_effect: Vec<&'static str>,
}

impl Loaded {
    /// The environment variables that pass the settings on to another process. Defaults are left
    /// out: the other process has the same ones, and shows them as defaults.
    pub fn variables(&self) -> impl Iterator<Item = (String, String)> {
        self.variables_of(|_| true)
    }

    /// As [`Self::variables`], for the rows that `has` selects.
    pub fn variables_of(
        &self,
        has: impl Fn(&Row) -> bool,
    ) -> impl Iterator<Item = (String, String)> {
        self.rows
            .iter()
            .filter(move |row| row.origin != Origin::Default && has(row))
            .map(|row| (row.key.variable(), row.value.clone()))
    }
}

impl Default for Settings {
    fn default() -> Self {
        match Self::load(&Layers::default()) {
            Ok(loaded) => loaded.settings,
            Err(error) => unreachable!("the defaults are valid: {error}"),
        }
    }
}

impl Settings {
    /// Reads and checks all layers.
    ///
    /// # Errors
    /// [`SettingsError`] with the key, the place where it was written and what is accepted.
    pub fn load(layers: &Layers) -> Result<Loaded, SettingsError> {
        let without_effect = horovod::without_effect(&layers.environment);
        let layers = [
            layers::defaults(KEYS),
            layers::horovods(KEYS, &layers.environment)?,
            file(layers)?,
            environment(&layers.environment)?,
            layers::flags(&layers.flags)?,
        ];
        let merged = merge(KEYS, layers, normal)?;
        let mut rows = Vec::with_capacity(KEYS.len());
        for key in KEYS {
            let Some((checked, origin)) = merged.get(key.name) else { continue };
            rows.push(Row { key, value: key.kind.write(checked), origin: origin.clone() });
        }
        let Some(settings) = Self::from_values(&values(merged)) else {
            unreachable!("every key has a default of its kind; a test loads them all")
        };
        rules::validate(&settings).map_err(SettingsError::Rule)?;
        Ok(Loaded { settings, rows, without_effect })
    }
}

/// Rules of algorithms in their normal form, if they can be parsed; other values as they are.
fn normal(key: &Key, checked: Checked) -> Result<Checked, String> {
    match (key.kind, checked) {
        (Kind::Rules, Checked::Text(text)) => match Rules::parse(&text) {
            Ok(rules) => Ok(Checked::Text(rules.to_string())),
            Err(error) => Err(error.to_string()),
        },
        (_, checked) => Ok(checked),
    }
}

fn file(layers: &Layers) -> Result<Layer, SettingsError> {
    let Some(path) = &layers.file else { return Ok(Vec::new()) };
    let text = std::fs::read_to_string(path)
        .map_err(|reason| SettingsError::File { path: path.clone(), reason })?;
    let table = File::from_str(&text, FileFormat::Toml).collect().map_err(|error| {
        SettingsError::Toml { path: path.clone(), reason: error.to_string().trim().to_owned() }
    })?;
    let mut layer = Layer::new();
    flatten("", table, &Origin::File(path.clone()), &mut layer);
    Ok(layer)
}

/// Turns tables into dotted names, sorted, so that the first of several errors is always the same.
fn flatten(prefix: &str, table: Map<String, Value>, origin: &Origin, layer: &mut Layer) {
    for (name, value) in table.into_iter().collect::<BTreeMap<_, _>>() {
        let name = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        match value.kind {
            ValueKind::Table(table) => flatten(&name, table, origin, layer),
            _ => layer.push((name, given(&value), origin.clone())),
        }
    }
}

/// A value of a file.
fn given(value: &Value) -> Given {
    let text = |value: &Value| match value.kind {
        ValueKind::Nil | ValueKind::Table(_) | ValueKind::Array(_) => None,
        _ => Some(value.to_string()),
    };
    let word = |value: &Value| text(value).map(|text| text.trim().to_owned());
    let list = match &value.kind {
        ValueKind::Array(items) => items.iter().map(word).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    match (list, text(value)) {
        (Some(list), _) => Given::List(list),
        (None, Some(text)) => Given::Text(text),
        (None, None) => Given::Other(value.to_string()),
    }
}

/// The environment as text. A variable that is not UTF-8 is left out, unless it should be a
/// setting: then its value has characters that no setting accepts, so that it is refused.
pub fn text(variables: impl IntoIterator<Item = (OsString, OsString)>) -> HashMap<String, String> {
    let should_set = |name: &str| {
        let ours = name.starts_with("GRADWIRE_") && !RESERVED_VARIABLES.contains(&name);
        ours || horovod::VARIABLES
            .iter()
            .any(|(known, effect)| *known == name && matches!(effect, horovod::Effect::Sets { .. }))
    };
    let text = |(name, value): (OsString, OsString)| {
        let name = name.into_string().ok()?;
        match value.into_string() {
            Ok(value) => Some((name, value)),
            Err(value) if should_set(&name) => Some((name, value.to_string_lossy().into_owned())),
            Err(_) => None,
        }
    };
    variables.into_iter().filter_map(text).collect()
}

fn environment(all: &HashMap<String, String>) -> Result<Layer, SettingsError> {
    let mut others: Vec<_> = all
        .keys()
        .filter(|name| name.starts_with("GRADWIRE_") && !name.contains("__"))
        .filter(|name| !RESERVED_VARIABLES.contains(&name.as_str()))
        .collect();
    others.sort();
    match others.first() {
        Some(name) => {
            // The likely mistake is GRADWIRE_DATA_LANES instead of GRADWIRE_DATA__LANES.
            let key = name.trim_start_matches("GRADWIRE_").to_lowercase().replacen('_', ".", 1);
            Err(unknown(KEYS, &key, &Origin::Variable((*name).clone())))
        }
        None => Ok(layers::environment(all)),
    }
}
