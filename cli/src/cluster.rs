//! Shared by commands about clusters: nodes in racks, collectives, tables and printable text.

use std::{fmt, str::FromStr};

use clap::ValueEnum;
use gradwire_collectives::{Kind, Topology};
use gradwire_launcher::error::CommandError;
use gradwire_proto::MAX_TIERS;
use gradwire_viewer::view::count;

/// A collective that has a choice of algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Collective {
    /// All nodes get the reduction of all data.
    Allreduce,
    /// All nodes get the data of the first.
    Broadcast,
    /// The first node gets the reduction of all data.
    Reduce,
    /// All nodes get the data of all.
    Allgather,
    /// The first node gets the data of all.
    Gather,
    /// Each node gets a share of the first node's data.
    Scatter,
    /// Each node gets a share of the reduction of all data.
    #[value(name = "reducescatter")]
    ReduceScatter,
    /// Each node gets a share of every node's data.
    Alltoall,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

impl Collective {
    /// The kind of schedule, with the first node as root.
    pub fn kind(self) -> Kind {
        match self {
            Self::Allreduce => Kind::Allreduce,
            Self::Broadcast => Kind::Broadcast { root: 0 },
            Self::Reduce => Kind::Reduce { root: 0 },
            Self::Allgather => Kind::Allgather,
            Self::Gather => Kind::Gather { root: 0 },
            Self::Scatter => Kind::Scatter { root: 0 },
            Self::ReduceScatter => Kind::ReduceScatter,
            Self::Alltoall => Kind::Alltoall,
        }
    }
}

/// The racks of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Racks {
    /// Racks of sizes as equal as possible: the number of groups of the outermost tier, then the
    /// number of groups in each of them, and so on down to the racks.
    Number(Vec<u32>),
    /// Racks with these numbers of nodes, and no tier above them.
    Sizes(Vec<u32>),
}

impl FromStr for Racks {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbers = |by: char| -> Option<Vec<u32>> {
            text.split(by).map(|size| size.trim().parse().ok().filter(|n| *n > 0)).collect()
        };
        let tiers = numbers('x').filter(|tiers| tiers.len() <= MAX_TIERS).map(Self::Number);
        tiers.or_else(|| numbers(',').map(Self::Sizes)).ok_or(
            "expected the number of racks, or the nodes of each, such as 4,4,2, or 2x4 for two \
             groups of four racks (up to 8 tiers)",
        )
    }
}

impl Racks {
    fn topology(&self, nodes: u32) -> Result<Topology, CommandError> {
        match self {
            Self::Number(parts) => {
                let racks = parts.iter().fold(1u64, |all, &n| all.saturating_mul(n.into()));
                if racks > u64::from(nodes) {
                    let what = format!("{nodes} nodes can't be in {racks} racks");
                    return Err(CommandError::usage(what).hint("each rack has at least one node"));
                }
                let label = |node: u32| {
                    let mut rack = u64::from(node) * racks / u64::from(nodes);
                    let mut names: Vec<String> = Vec::new();
                    for &parts in parts.iter().rev() {
                        names.push((rack % u64::from(parts)).to_string());
                        rack /= u64::from(parts);
                    }
                    names.reverse();
                    names.join("/")
                };
                Ok(Topology::from_labels(&(0..nodes).map(label).collect::<Vec<_>>()))
            }
            Self::Sizes(sizes) => {
                let sum: u64 = sizes.iter().map(|size| u64::from(*size)).sum();
                if sum != u64::from(nodes) {
                    let what = format!("the racks have {sum} nodes, but there are {nodes}");
                    return Err(CommandError::usage(what).hint("servers are in racks, too"));
                }
                let racks = (0..).zip(sizes).flat_map(|(rack, &n)| vec![rack; n as usize]);
                Ok(Topology::from_racks(racks.collect()))
            }
        }
    }
}

/// A topology with these numbers of nodes and servers. The nodes of a rack have consecutive
/// numbers; without racks, all are in one.
///
/// # Errors
/// [`CommandError`] if the racks have another number of nodes.
pub fn topology(nodes: u32, servers: u32, racks: Option<&Racks>) -> Result<Topology, CommandError> {
    let all = nodes + servers;
    let topology = racks.map_or(Ok(Topology::flat(all)), |racks| racks.topology(all))?;
    Ok(topology.with_servers(servers))
}

/// The number of nodes in each rack.
pub fn racks(topology: &Topology) -> Vec<usize> {
    topology.members().iter().map(Vec::len).collect()
}

/// The number of groups in each tier, the racks first.
pub fn tiers(topology: &Topology) -> Vec<usize> {
    (1..=topology.tiers().len()).map(|tier| topology.groups(tier).len()).collect()
}

/// `8 nodes in 4 racks of 2, 2, 2, 2, in 2 groups, lines of 1, 4, …`.
pub fn in_words(topology: &Topology) -> String {
    let lines: Vec<String> = topology.lines().iter().take(8).map(u32::to_string).collect();
    let more = if topology.lines().len() > lines.len() { ", …" } else { "" };
    let places = places(topology);
    match lines.as_slice() {
        [] => places,
        lines => format!("{places}, with lines of relative rates {}{more}", lines.join(", ")),
    }
}

fn places(topology: &Topology) -> String {
    let (nodes, sizes) = (topology.contributors(), racks(topology));
    let nodes = count(nodes.into(), "node");
    let nodes = match topology.servers() {
        0 => nodes,
        servers => format!("{nodes} and {}", count(servers.into(), "server")),
    };
    if sizes.len() == 1 {
        return format!("{nodes} in 1 rack");
    }
    let each: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let above = tiers(topology).split_off(1).into_iter();
    let above: String = above.map(|groups| format!(", in {groups} groups")).collect();
    format!("{nodes} in {} racks of {}{above}", sizes.len(), each.join(", "))
}

/// Aligns columns to their longest entry; the last column is not padded.
pub fn aligned<R: AsRef<[String]>>(rows: &[R]) -> String {
    let columns = rows.first().map_or(0, |row| row.as_ref().len());
    let width = |column: usize| rows.iter().map(|row| row.as_ref()[column].chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .as_ref()
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:<width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Removes control characters: text from a socket must not move the cursor (TRUST).
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}
