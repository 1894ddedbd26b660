//! The limits of a packing, the units that go over each line, uplink and link, and the price of one
//! unit more.

use crate::topology::Topology;

/// How much faster the lines of a rack together are than its uplink, if that is not known.
const OVERSUBSCRIBED: f64 = 3.0;

/// All rates, as multiples of the usual one; infinite for no limit.
pub(super) struct Network {
    pub(super) nodes: usize,
    lines: Vec<f64>,
    racks: Vec<usize>,
    uplinks: Vec<f64>,
    /// The rate of each participant with each.
    pairs: Vec<f64>,
}

impl Network {
    pub(super) fn new(topology: &Topology) -> Self {
        let nodes = topology.participants() as usize;
        let racks = topology.members();
        let mut rack_of = vec![0; nodes];
        for (rack, members) in racks.iter().enumerate() {
            members.iter().for_each(|&member| rack_of[member as usize] = rack);
        }
        let all = 0..nodes as u32;
        let Some(links) = topology.links() else {
            let lines: Vec<f64> = all.map(|one| topology.line(one).into()).collect();
            let slowest = lines.iter().copied().fold(f64::INFINITY, f64::min);
            let uplink = |rack: &Vec<u32>| slowest * rack.len() as f64 / OVERSUBSCRIBED;
            let uplinks = racks.iter().map(uplink).collect();
            return Self { nodes, racks: rack_of, uplinks, pairs: Vec::new(), lines }.in_usual();
        };
        let limit = |rate: u32| if rate == 0 { f64::INFINITY } else { f64::from(rate) };
        let share = limit(links.uplink());
        let pairs = if links.pairs().is_empty() {
            Vec::new()
        } else {
            let row = |a: u32| {
                all.clone().map(move |b| if a == b { 0.0 } else { limit(links.pair(a, b)) })
            };
            all.clone().flat_map(row).collect()
        };
        Self {
            nodes,
            lines: links.lines().iter().map(|&rate| rate.into()).collect(),
            racks: rack_of,
            uplinks: racks.iter().map(|members| share * members.len() as f64).collect(),
            pairs,
        }
        .in_usual()
    }

    /// The rate of a pair by itself.
    fn rate(&self, a: usize, b: usize) -> f64 {
        let pair = self.pairs.get(a * self.nodes + b).copied().unwrap_or(f64::INFINITY);
        self.lines[a].min(self.lines[b]).min(pair)
    }

    /// The same as multiples of the median rate of pairs inside racks, or of all pairs if there are
    /// none.
    fn in_usual(mut self) -> Self {
        let pairs = || (0..self.nodes).flat_map(|a| (0..a).map(move |b| (a, b)));
        let inside = |&(a, b): &(usize, usize)| self.racks[a] == self.racks[b];
        let mut rates: Vec<f64> = pairs().filter(inside).map(|(a, b)| self.rate(a, b)).collect();
        if rates.is_empty() {
            rates = pairs().map(|(a, b)| self.rate(a, b)).collect();
        }
        rates.sort_by(f64::total_cmp);
        let usual = rates.get(rates.len() / 2).copied().unwrap_or(1.0);
        let all = self.lines.iter_mut().chain(&mut self.uplinks).chain(&mut self.pairs);
        all.for_each(|rate| *rate /= usual);
        self
    }
}

/// The units that go over each line, uplink and link in one direction.
pub(super) struct Loads<'a> {
    network: &'a Network,
    /// Whether trees are used in both directions.
    both: bool,
    lines: Vec<f64>,
    /// Out of each rack, and into it.
    up: Vec<f64>,
    down: Vec<f64>,
    pairs: Vec<f64>,
}

/// The price of one unit more: the derivative of the sum of all loads to the power of eight, which
/// is least where the largest of them nearly is.
fn price(load: f64, rate: f64) -> f64 {
    if rate == f64::INFINITY {
        return 0.0;
    }
    let busy = (load + 1.0) / rate;
    let squared = busy * busy;
    squared * squared * squared * busy / rate
}

impl<'a> Loads<'a> {
    pub(super) fn new(network: &'a Network, both: bool) -> Self {
        let racks = network.uplinks.len();
        Self {
            network,
            both,
            lines: vec![0.0; network.nodes],
            up: vec![0.0; racks],
            down: vec![0.0; racks],
            pairs: vec![0.0; network.pairs.len()],
        }
    }

    /// Adds units on all links of a tree.
    pub(super) fn add(&mut self, root: usize, parents: &[usize], units: f64) {
        let Network { nodes, racks, .. } = self.network;
        for (child, &parent) in parents.iter().enumerate().filter(|(child, _)| *child != root) {
            self.lines[parent] += units;
            let (above, below) = (racks[parent], racks[child]);
            if above != below {
                self.up[above] += units;
                self.down[below] += units;
            }
            if !self.pairs.is_empty() {
                self.pairs[parent * nodes + child] += units;
            }
            if self.both {
                self.lines[child] += units;
                if above != below {
                    self.up[below] += units;
                    self.down[above] += units;
                }
                if !self.pairs.is_empty() {
                    self.pairs[child * nodes + parent] += units;
                }
            }
        }
    }

    /// The tree whose links are cheapest: Prim's algorithm. From a given root, where a link costs
    /// less in one direction than in the other, it is only nearly the cheapest.
    pub(super) fn cheapest(&self, root: Option<usize>) -> (usize, Vec<usize>) {
        let Network { nodes, ref lines, ref racks, ref uplinks, ref pairs } = *self.network;
        let of = |loads: &[f64], rates: &[f64]| -> Vec<f64> {
            loads.iter().zip(rates).map(|(&load, &rate)| price(load, rate)).collect()
        };
        let lines = of(&self.lines, lines);
        // Uplinks are shared, and a tree may cross them many times, so they count more than lines.
        let crossing = |loads: &[f64]| {
            let loads: Vec<f64> = loads.iter().map(|load| 4.0 * load + nodes as f64).collect();
            of(&loads, uplinks)
        };
        let (up, down) = (crossing(&self.up), crossing(&self.down));
        let cheapest = (0..nodes).min_by(|&a, &b| lines[a].total_cmp(&lines[b])).unwrap_or(0);
        let root = root.unwrap_or(cheapest);
        let mut parents = vec![root; nodes];
        let mut best = vec![f64::INFINITY; nodes];
        let mut left: Vec<usize> = (0..nodes).filter(|&node| node != root).collect();
        let mut last = root;
        while !left.is_empty() {
            let mut nearest = 0;
            for (at, &node) in left.iter().enumerate() {
                let (above, below) = (racks[last], racks[node]);
                let mut cost = lines[last];
                if self.both {
                    cost += lines[node];
                }
                if above != below {
                    cost += up[above] + down[below];
                }
                if let Some(&rate) = pairs.get(last * nodes + node) {
                    cost += price(self.pairs[last * nodes + node], rate);
                }
                if cost < best[node] {
                    best[node] = cost;
                    parents[node] = last;
                }
                if best[node] < best[left[nearest]] {
                    nearest = at;
                }
            }
            // The order of the rest stays, so of equal ones the first comes first.
            last = left.remove(nearest);
        }
        (root, parents)
    }

    /// How long the busiest line, uplink or link is busy with all units, in either direction.
    pub(super) fn busy(&self, units: f64) -> f64 {
        let Network { lines, uplinks, pairs, .. } = self.network;
        let of = |loads: &[f64], rates: &[f64]| {
            loads.iter().zip(rates).map(|(load, rate)| load / rate).fold(0.0, f64::max)
        };
        let loads = of(&self.lines, lines)
            .max(of(&self.up, uplinks))
            .max(of(&self.down, uplinks))
            .max(of(&self.pairs, pairs));
        // In one direction each participant receives the whole piece.
        let into = if self.both { 0.0 } else { 1.0 };
        lines.iter().fold(loads / units, |busy, rate| busy.max(into / rate))
    }

    /// The traffic out of or into a rack, divided by its nodes; the largest.
    pub(super) fn uplink(&self, units: f64) -> f64 {
        let mut members = vec![0.0; self.up.len()];
        self.network.racks.iter().for_each(|&rack| members[rack] += 1.0);
        let of = |loads: &[f64]| {
            loads.iter().zip(&members).map(|(load, members)| load / members).fold(0.0, f64::max)
        };
        of(&self.up).max(of(&self.down)) / units
    }
}
