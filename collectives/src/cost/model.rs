//! What links, reductions and messages cost.

/// The cost of one class of links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkCost {
    /// α: seconds from the end of a send to the first byte at the receiver.
    pub latency: f64,
    /// β: seconds per byte.
    pub per_byte: f64,
}

/// How much longer lines are busy if a participant sends to its partners in turns, as a fraction:
/// pieces in different rounds meet at one receiver while another one is idle. With 8 to 32 nodes
/// the simulator takes 12 to 21 % longer with one partner at a time, 7 to 10 % with three, 7 % with
/// seven, and no longer with all at once or always the same one.
const UNEVEN: f64 = 0.17;

/// The parameters of the cost model. The defaults are for virtual machines in a data centre, on 25
/// Gb/s Ethernet with racks oversubscribed 3 to 1. Set them where links have been measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// Links inside a rack. Default 40 µs, 25 Gb/s.
    pub in_rack: LinkCost,
    /// Links between racks and between groups of higher tiers, for a node's fair share. Default 60
    /// µs, 8.333 Gb/s.
    pub cross_rack: LinkCost,
    /// γ: seconds to reduce one byte that was received. Default 10 GB/s.
    pub reduce_per_byte: f64,
    /// Seconds of processor time for each message sent and received. Default 3 µs.
    pub per_message: f64,
    /// Seconds that one data thread takes for each byte that it sends and receives. One thread runs
    /// a piece; all threads share the pieces of a pipeline. Default 0: the line is the limit.
    pub lane_per_byte: f64,
    /// Seconds to deliver a byte of the complete result to the ranks. Default 0.
    pub publish_per_byte: f64,
    /// Fixed seconds of an operation: the order of the coordinator and the completion reports. The
    /// same for all algorithms. Default 0.
    pub operation: f64,
    /// Bytes after which the next hop can begin. Default 128 KiB.
    pub chunk: u64,
    /// Goodput lost where many nodes send to one, as a fraction; n of them lose (1 − 1/n) of it.
    /// Default 0.07: with four nodes on 1 Gbit/s direct exchange took 2 to 6 % longer than the
    /// ring, which moves as much.
    pub burst_loss: f64,
    /// How many nodes may send to one without further loss. Default 8.
    pub free_fan_in: u32,
    /// Goodput lost for each further sender, as a fraction. Default 0.03.
    pub incast_loss: f64,
    /// How many bytes several nodes may send to one at the same time. More overflow the queue of
    /// its line, and the lost data is sent again. Default 0: any number.
    pub queue: u64,
    /// Seconds that an overflow of the queue adds. Default 0.
    pub overflow: f64,
    /// Paths of equal cost out of a rack, over which connections are spread at random (ECMP).
    /// Default 1.
    pub paths: u32,
    /// The connections between two nodes. Default 2.
    pub connections: u32,
    /// The data threads among which pieces are divided. Default 2.
    pub lanes: u32,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            in_rack: LinkCost { latency: 40e-6, per_byte: 8.0 / 25e9 },
            cross_rack: LinkCost { latency: 60e-6, per_byte: 8.0 / 8.333e9 },
            reduce_per_byte: 1.0 / 10e9,
            per_message: 3e-6,
            lane_per_byte: 0.0,
            publish_per_byte: 0.0,
            operation: 0.0,
            chunk: 128 << 10,
            burst_loss: 0.07,
            free_fan_in: 8,
            incast_loss: 0.03,
            queue: 0,
            overflow: 0.0,
            paths: 1,
            connections: 2,
            lanes: 2,
        }
    }
}

impl CostModel {
    /// The factor by which lines are slower when `senders` send to one at the same time; at least
    /// 1.
    pub(crate) fn incast(&self, senders: u32) -> f64 {
        let bursts = self.burst_loss * (1.0 - 1.0 / f64::from(senders.max(1)));
        1.0 + bursts + self.incast_loss * f64::from(senders.saturating_sub(self.free_fan_in))
    }

    /// The factor by which lines are busy for longer in a pipeline if each participant sends to
    /// `partners`, `at_a_time` of them at once; at least 1.
    pub(crate) fn unevenness(partners: u32, at_a_time: u32) -> f64 {
        let at_a_time = at_a_time.max(1);
        if partners <= at_a_time { 1.0 } else { 1.0 + UNEVEN / f64::from(at_a_time).sqrt() }
    }

    /// The seconds that are lost if `bytes` arrive from `senders` at the same time and overflow the
    /// queue, which passes on one sender's share meanwhile.
    pub fn overflow(&self, bytes: f64, senders: u32) -> f64 {
        let waiting = bytes * (1.0 - 1.0 / f64::from(senders.max(1)));
        if self.queue > 0 && waiting > self.queue as f64 { self.overflow } else { 0.0 }
    }

    /// The load of the busiest path out of a rack as a multiple of its share, if this many pairs of
    /// nodes use all paths: about that of balls in bins (Raab & Steger, 1998), at most all of it.
    pub(crate) fn collisions(&self, pairs: f64) -> f64 {
        let (paths, flows) = (f64::from(self.paths), pairs * f64::from(self.connections));
        if self.paths <= 1 || flows <= 0.0 {
            return 1.0;
        }
        (1.0 + (2.0 * paths * paths.ln() / flows).sqrt()).min(paths)
    }

    /// These costs, replaced by those of `set` that differ from their defaults, and by its numbers
    /// of connections and data threads.
    #[must_use]
    pub fn replaced_by(self, set: Self) -> Self {
        let usual = Self::default();
        let pick = |own: f64, set: f64, usual: f64| {
            let is_usual = (set - usual).abs() <= 1e-9 * usual.abs();
            if is_usual { own } else { set }
        };
        let link = |own: LinkCost, set: LinkCost, usual: LinkCost| LinkCost {
            latency: pick(own.latency, set.latency, usual.latency),
            per_byte: pick(own.per_byte, set.per_byte, usual.per_byte),
        };
        Self {
            in_rack: link(self.in_rack, set.in_rack, usual.in_rack),
            cross_rack: link(self.cross_rack, set.cross_rack, usual.cross_rack),
            reduce_per_byte: pick(self.reduce_per_byte, set.reduce_per_byte, usual.reduce_per_byte),
            per_message: pick(self.per_message, set.per_message, usual.per_message),
            lane_per_byte: pick(self.lane_per_byte, set.lane_per_byte, usual.lane_per_byte),
            publish_per_byte: pick(
                self.publish_per_byte,
                set.publish_per_byte,
                usual.publish_per_byte,
            ),
            operation: pick(self.operation, set.operation, usual.operation),
            chunk: unless(set.chunk, usual.chunk, self.chunk),
            burst_loss: pick(self.burst_loss, set.burst_loss, usual.burst_loss),
            free_fan_in: unless(set.free_fan_in, usual.free_fan_in, self.free_fan_in),
            incast_loss: pick(self.incast_loss, set.incast_loss, usual.incast_loss),
            // A queue and its overflow time belong together.
            queue: if set.queue > 0 { set.queue } else { self.queue },
            overflow: if set.queue > 0 { set.overflow } else { self.overflow },
            paths: unless(set.paths, usual.paths, self.paths),
            connections: set.connections,
            lanes: set.lanes,
        }
    }
}

/// `set`, unless it is the default.
fn unless<T: PartialEq>(set: T, usual: T, own: T) -> T {
    if set == usual { own } else { set }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_values_replace_measured_ones() {
        let usual = CostModel::default();
        let measured = CostModel {
            in_rack: LinkCost { latency: 30e-6, per_byte: 8.0 / 10e9 },
            operation: 2e-4,
            burst_loss: 0.02,
            queue: 5,
            overflow: 0.5,
            paths: 3,
            ..usual
        };
        assert_eq!(measured.replaced_by(usual), measured);
        let per_byte = 8.0 / 1e9;
        let set = CostModel { in_rack: LinkCost { per_byte, ..usual.in_rack }, ..usual };
        let in_rack = LinkCost { per_byte, ..measured.in_rack };
        assert_eq!(measured.replaced_by(set), CostModel { in_rack, ..measured });
        let found = measured.replaced_by(CostModel { queue: 7, ..usual });
        assert_eq!((found.queue, found.overflow), (7, 0.0));
        let set = CostModel { paths: 4, chunk: 4096, free_fan_in: 2, lanes: 1, ..usual };
        let found = measured.replaced_by(set);
        assert_eq!((found.paths, found.chunk, found.free_fan_in, found.lanes), (4, 4096, 2, 1));
    }
}
