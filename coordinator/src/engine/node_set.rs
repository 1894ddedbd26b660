//! A small set of nodes: one bit each, no allocation once it is made.

use gradwire_proto::NodeId;

/// A set of the nodes 0 to n − 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeSet {
    words: Box<[u64]>,
    len: u32,
}

impl NodeSet {
    /// An empty set with room for the ids below `nodes`.
    pub(crate) fn new(nodes: usize) -> Self {
        Self { words: vec![0; nodes.div_ceil(64)].into(), len: 0 }
    }

    fn place(node: NodeId) -> (usize, u64) {
        (node.0 as usize / 64, 1 << (node.0 % 64))
    }

    /// Adds a node; false if it is there already or has no room.
    pub(crate) fn insert(&mut self, node: NodeId) -> bool {
        let (word, bit) = Self::place(node);
        match self.words.get_mut(word) {
            Some(word) if *word & bit == 0 => {
                *word |= bit;
                self.len += 1;
                true
            }
            _ => false,
        }
    }

    /// Takes a node out; false if it is not there.
    pub(crate) fn remove(&mut self, node: NodeId) -> bool {
        let (word, bit) = Self::place(node);
        match self.words.get_mut(word) {
            Some(word) if *word & bit != 0 => {
                *word &= !bit;
                self.len -= 1;
                true
            }
            _ => false,
        }
    }

    /// Whether a node is there.
    pub(crate) fn contains(&self, node: NodeId) -> bool {
        let (word, bit) = Self::place(node);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// How many nodes there are.
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes all out.
    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_it_holds_across_words() {
        let mut set = NodeSet::new(65);
        assert!(set.insert(NodeId(64)) && set.insert(NodeId(0)));
        assert!(!set.insert(NodeId(64)), "twice");
        assert!(!set.insert(NodeId(500)), "no room");
        assert!(set.contains(NodeId(64)) && !set.contains(NodeId(1)));
        assert_eq!(set.len(), 2);
        assert!(set.remove(NodeId(64)) && !set.remove(NodeId(64)));
        set.clear();
        assert!(set.is_empty() && !set.contains(NodeId(0)));
    }
}
