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

    /// Starts the daemon of the first node; the others need the address of its coordinator.
    pub(super) fn start_first(&mut self) {
        let first = self.first();
        let Some(address) = self.hosts[first].address else { return };
        self.phase = Phase::First;
        self.start(first, Role::Daemon, self.plan.daemon_variables(0, address, None));
    }

    pub(super) fn start_daemons(&mut self) {
        self.phase = Phase::Daemons;
        for node in 1..self.plan.nodes.len() {
            let agent = self.plan.nodes[node].agent;
            let Some(address) = self.hosts[agent].address else { continue };
            let environment = self.plan.daemon_variables(node, address, self.coordinator);
            self.start(agent, Role::Daemon, environment);
        }
    }

    /// Says where the daemons of an epoch serve.
    pub(super) fn serving(&mut self) {
        let daemons = self.plan.nodes.iter().filter_map(|node| {
            let host = &self.hosts[node.agent];
            let (host_address, metrics) = (host.address?, host.metrics?);
            Some(DaemonMetrics { host: node.host.clone(), host_address, metrics })
        });
        let (daemons, ranks) = (daemons.collect(), self.plan.size());
        // It is known: the daemons of other hosts needed it.
        if let Some(coordinator) = self.coordinator {
            let epoch = self.plan.epoch;
            self.commands.push(Command::Serving { epoch, coordinator, daemons, ranks });
        }
    }

    /// Starts the ranks of the first epoch, in which agents and nodes have the same numbers.
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
        self.serving();
        self.phase = Phase::Running;
        self.ranks_ran = true;
        for node in 0..self.hosts.len() {
            for rank in self.plan.nodes[node].workers.clone() {
                let environment = self.plan.rank_variables(node, rank, &places);
                self.start(node, Role::Rank(rank), environment);
            }
        }
    }

    /// What has not started (WAIT), by name.
    pub(super) fn missing(&self) -> String {
        let hosts = |lacks: &dyn Fn(&Host) -> bool| -> String {
            let hosts = self.plan.nodes.iter().map(|node| &self.hosts[node.agent]);
            let names: Vec<_> =
                hosts.filter(|host| lacks(host)).map(|host| host.name.as_str()).collect();
            names.join(", ")
        };
        match self.phase {
            Phase::Reaching => format!("no answer from {}", hosts(&|host| !host.answered)),
            Phase::First => {
                format!("the daemon on host {} does not serve", self.host(self.first()))
            }
            Phase::Daemons => format!("no daemon serves on {}", hosts(&|h| h.metrics.is_none())),
            _ => {
                let missing = self.plan.members().filter(|member| !self.has_started(*member));
                let of_host = |(agent, rank)| format!("{rank} ({})", self.host(agent));
                let ranks: Vec<_> = missing.map(of_host).collect();
                format!("ranks not started: {}", ranks.join(", "))
            }
        }
    }
}
