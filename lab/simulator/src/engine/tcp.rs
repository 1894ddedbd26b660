//! The rate limits of connections, and TCP's windows and timers.

use rand::RngExt;

use super::{
    Engine,
    state::{About, Event},
};
use crate::{fair::FlowId, fault::lossy_rate, job::Director};

impl<D: Director> Engine<'_, D> {
    /// An idle connection starts to send.
    pub(super) fn started(&mut self, flow: FlowId) {
        let About { to, pair, used, .. } = self.about[flow as usize];
        let active = &mut self.pairs[pair].1;
        *active += 1;
        if *active == 1 {
            let receiver = self.receiver(to);
            let (now, most) = &mut self.senders[receiver];
            *now += 1;
            *most = (*most).max(*now);
        }
        let Some(tcp) = self.setup.tcp else { return };
        if self.now - used > tcp.timeout {
            self.about[flow as usize].window = tcp.window as f64 / tcp.round_trip;
            self.limit(flow);
            self.at(self.now + tcp.round_trip, Event::Grow(flow));
        }
        // The bursts of all senders meet in the queue before the receiver.
        let burst = f64::from(self.senders[to as usize].0) * tcp.window as f64;
        let lost = (1.0 - tcp.buffer as f64 / burst).max(self.loss);
        self.lose(flow, lost);
    }

    /// With this probability a connection waits for its timer, which doubles after each loss.
    pub(super) fn lose(&mut self, flow: FlowId, probability: f64) {
        let Some(tcp) = self.setup.tcp else { return };
        let is_lost = probability > 0.0 && self.random.random::<f64>() < probability;
        let about = &mut self.about[flow as usize];
        if !is_lost {
            about.retries = 0;
            return;
        }
        let wait = tcp.timeout * f64::from(1u32 << about.retries.min(6));
        about.retries += 1;
        about.window = tcp.window as f64 / tcp.round_trip;
        self.outcome.timeouts += 1;
        self.flows.set_stalled(flow, true, self.now);
        self.at(self.now + wait, Event::Again(flow));
    }

    pub(super) fn grow(&mut self, flow: FlowId) {
        let Some(tcp) = self.setup.tcp else { return };
        let about = &mut self.about[flow as usize];
        about.window *= 2.0;
        let line = self.setup.network.hosts[about.from as usize].egress;
        if about.window < line.min(about.cap) {
            self.at(self.now + tcp.round_trip, Event::Grow(flow));
        } else {
            about.window = f64::INFINITY;
        }
        self.limit(flow);
    }

    /// Updates the rate limit of a connection.
    pub(super) fn limit(&mut self, flow: FlowId) {
        let About { cap, window, latency, .. } = self.about[flow as usize];
        let round_trip = self.setup.tcp.map_or(2.0 * latency, |tcp| tcp.round_trip).max(1e-6);
        let lossy = lossy_rate(self.loss, round_trip) * (1.0 - self.loss);
        self.flows.fair.set_cap(flow, cap.min(window).min(lossy));
    }
}
