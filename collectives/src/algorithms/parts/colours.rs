//! Rounds for two trees over the same participants, in which each participant sends and receives at
//! most once (Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
//! and scan", 2009).
//!
//! Each link gets one of two colours. The two links of a participant to its parents have different
//! ones, and so have its two links to children: it has at most two in both trees together. Links of
//! one colour are used in even rounds, the others in odd rounds. So k blocks for each tree reach
//! all in 2h + 2k rounds: a block waits for its turn at most once in each of h levels, and the next
//! one follows two rounds later.
//!
//! A link takes part in at most two such pairs. So pairs form paths and cycles, and for the trees
//! of [`double_tree`](crate::algorithms::catalog::double_tree) all cycles are even: a test shows it
//! for up to 2048 participants.

use super::build::{Link, Place};

/// A link by its lower end: the tree and the child.
type Lower = (usize, u32);

/// Two trees, given by parents, with a round for each link.
#[derive(Debug)]
pub(crate) struct ColouredTrees {
    parents: [Vec<Option<u32>>; 2],
    children: [Vec<Vec<u32>>; 2],
    /// By tree and child: the round in which a block goes down the link, from 0 on.
    rounds: [Vec<u32>; 2],
    /// How many rounds the first block takes.
    last: u32,
}

impl ColouredTrees {
    /// Trees over positions 0..n; in each exactly one has no parent, and following parents leads to
    /// it. No position has more than two children in both together.
    pub(crate) fn new(parents: [Vec<Option<u32>>; 2]) -> Self {
        let mut children = parents.each_ref().map(|parents| vec![Vec::new(); parents.len()]);
        for (parents, children) in parents.iter().zip(&mut children) {
            for (at, parent) in (0..).zip(parents) {
                if let Some(parent) = parent {
                    children[*parent as usize].push(at);
                }
            }
        }
        let rounds = parents.each_ref().map(|parents| vec![0; parents.len()]);
        let mut trees = Self { parents, children, rounds, last: 0 };
        let colours = trees.colours();
        for (tree, colours) in colours.iter().enumerate() {
            let root = trees.parents[tree].iter().position(Option::is_none).unwrap_or(0) as u32;
            let mut open = vec![(root, 0)];
            while let Some((at, earliest)) = open.pop() {
                for &child in &trees.children[tree][at as usize] {
                    let round = earliest + (earliest + colours[child as usize]) % 2;
                    trees.rounds[tree][child as usize] = round;
                    trees.last = trees.last.max(round + 1);
                    open.push((child, round + 1));
                }
            }
        }
        trees
    }

    /// The colour of each link by tree and child: 0 or 1. A root has a colour without a link.
    fn colours(&self) -> [Vec<u32>; 2] {
        let mut colours = self.parents.each_ref().map(|parents| vec![None; parents.len()]);
        for tree in 0..2 {
            for at in 0..self.parents[tree].len() as u32 {
                let mut open = vec![((tree, at), 0)];
                while let Some(((tree, at), colour)) = open.pop() {
                    let own = &mut colours[tree][at as usize];
                    if own.is_none() && self.parents[tree][at as usize].is_some() {
                        *own = Some(colour);
                        open.extend(self.others((tree, at)).map(|other| (other, 1 - colour)));
                    }
                }
            }
        }
        colours.map(|colours| colours.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// The links that must not have the colour of this one: that of the same child in the other
    /// tree, and that of its parent to another child.
    fn others(&self, (tree, at): Lower) -> impl Iterator<Item = Lower> + '_ {
        let siblings = self.parents[tree][at as usize].into_iter().flat_map(move |parent| {
            let of = move |tree: usize| self.children[tree][parent as usize].iter();
            (0..2).flat_map(move |tree| of(tree).map(move |&child| (tree, child)))
        });
        let same = [(1 - tree, at)];
        siblings.filter(move |&link| link != (tree, at)).chain(same)
    }

    /// The place of position `at` in the tree of a block; blocks alternate between both trees.
    /// `name` maps positions to participants. The reduction takes the rounds backwards.
    pub(crate) fn place(&self, block: u32, at: u32, name: impl Fn(u32) -> u32) -> Place {
        let (tree, delay, last) = (block as usize % 2, block / 2 * 2, self.last);
        let link = |peer: u32, below: u32| {
            let round = self.rounds[tree][below as usize];
            Link { peer: name(peer), up: delay + last - 1 - round, down: delay + last + round }
        };
        Place {
            parent: self.parents[tree][at as usize].map(|parent| link(parent, at)),
            children: self.children[tree][at as usize].iter().map(|&c| link(c, c)).collect(),
        }
    }

    /// The length of the longest path from the root of a tree.
    #[cfg(test)]
    pub(crate) fn height(&self, tree: usize) -> u32 {
        let mut heights = vec![0; self.parents[tree].len()];
        let mut longest = 0;
        let root = self.parents[tree].iter().position(Option::is_none).unwrap_or(0);
        let mut open = vec![root];
        while let Some(at) = open.pop() {
            longest = longest.max(heights[at]);
            for &child in &self.children[tree][at] {
                heights[child as usize] = heights[at] + 1;
                open.push(child as usize);
            }
        }
        longest
    }

    /// Broadcasts blocks in each tree. Returns the number of rounds; none if a participant sends or
    /// receives twice in a round, or sends what it does not have.
    #[cfg(test)]
    pub(crate) fn broadcast(&self, blocks: u32) -> Option<u32> {
        let nodes = self.parents[0].len();
        let mut rounds: Vec<Vec<(usize, u32, u32)>> = Vec::new();
        for tree in 0..2 {
            for at in (0..nodes as u32).filter(|at| self.parents[tree][*at as usize].is_some()) {
                for block in 0..blocks {
                    let round = (2 * block + self.rounds[tree][at as usize]) as usize;
                    rounds.resize(rounds.len().max(round + 1), Vec::new());
                    rounds[round].push((tree, at, block));
                }
            }
        }
        let (mut sent, mut received) = (vec![usize::MAX; nodes], vec![usize::MAX; nodes]);
        // How many blocks each has, which come in order.
        let mut has = [vec![0; nodes], vec![0; nodes]];
        for (round, links) in rounds.iter().enumerate() {
            for &(tree, at, block) in links {
                let parent = self.parents[tree][at as usize]? as usize;
                let is_there = self.parents[tree][parent].is_none() || has[tree][parent] > block;
                let sends = std::mem::replace(&mut sent[parent], round);
                let receives = std::mem::replace(&mut received[at as usize], round);
                if !is_there || sends == round || receives == round {
                    return None;
                }
            }
            for &(tree, at, _) in links {
                has[tree][at as usize] += 1;
            }
        }
        let complete = (0..2).all(|tree| {
            let all = self.parents[tree].iter().zip(&has[tree]);
            all.into_iter().all(|(parent, has)| parent.is_none() || *has == blocks)
        });
        complete.then_some(rounds.len() as u32)
    }
}
