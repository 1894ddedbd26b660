//! What links, reductions and messages cost.

/// The cost of one class of links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkCost {
    /// α: seconds from the end of a send to the first byte at the receiver.
    pub latency: f64,
    /// β: seconds per byte.
    pub per_byte: f64,
}

/// How much longer lines are busy where a participant sends to one after the other, as a fraction:
/// pieces that are in different rounds meet at one receiver while another one waits. With 8 to 32
/// nodes the simulator takes 12 to 21 % longer if one is sent to at a time, 7 to 10 % with three,
/// 7 % with seven, and no longer if all are sent to at once or always the same.
const UNEVEN: f64 = 0.17;

/// What things cost. The defaults are those of a data centre's virtual machines on 25 Gb/s
/// Ethernet with racks oversubscribed 3 to 1; where links have been measured, set them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// Links inside a rack. Default 40 µs, 25 Gb/s.
    pub in_rack: LinkCost,
    /// Links between racks, and between the groups of further tiers, per node's fair share. Default
    /// 60 µs, 8.333 Gb/s.
    pub cross_rack: LinkCost,
    /// γ: seconds to reduce one byte that was received. Default 10 GB/s.
    pub reduce_per_byte: f64,
    /// Seconds of processor time for each message sent and received. Default 3 µs.
    pub per_message: f64,
    /// Seconds that one data thread takes for each byte that it sends and receives. A piece is run
    /// by one thread, and pieces that follow each other by all of them. Default 0: the line is the
    /// limit.
    pub lane_per_byte: f64,
    /// Seconds to hand a byte of the result to the ranks, once all of it is there. Default 0.
    pub publish_per_byte: f64,
    /// Seconds that an operation takes besides: the order of the coordinator and the reports that
    /// it is done. The same for all algorithms. Default 0.
    pub operation: f64,
    /// Bytes after which the next hop can begin. Default 128 KiB.
    pub chunk: u64,
    /// Goodput lost where several send to one, as a fraction: all but the share of one of them.
    /// Default 0.07: with four nodes on 1 Gbit/s direct exchange took 2 to 6 % longer than the
    /// ring, which moves as much.
    pub burst_loss: f64,
    /// How many may send to one without losing more than that. Default 8.
    pub free_fan_in: u32,
    /// Goodput lost for each further sender, as a fraction. Default 0.03.
    pub incast_loss: f64,
    /// How many bytes several may send to one at once. More overflows the queue of its line, and
    /// what is lost is sent again. Default 0: any number.
    pub queue: u64,
    /// Seconds that it takes longer if the queue overflows. Default 0.
    pub overflow: f64,
    /// Paths of one cost out of a rack, among which connections are divided by chance (ECMP).
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
    /// By how much goodput falls when `senders` send to one at once; at least 1.
    pub(crate) fn incast(&self, senders: u32) -> f64 {
        let bursts = self.burst_loss * (1.0 - 1.0 / f64::from(senders.max(1)));
        1.0 + bursts + self.incast_loss * f64::from(senders.saturating_sub(self.free_fan_in))
    }

    /// How much longer lines are busy if pieces follow each other and each participant sends to
    /// `partners`, of which so many at a time; at least 1.
    pub(crate) fn unevenness(partners: u32, at_a_time: u32) -> f64 {
        let at_a_time = at_a_time.max(1);
        if partners <= at_a_time { 1.0 } else { 1.0 + UNEVEN / f64::from(at_a_time).sqrt() }
    }

    /// How many seconds longer it takes if so many bytes come from `senders` at once, of which one
    /// share is sent on meanwhile.
    pub fn overflow(&self, bytes: f64, senders: u32) -> f64 {
        let waiting = bytes * (1.0 - 1.0 / f64::from(senders.max(1)));
        if self.queue > 0 && waiting > self.queue as f64 { self.overflow } else { 0.0 }
    }

    /// By how much the busiest path out of a rack has more than its share, if so many pairs of
    /// nodes use all of them: about what balls in bins do (Raab & Steger, 1998), and at most all.
    pub(crate) fn collisions(&self, pairs: f64) -> f64 {
        let (paths, flows) = (f64::from(self.paths), pairs * f64::from(self.connections));
        if self.paths <= 1 || flows <= 0.0 {
            return 1.0;
        }
        (1.0 + (2.0 * paths * paths.ln() / flows).sqrt()).min(paths)
    }

    /// These costs, but for those that were set to something else than their default, and for the
    /// number of connections and data threads.
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
            // A queue of the one and the time of the other would not fit.
            queue: if set.queue > 0 { set.queue } else { self.queue },
            overflow: if set.queue > 0 { set.overflow } else { self.overflow },
            paths: unless(set.paths, usual.paths, self.paths),
            connections: set.connections,
            lanes: set.lanes,
        }
    }
}

/// What was set, unless that is the default.
fn unless<T: PartialEq>(set: T, usual: T, own: T) -> T {
    if set == usual { own } else { set }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_stays() {
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
