//! Faults and their times.

/// The lines or links that a fault affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The line of a host, in both directions.
    Host(u32),
    /// A link of a group of a tier, up and down; all of its links without a number. Racks are tier
    /// 1.
    Uplink {
        /// The tier.
        tier: usize,
        /// The group.
        group: u32,
        /// Which of its links.
        link: Option<u32>,
    },
}

/// The effect of a fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Effect {
    /// Random hosts stop sending, others in each period.
    Pause {
        /// How many.
        hosts: u32,
        /// The period, in seconds.
        every: f64,
    },
    /// A line or link has only part of its rate; at 0 nothing passes.
    Slow {
        /// Which.
        target: Target,
        /// The remaining part.
        factor: f64,
    },
    /// The processor of a host is slower.
    Busy {
        /// Which host.
        host: u32,
        /// The factor by which its times grow.
        times: f64,
    },
    /// Packets are lost on all links.
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
    /// Seconds; infinite for a permanent fault.
    pub until: f64,
}

impl Fault {
    /// A fault that lasts for the whole run.
    pub fn lasting(effect: Effect) -> Self {
        Self { effect, from: 0.0, until: f64::INFINITY }
    }
}

/// Bytes of a packet.
const PACKET: f64 = 1460.0;

/// The highest rate of a connection that loses this share of its packets, in bytes per second
/// (Mathis et al., "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997).
pub(crate) fn lossy_rate(loss: f64, round_trip: f64) -> f64 {
    if loss <= 0.0 { f64::INFINITY } else { PACKET / round_trip * (1.5 / loss).sqrt() }
}
