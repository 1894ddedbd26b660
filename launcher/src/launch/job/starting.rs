//! Starts the processes of a job: the daemon of the first host, then the other daemons, which need
//! the address of its coordinator, then the ranks, which need all daemons.

use gradwire_services::launch::{Order, Role, Start};

use super::{Host, Job, Phase, Process, events::Command};
use crate::launch::{
    metrics_file::DaemonMetrics,
    plan::{Places, Variables},
};

impl Job {
    pub(super) fn start(&mut self, node: usize, role: Role, environment: Variables) {
        self.processes.insert((node, role), Process::default());
        let args = if let Role::Rank(_) = role { self.plan.args.clone() } else { Vec::new() };
        self.order(node, Order::Start(Start { role, args, environment }));
    }

    /// Starts the daemon of the first host; the others need the address of its coordinator.
    pub(super) fn start_first(&mut self) {
        let Some(address) = self.hosts[0].address else { return };
        self.phase = Phase::First;
        self.start(0, Role::Daemon, self.plan.daemon_variables(0, address, None));
    }

    pub(super) fn start_daemons(&mut self) {
        self.phase = Phase::Daemons;
        for node in 1..self.hosts.len() {
            let Some(address) = self.hosts[node].address else { continue };
            let environment = self.plan.daemon_variables(node, address, self.coordinator);
            self.start(node, Role::Daemon, environment);
        }
    }

    pub(super) fn start_ranks(&mut self) {
        let hosts = &self.hosts;
        let places = Places {
            addresses: hosts.iter().filter_map(|host| host.address).collect(),
            master_port: hosts[0].port,
            daemon_metrics: hosts
                .iter()
                .filter_map(|host| host.metrics.map(|at| at.to_string()))
                .collect(),
        };
        let daemons = self.hosts.iter().enumerate().filter_map(|(node, host)| {
            let (host_address, metrics) = (host.address?, host.metrics?);
            Some(DaemonMetrics { host: self.host(node).to_owned(), host_address, metrics })
        });
        let daemons = daemons.collect();
        // It is known: the daemons of other hosts needed it.
        if let Some(coordinator) = self.coordinator {
            self.commands.push(Command::Serving { coordinator, daemons });
        }
        self.phase = Phase::Running;
        self.ranks_ran = true;
        for node in 0..self.hosts.len() {
            let here = &self.plan.nodes[node];
            for rank in here.first_rank..here.first_rank + here.ranks {
                let environment = self.plan.rank_variables(node, rank, &places);
                self.start(node, Role::Rank(rank), environment);
            }
        }
    }

    /// What has not started (WAIT), by name.
    pub(super) fn missing(&self) -> String {
        let hosts = |lacks: &dyn Fn(&Host) -> bool| -> String {
            let hosts = self.hosts.iter().zip(&self.plan.nodes);
            let names: Vec<_> =
                hosts.filter(|(host, _)| lacks(host)).map(|(_, node)| node.host.as_str()).collect();
            names.join(", ")
        };
        match self.phase {
            Phase::Reaching => format!("no answer from {}", hosts(&|host| !host.answered)),
            Phase::First => format!("the daemon on host {} does not serve", self.host(0)),
            Phase::Daemons => format!("no daemon serves on {}", hosts(&|h| h.metrics.is_none())),
            _ => {
                let ranks = (0..self.plan.size()).filter(|rank| !self.has_started(*rank));
                let ranks: Vec<_> = ranks.map(|rank| rank.to_string()).collect();
                format!("ranks not started: {}", ranks.join(", "))
            }
        }
    }
}
