//! What a piece achieves ([`Kind`]), and what that means for each of its blocks ([`Roles`]).

use gradwire_proto::{Collective, NodeId, Route};

/// The participants that contribute to a block and that receive its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Roles {
    /// The participant that contributes; none if the contributions of all are reduced.
    pub from: Option<u32>,
    /// The participant that receives the result; none for all.
    pub to: Option<u32>,
}

impl Roles {
    /// The roles of a piece of this route between its participants: nodes, ascending, which are
    /// numbered from 0. None where nothing moves, where each flow has its own, or where the route
    /// names a node that is not one of them (TRUST).
    pub fn of(route: Route, participants: &[NodeId]) -> Option<Self> {
        let at = |node| participants.binary_search(&node).ok().map(|at| Some(at as u32));
        let (from, to) = match route {
            Route::All => (None, None),
            Route::From(node) => (at(node)?, None),
            Route::To(node) => (None, at(node)?),
            Route::Move(from, to) => (at(from)?, at(to)?),
            Route::Each | Route::Nothing => return None,
        };
        Some(Self { from, to })
    }

    /// Whether a participant's own contribution enters the result: only then it reduces locally.
    pub fn contributes(self, participant: u32) -> bool {
        self.from.is_none_or(|from| participant == from)
    }

    /// Whether a participant gets the result: only then it publishes.
    pub fn publishes(self, participant: u32) -> bool {
        self.to.is_none_or(|to| participant == to)
    }

    /// Whether the contributions of all are reduced.
    pub fn reduces(self) -> bool {
        self.from.is_none()
    }

    /// Whether it names only participants that exist.
    pub fn fits(self, participants: u32) -> bool {
        [self.from, self.to].iter().flatten().all(|&named| named < participants)
    }
}

/// Contiguous elements of a piece with the same roles. The sections of a piece tile it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Section {
    /// The roles of all its elements.
    pub roles: Roles,
    /// How many elements.
    pub count: u64,
}

/// What a piece achieves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// All get the reduction of all contributions.
    Allreduce,
    /// All get the root's contribution.
    Broadcast {
        /// The participant that has it.
        root: u32,
    },
    /// The root gets the reduction of all contributions.
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
    /// All get all contributions.
    Allgather,
    /// The root gets all contributions.
    Gather {
        /// The participant that gets it.
        root: u32,
    },
    /// Each gets a share of the root's contribution.
    Scatter {
        /// The participant that has it.
        root: u32,
    },
    /// Each gets a share of the reduction of all contributions.
    ReduceScatter,
    /// Each gets a share of each contribution.
    Alltoall,
}

impl Kind {
    /// What a piece of this route and collective achieves between its participants: nodes,
    /// ascending, which are numbered from 0. None where nothing moves, or where the route names a
    /// node that is not one of them (TRUST). The root of a gather or scatter is given as
    /// participant 0, because a piece may have several roots.
    pub fn of(route: Route, collective: Collective, participants: &[NodeId]) -> Option<Self> {
        if route == Route::Each {
            return match collective {
                Collective::Allgather => Some(Self::Allgather),
                Collective::Gather => Some(Self::Gather { root: 0 }),
                Collective::Scatter => Some(Self::Scatter { root: 0 }),
                Collective::ReduceScatter => Some(Self::ReduceScatter),
                Collective::Alltoall => Some(Self::Alltoall),
                _ => None,
            };
        }
        Roles::of(route, participants).map(Self::of_roles)
    }

    /// What a piece achieves if all its blocks have these roles.
    pub fn of_roles(roles: Roles) -> Self {
        match roles {
            Roles { from: None, to: None } => Self::Allreduce,
            Roles { from: Some(root), to: None } => Self::Broadcast { root },
            Roles { from: None, to: Some(root) } => Self::Reduce { root },
            Roles { from: Some(from), to: Some(to) } => Self::Move { from, to },
        }
    }

    /// The roles of all blocks, if they are the same for all.
    pub fn roles(self) -> Option<Roles> {
        let (from, to) = match self {
            Self::Allreduce => (None, None),
            Self::Broadcast { root } => (Some(root), None),
            Self::Reduce { root } => (None, Some(root)),
            Self::Move { from, to } => (Some(from), Some(to)),
            Self::Allgather
            | Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter
            | Self::Alltoall => return None,
        };
        Some(Roles { from, to })
    }

    /// The sections of a piece of `count` elements in which all have shares that are as equal as
    /// possible. In a small piece some have no section.
    pub fn sections(self, participants: u32, count: u64) -> Vec<Section> {
        if let Some(roles) = self.roles() {
            return vec![Section { roles, count }];
        }
        let all = || (0..participants).map(Some);
        let roles = |from, to| Roles { from, to };
        let each: Vec<Roles> = match self {
            Self::Gather { root } => all().map(|from| roles(from, Some(root))).collect(),
            Self::Scatter { root } => all().map(|to| roles(Some(root), to)).collect(),
            Self::ReduceScatter => all().map(|to| roles(None, to)).collect(),
            Self::Alltoall => all().flat_map(|from| all().map(move |to| roles(from, to))).collect(),
            _ => all().map(|from| roles(from, None)).collect(),
        };
        let many = each.len() as u64;
        let share = |at: u64| count / many + u64::from(at < count % many);
        let sections = (0..).zip(each).map(|(at, roles)| Section { roles, count: share(at) });
        sections.filter(|section| section.count > 0).collect()
    }

    /// The name of its collective, or `move`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Allreduce => "allreduce",
            Self::Broadcast { .. } => "broadcast",
            Self::Reduce { .. } => "reduce",
            Self::Move { .. } => "move",
            Self::Allgather => "allgather",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::ReduceScatter => "reducescatter",
            Self::Alltoall => "alltoall",
        }
    }

    /// The kind of the collective with this name; `root` is used if it has one. None for other
    /// names, including `move`.
    pub fn named(name: &str, root: u32) -> Option<Self> {
        Self::collectives(root).into_iter().find(|kind| kind.name() == name)
    }

    /// All kinds but moves, with this root if they have one.
    pub(crate) fn collectives(root: u32) -> [Self; 8] {
        [
            Self::Allreduce,
            Self::Broadcast { root },
            Self::Reduce { root },
            Self::Allgather,
            Self::Gather { root },
            Self::Scatter { root },
            Self::ReduceScatter,
            Self::Alltoall,
        ]
    }

    /// The root, if there is one.
    pub fn root(self) -> Option<u32> {
        match self {
            Self::Broadcast { root }
            | Self::Reduce { root }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// Whether contributions are reduced.
    pub fn reduces(self) -> bool {
        matches!(self, Self::Allreduce | Self::Reduce { .. } | Self::ReduceScatter)
    }

    /// Whether it names only participants that exist.
    pub fn fits(self, participants: u32) -> bool {
        match self {
            Self::Gather { root } | Self::Scatter { root } => root < participants,
            _ => self.roles().is_none_or(|roles| roles.fits(participants)),
        }
    }
}
