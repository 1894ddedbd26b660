//! Numbers for the names of tensors: an event has a number, and the reader gets the name once.

use std::collections::HashMap;

use parking_lot::Mutex;

/// The most names (BOUND). Further tensors are unnamed in a trace.
const MAX_NAMES: usize = 1 << 16;

/// Numbers for names, from 1 on.
#[derive(Debug, Default)]
pub struct Names(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    numbers: HashMap<String, u32>,
    /// The names that the reader has not taken yet.
    new: Vec<(u32, String)>,
}

impl Names {
    /// The number of a name; 0 once there are too many.
    pub fn number(&self, name: &str) -> u32 {
        let mut table = self.0.lock();
        if let Some(number) = table.numbers.get(name) {
            return *number;
        }
        if table.numbers.len() >= MAX_NAMES {
            return 0;
        }
        let number = table.numbers.len() as u32 + 1;
        table.numbers.insert(name.to_owned(), number);
        table.new.push((number, name.to_owned()));
        number
    }

    /// Some of the new names since the last call, with their numbers: as many as fit into `bytes`,
    /// and at least one.
    pub fn take(&self, bytes: usize) -> Vec<(u32, String)> {
        let mut table = self.0.lock();
        let mut left = bytes;
        let fitting = table.new.iter().take_while(|(_, name)| {
            let fits = left > 0;
            left = left.saturating_sub(name.len() + 8);
            fits
        });
        let count = fitting.count();
        table.new.drain(..count).collect()
    }

    /// Makes all names new again, for a new reader.
    pub fn restart(&self) {
        let mut table = self.0.lock();
        let mut all: Vec<_> =
            table.numbers.iter().map(|(name, number)| (*number, name.clone())).collect();
        all.sort_unstable();
        table.new = all;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reader_gets_each_name_once() {
        let names = Names::default();
        assert_eq!([names.number("a"), names.number("b"), names.number("a")], [1, 2, 1]);
        assert_eq!(names.take(1), [(1, "a".to_owned())]);
        assert_eq!(names.take(1000), [(2, "b".to_owned())]);
        assert_eq!(names.take(1000), []);
        names.restart();
        assert_eq!(names.take(1000).len(), 2);
        for number in 0..=MAX_NAMES {
            names.number(&number.to_string());
        }
        assert_eq!(names.number("one more"), 0, "BOUND");
        assert_eq!(names.number("b"), 2);
    }
}
