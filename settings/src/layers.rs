//! From layers to [`Loaded`]: defaults < Horovod's variables < file < environment < flags.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
};

use config::{Environment, File, FileFormat, Map, Source, Value, ValueKind};

use crate::{
    error::SettingsError,
    horovod,
    key::{Checked, Key},
    origin::Origin,
    rules,
    table::{KEYS, Settings},
};

/// Variables that begin with `GRADWIRE_` but are not settings: the launcher sets them for the
/// processes of a job. Any other variable without `__` is refused as a misspelt setting.
pub const RESERVED_VARIABLES: &[&str] = &[
    "GRADWIRE_ADDRESS",
    "GRADWIRE_BIND",
    "GRADWIRE_CONFIG",
    "GRADWIRE_COORDINATOR",
    "GRADWIRE_COORDINATOR_METRICS",
    "GRADWIRE_CROSS_RANK",
    "GRADWIRE_CROSS_SIZE",
    "GRADWIRE_DAEMON_METRICS",
    "GRADWIRE_HOST",
    "GRADWIRE_JOB",
    "GRADWIRE_LAUNCHED",
    "GRADWIRE_LOCAL_RANK",
    "GRADWIRE_LOCAL_SIZE",
    "GRADWIRE_NODES",
    "GRADWIRE_SERVERS",
    "GRADWIRE_ORDER",
    "GRADWIRE_RANK",
    "GRADWIRE_RANKS",
    "GRADWIRE_SECRET",
    "GRADWIRE_SIZE",
    "GRADWIRE_SLOTS",
    "GRADWIRE_SOCKET",
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
        self.rows
            .iter()
            .filter(|row| row.origin != Origin::Default)
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
        let mut values: BTreeMap<&'static str, (Checked, Origin)> = BTreeMap::new();
        let without_effect = horovod::without_effect(&layers.environment);
        let layers = [
            defaults(),
            horovods(&layers.environment)?,
            file(layers)?,
            environment(&layers.environment)?,
            flags(&layers.flags)?,
        ];
        for (name, value, origin) in layers.into_iter().flatten() {
            let key = find(&name, &origin)?;
            let checked = key.kind.check(&value).map_err(|expected| SettingsError::Value {
                key: key.name,
                given: value.to_string(),
                origin: origin.clone(),
                expected,
            })?;
            values.insert(key.name, (checked, origin));
        }
        let mut rows = Vec::with_capacity(KEYS.len());
        for key in KEYS {
            let Some((checked, origin)) = values.get(key.name) else { continue };
            rows.push(Row { key, value: key.kind.write(checked), origin: origin.clone() });
        }
        let checked = values.into_iter().map(|(name, (checked, _))| (name, checked)).collect();
        let Some(settings) = Self::from_checked(&checked) else {
            unreachable!("every key has a default of its kind; a test loads them all")
        };
        rules::validate(&settings).map_err(SettingsError::Rule)?;
        Ok(Loaded { settings, rows, without_effect })
    }
}

type Layer = Vec<(String, Value, Origin)>;

fn defaults() -> Layer {
    KEYS.iter().map(|k| (k.name.to_owned(), Value::from(k.default), Origin::Default)).collect()
}

fn horovods(environment: &HashMap<String, String>) -> Result<Layer, SettingsError> {
    let layer = horovod::settings(environment)?.into_iter();
    Ok(layer.map(|(key, value, origin)| (key.to_owned(), Value::from(value), origin)).collect())
}

fn file(layers: &Layers) -> Result<Layer, SettingsError> {
    let Some(path) = &layers.file else { return Ok(Vec::new()) };
    let text = std::fs::read_to_string(path)
        .map_err(|source| SettingsError::File { path: path.clone(), source })?;
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
            _ => layer.push((name, value, origin.clone())),
        }
    }
}

fn environment(all: &HashMap<String, String>) -> Result<Layer, SettingsError> {
    let (keys, others): (HashMap<_, _>, HashMap<_, _>) = all
        .iter()
        .filter(|(name, _)| name.starts_with("GRADWIRE_"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .partition(|(name, _)| name.contains("__"));
    let mut others: Vec<_> = others.into_keys().collect();
    others.sort();
    if let Some(name) = others.iter().find(|name| !RESERVED_VARIABLES.contains(&name.as_str())) {
        // The likely mistake is GRADWIRE_DATA_LANES instead of GRADWIRE_DATA__LANES.
        let key = name.trim_start_matches("GRADWIRE_").to_lowercase().replacen('_', ".", 1);
        return Err(unknown(&key, &Origin::Variable(name.clone())));
    }
    let source = Environment::with_prefix("GRADWIRE")
        .prefix_separator("_")
        .separator("__")
        .source(Some(keys));
    let table = source.collect().map_err(|error| SettingsError::Rule(error.to_string()))?;
    let mut layer: Layer = table
        .into_iter()
        .map(|(name, value)| {
            let variable = format!("GRADWIRE_{}", name.replace('.', "__").to_uppercase());
            (name, value, Origin::Variable(variable))
        })
        .collect();
    layer.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(layer)
}

fn flags(flags: &[String]) -> Result<Layer, SettingsError> {
    flags
        .iter()
        .map(|flag| match flag.split_once('=') {
            Some((name, value)) => Ok((name.trim().to_owned(), Value::from(value), Origin::Flag)),
            None => Err(SettingsError::Flag { given: flag.clone() }),
        })
        .collect()
}

fn find(name: &str, origin: &Origin) -> Result<&'static Key, SettingsError> {
    KEYS.iter().find(|key| key.name == name).ok_or_else(|| unknown(name, origin))
}

fn unknown(name: &str, origin: &Origin) -> SettingsError {
    // The right key in the wrong section is likelier than any misspelling.
    let likeness = |key: &Key| match (key.name.split_once('.'), name.rsplit_once('.')) {
        (Some((_, tail)), Some((_, given))) if tail == given => 2.0,
        _ => strsim::normalized_damerau_levenshtein(name, key.name),
    };
    let nearest = KEYS
        .iter()
        .map(|key| (likeness(key), key))
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .filter(|(likeness, _)| *likeness >= 0.5);
    let suggestion = match (nearest, origin) {
        (Some((_, key)), Origin::Variable(_)) => format!("; did you mean {}?", key.variable()),
        (Some((_, key)), _) => format!("; did you mean '{}'?", key.name),
        (None, _) => String::new(),
    };
    SettingsError::Unknown { key: name.to_owned(), origin: origin.clone(), suggestion }
}
