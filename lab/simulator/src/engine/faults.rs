//! The effects of faults, at their beginning and end.

use rand::RngExt;

use super::{
    Engine,
    state::{Event, HostState},
};
use crate::{
    fault::{Effect, Target},
    job::Director,
};

impl<D: Director> Engine<'_, D> {
    pub(super) fn fault(&mut self, index: usize, begins: bool) {
        match self.setup.faults[index].effect {
            Effect::Pause { .. } if begins => self.draw(index),
            Effect::Pause { .. } => self.pause(&[]),
            Effect::Slow { target, factor } => {
                self.slow(target, if begins { factor } else { 1.0 });
            }
            Effect::Busy { host, times } => {
                let usual = self.setup.network.hosts[host as usize].slowness;
                self.hosts[host as usize].slowness = if begins { usual * times } else { usual };
                for lane in 0..self.setup.transport.lanes {
                    self.free(self.lane(host, lane));
                }
            }
            Effect::Loss { rate } => {
                self.loss = if begins { rate } else { 0.0 };
                (0..self.about.len() as u32).for_each(|flow| self.limit(flow));
            }
            Effect::Leave { host } => {
                self.hosts[host as usize].has_left = begins;
                self.line(host);
            }
        }
    }

    /// Draws the hosts that pause next.
    pub(super) fn draw(&mut self, index: usize) {
        let Effect::Pause { hosts, every } = self.setup.faults[index].effect else { return };
        let count = self.hosts.len();
        let mut all: Vec<u32> = (0..count as u32).collect();
        for place in 0..(hosts as usize).min(count) {
            let other = self.random.random_range(place..count);
            all.swap(place, other);
        }
        all.truncate(hosts as usize);
        self.pause(&all);
        self.at(self.now + every, Event::Redraw(index));
    }

    fn pause(&mut self, paused: &[u32]) {
        for host in 0..self.hosts.len() as u32 {
            self.hosts[host as usize].is_paused = paused.contains(&host);
            self.line(host);
        }
    }

    fn line(&mut self, host: u32) {
        let HostState { is_paused, has_left, line, .. } = self.hosts[host as usize];
        let about = &self.setup.network.hosts[host as usize];
        let part = |stops: bool| if stops { 0.0 } else { line };
        let (egress, ingress) =
            (self.links.egress[host as usize], self.links.ingress[host as usize]);
        self.flows.set_rate(egress, about.egress * part(is_paused || has_left));
        self.flows.set_rate(ingress, about.ingress * part(has_left));
    }

    fn slow(&mut self, target: Target, factor: f64) {
        match target {
            Target::Host(host) => {
                self.hosts[host as usize].line = factor;
                self.line(host);
            }
            Target::Uplink { tier, group, link } => {
                let network = &self.setup.network;
                let about = network.tiers[tier - 1];
                let members = network.topology.groups(tier)[group as usize].len();
                let (_, each) = network.rates(&about, members);
                for groups in [&self.links.up[tier - 1], &self.links.down[tier - 1]] {
                    let all = &groups[group as usize];
                    for (number, &resource) in (0..).zip(all) {
                        let is_meant = link.is_none_or(|link| all.len() == 1 || link == number);
                        // For links bundled into one, this is the share of a single link.
                        let part = match link {
                            Some(_) if all.len() == 1 => {
                                1.0 - (1.0 - factor) / f64::from(about.links)
                            }
                            _ => factor,
                        };
                        if is_meant {
                            self.flows.set_rate(resource, each * part);
                        }
                    }
                }
            }
        }
    }
}
