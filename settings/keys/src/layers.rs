//! Layers of values: each is checked by itself, so an error names the place where a value was
//! written. The last layer that names a key counts.

use std::collections::{BTreeMap, HashMap};

use crate::{
    error::SettingsError,
    horovod,
    key::{Checked, Given, Key},
    origin::Origin,
};

/// What one place sets: names, values, and the place.
pub type Layer = Vec<(String, Given, Origin)>;

/// The defaults of the keys.
pub fn defaults(keys: &[Key]) -> Layer {
    keys.iter().map(|k| (k.name.to_owned(), Given::from(k.default), Origin::Default)).collect()
}

/// What Horovod's variables set.
///
/// # Errors
/// [`SettingsError::Value`] with the variable of a value that can't be read.
pub fn horovods(
    keys: &[Key],
    environment: &HashMap<String, String>,
) -> Result<Layer, SettingsError> {
    let layer = horovod::settings(keys, environment)?.into_iter();
    Ok(layer.map(|(key, value, origin)| (key.to_owned(), Given::Text(value), origin)).collect())
}

/// What the variables `GRADWIRE_<SECTION>__<KEY>` set, sorted, so that of several errors the same
/// one is reported each time.
pub fn environment(environment: &HashMap<String, String>) -> Layer {
    let named = environment.iter().filter_map(|(name, value)| {
        let key = name.strip_prefix("GRADWIRE_").filter(|_| name.contains("__"))?;
        let key = key.to_lowercase().replace("__", ".");
        let variable = format!("GRADWIRE_{}", key.replace('.', "__").to_uppercase());
        Some((key, Given::from(value.as_str()), Origin::Variable(variable)))
    });
    let mut layer: Layer = named.collect();
    layer.sort_by(|a, b| a.0.cmp(&b.0));
    layer
}

/// What `--set section.key=value` sets.
///
/// # Errors
/// [`SettingsError::Flag`] for a text of another form.
pub fn flags(flags: &[String]) -> Result<Layer, SettingsError> {
    flags
        .iter()
        .map(|flag| match flag.split_once('=') {
            Some((name, value)) => Ok((name.trim().to_owned(), Given::from(value), Origin::Flag)),
            None => Err(SettingsError::Flag { given: flag.clone() }),
        })
        .collect()
}

/// The checked value of each key that a layer names, and where it was written. `refine` checks what
/// the kind of a key does not: its error says what is accepted.
///
/// # Errors
/// [`SettingsError`] for an unknown name or a value that its key does not accept.
pub fn merge(
    keys: &[Key],
    layers: impl IntoIterator<Item = Layer>,
    refine: impl Fn(&Key, Checked) -> Result<Checked, String>,
) -> Result<BTreeMap<&'static str, (Checked, Origin)>, SettingsError> {
    let mut values = BTreeMap::new();
    for (name, given, origin) in layers.into_iter().flatten() {
        let key = keys.iter().find(|key| key.name == name);
        let key = key.ok_or_else(|| unknown(keys, &name, &origin))?;
        let checked = key.kind.check(&given).and_then(|checked| refine(key, checked));
        let checked = checked.map_err(|expected| SettingsError::Value {
            key: key.name,
            given: given.to_string(),
            origin: origin.clone(),
            expected,
        })?;
        values.insert(key.name, (checked, origin));
    }
    Ok(values)
}

/// The error for a name that is not a key; it suggests the most similar key.
pub fn unknown(keys: &[Key], name: &str, origin: &Origin) -> SettingsError {
    // The right key in the wrong section is likelier than any misspelling.
    let likeness = |key: &Key| match (key.name.split_once('.'), name.rsplit_once('.')) {
        (Some((_, tail)), Some((_, given))) if tail == given => 2.0,
        _ => strsim::normalized_damerau_levenshtein(name, key.name),
    };
    let nearest = keys
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
