//! What goes wrong, and when.

/// Which lines or links a fault is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The line of a host, both ways.
    Host(u32),
    /// A link of a group of a tier, up and down; all of its links if it has no number. The racks
    /// are tier 1.
    Uplink {
        /// The tier.
        tier: usize,
        /// The group.
        group: u32,
        /// Which of its links.
        link: Option<u32>,
    },
}

/// What a fault does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Effect {
    /// Some hosts stop sending, at random; others after each period.
    Pause {
        /// How many.
        hosts: u32,
        /// Seconds.
        every: f64,
    },
    /// A line or link has only a part of its rate; 0: nothing passes.
    Slow {
        /// Which.
        target: Target,
        /// The part.
        factor: f64,
    },
    /// The processor of a host takes longer.
    Busy {
        /// Which host.
        host: u32,
        /// So many times as long.
        times: f64,
    },
    /// Packets are lost on all ways.
    Loss {
        /// The share of packets.
        rate: f64,
    },
    /// A host leaves: it neither sends nor receives.
    Leave {
        /// Which.
        host: u32,
    },
}

/// An effect, and when it begins and ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// What it does.
    pub effect: Effect,
    /// Seconds.
    pub from: f64,
    /// Seconds; infinite if it does not end.
    pub until: f64,
}

impl Fault {
    /// From the beginning on, without end.
    pub fn lasting(effect: Effect) -> Self {
        Self { effect, from: 0.0, until: f64::INFINITY }
    }
}

/// Bytes of a packet.
const PACKET: f64 = 1460.0;

/// The most bytes per second of a connection that loses this share of its packets (Mathis et al.,
/// "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997).
pub(crate) fn lossy_rate(loss: f64, round_trip: f64) -> f64 {
    if loss <= 0.0 { f64::INFINITY } else { PACKET / round_trip * (1.5 / loss).sqrt() }
}
