//! A map with few entries, sorted by key. The keys are contiguous in memory, because with thousands
//! of hosts a look-up costs mostly cache misses.

/// Values by key.
#[derive(Debug, Clone)]
pub(crate) struct Few<K, V> {
    keys: Vec<K>,
    values: Vec<V>,
}

impl<K, V> Default for Few<K, V> {
    fn default() -> Self {
        Self { keys: Vec::new(), values: Vec::new() }
    }
}

impl<K: Ord + Copy, V> Few<K, V> {
    /// The position of a key. It changes when a smaller key is added or removed.
    pub(crate) fn place(&self, key: K) -> Option<usize> {
        self.keys.binary_search(&key).ok()
    }

    /// The value at a place.
    pub(crate) fn at_mut(&mut self, place: usize) -> &mut V {
        &mut self.values[place]
    }

    pub(crate) fn get(&self, key: K) -> Option<&V> {
        self.place(key).map(|place| &self.values[place])
    }

    pub(crate) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.place(key).map(|place| &mut self.values[place])
    }

    /// The value of the smallest key.
    pub(crate) fn first(&self) -> Option<&V> {
        self.values.first()
    }

    /// Adds a value, or replaces the value of the key.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        match self.keys.binary_search(&key) {
            Ok(place) => self.values[place] = value,
            Err(place) => {
                self.keys.insert(place, key);
                self.values.insert(place, value);
            }
        }
    }

    pub(crate) fn remove(&mut self, key: K) -> Option<V> {
        let place = self.place(key)?;
        self.keys.remove(place);
        Some(self.values.remove(place))
    }

    /// All entries, by ascending keys.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (K, &mut V)> {
        self.keys.iter().copied().zip(&mut self.values)
    }
}

impl<K: Ord + Copy, V: Default> Few<K, V> {
    /// The position of a key, with a new default value if it was missing.
    pub(crate) fn place_or_default(&mut self, key: K) -> usize {
        self.keys.binary_search(&key).unwrap_or_else(|place| {
            self.keys.insert(place, key);
            self.values.insert(place, V::default());
            place
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map(changes in prop::collection::vec((0u32..12, 0u32..4, any::<u32>()), 0..80)) {
            let (mut few, mut map) = (Few::default(), BTreeMap::new());
            for (key, change, value) in changes {
                match change {
                    0 => prop_assert_eq!(few.remove(key), map.remove(&key)),
                    1 => {
                        let place = few.place_or_default(key);
                        prop_assert_eq!(few.place(key), Some(place));
                        prop_assert_eq!(few.at_mut(place), map.entry(key).or_default());
                    }
                    _ => {
                        few.insert(key, value);
                        map.insert(key, value);
                    }
                }
                prop_assert_eq!(few.get(key), map.get(&key));
                prop_assert_eq!(few.first(), map.values().next());
                prop_assert_eq!(few.get_mut(key), map.get_mut(&key));
                let entries: Vec<(u32, u32)> =
                    few.iter_mut().map(|(key, value)| (key, *value)).collect();
                prop_assert_eq!(entries, map.clone().into_iter().collect::<Vec<_>>());
            }
        }
    }
}
