//! What a schedule achieves: the four routes that data can take between nodes.

use gradwire_proto::{NodeId, Route};

/// What a schedule achieves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Everybody gets the reduction of everybody's contribution.
    Allreduce,
    /// Everybody gets the root's contribution.
    Broadcast {
        /// The participant that has it.
        root: u32,
    },
    /// The root gets the reduction of everybody's contribution.
    Reduce {
        /// The participant that gets it.
        root: u32,
    },
    /// One participant gets another one's contribution, or its own; all others do nothing.
    Move {
        /// The participant that has it.
        from: u32,
        /// The participant that gets it.
        to: u32,
    },
}

impl Kind {
    /// What a piece of this route achieves between its participants: nodes, ascending, which are
    /// numbered from 0. None where nothing moves, or where the route names a node that is not one
    /// of them (TRUST).
    pub fn of(route: Route, participants: &[NodeId]) -> Option<Self> {
        let at = |node| participants.binary_search(&node).ok().map(|at| at as u32);
        match route {
            Route::All => Some(Self::Allreduce),
            Route::From(node) => Some(Self::Broadcast { root: at(node)? }),
            Route::To(node) => Some(Self::Reduce { root: at(node)? }),
            Route::Move(from, to) => Some(Self::Move { from: at(from)?, to: at(to)? }),
            Route::Nothing => None,
        }
    }

    /// Whether a participant's own contribution enters the result: only then it reduces locally.
    pub fn contributes(self, participant: u32) -> bool {
        match self {
            Self::Allreduce | Self::Reduce { .. } => true,
            Self::Broadcast { root } => participant == root,
            Self::Move { from, .. } => participant == from,
        }
    }

    /// Whether a participant gets the result: only then it publishes.
    pub fn publishes(self, participant: u32) -> bool {
        match self {
            Self::Allreduce | Self::Broadcast { .. } => true,
            Self::Reduce { root } => participant == root,
            Self::Move { to, .. } => participant == to,
        }
    }

    /// Whether all participants that it names are among as many.
    pub fn fits(self, participants: u32) -> bool {
        match self {
            Self::Allreduce => true,
            Self::Broadcast { root } | Self::Reduce { root } => root < participants,
            Self::Move { from, to } => from < participants && to < participants,
        }
    }
}
