//! What a worker does in each step: it reduces tensors, over all ranks and over process sets, and
//! votes. All ranks apply the step if the vote is true, and skip it otherwise.

use gradwire_proto::{Collective, Rank, ReduceOp, Request};

use super::{STEPS, Stage, Worker, WorkerIn};
use crate::{
    check::contribution,
    daemon::DaemonIn,
    world::{What, World},
};

impl Worker {
    pub(super) fn compute(&mut self, world: &mut World) {
        self.gradients = 0;
        self.vote = None;
        if self.step >= STEPS {
            self.stage = Stage::Waiting;
            self.submit(world, 0, "end", vec![1], ReduceOp::Min);
            return;
        }
        self.stage = Stage::Computing;
        let time = world.dice.time(20, 700);
        world.after(time, What::Worker(self.pid, WorkerIn::Computed(self.attachments)));
    }

    pub(super) fn detach(&self, world: &mut World) {
        if let Some(daemon) = self.daemon {
            world.tell_daemon(self.pid, daemon, DaemonIn::Detach(self.pid));
        }
    }

    /// In some steps, all ranks make a process set of some of them.
    pub(super) fn begin_step(&mut self, world: &mut World) {
        let workers = self.workers();
        let chosen = contribution(7, self.epoch, self.step);
        if self.step % 3 == 1 && self.sets.len() < 2 && workers.len() > 1 {
            let bit = |at: usize| chosen >> (at % 60) & 1 == 1;
            let ranks: Vec<u32> = (0..self.size).filter(|rank| bit(*rank as usize)).collect();
            if ranks.len() > 1 {
                let members: Vec<String> =
                    ranks.iter().map(|rank| workers[*rank as usize].to_string()).collect();
                self.stage = Stage::Creating;
                let name = format!("new.{}", members.join("."));
                self.request(world, 0, &name, add_set(&ranks));
                return;
            }
        }
        self.reduce(world);
    }

    pub(super) fn reduce(&mut self, world: &mut World) {
        self.stage = Stage::Reducing;
        let wanted = vec![u64::from(self.is_wanted)];
        self.submit(world, 0, "wanted", wanted, ReduceOp::Max);
        let own: Vec<u32> = self
            .sets
            .iter()
            .filter(|(_, it)| it.workers.contains(&self.id))
            .map(|it| *it.0)
            .collect();
        for set in [0].into_iter().chain(own) {
            let count = 1 + contribution(11, u64::from(set), self.step) % 220;
            let base = contribution(u64::from(self.id), self.epoch, self.step);
            let input = (0..count).map(|at| base.wrapping_mul(2 * at + 1)).collect();
            self.submit(world, set, &format!("gradient{set}"), input, ReduceOp::Sum);
        }
    }

    pub(super) fn ask(&mut self, world: &mut World) {
        self.stage = Stage::Voting;
        self.voice = !world.dice.one_in(12);
        self.vote = self.past.ask(self.epoch);
        if self.vote.is_none() {
            world.check.fault("VOTE", "a rank can't begin a vote".to_owned());
        }
        self.submit(world, 0, "gradwire.vote", vec![u64::from(self.voice)], ReduceOp::Min);
    }

    pub(super) fn voted(&mut self, world: &mut World) {
        let yes = self.take(world, 0, "gradwire.vote")[0] == 1;
        if let Some(vote) = self.vote.take() {
            self.past.hear(vote, yes);
            world.check.answered(self.id, vote, yes, &self.workers());
        }
        if yes {
            self.apply();
        }
        if self.leaves && self.step < STEPS {
            self.stage = Stage::Leaving;
            self.detach(world);
        } else {
            self.compute(world);
        }
    }

    pub(super) fn apply(&mut self) {
        self.state = self.state.rotate_left(11) ^ self.gradients ^ self.step;
        self.step += 1;
        self.gradients = 0;
    }
}

/// The request for a process set.
pub(super) fn add_set(ranks: &[u32]) -> Request {
    let list = ranks.iter().map(|rank| u64::from(Rank(*rank).0)).collect();
    Request { list, ..Request::empty(Collective::AddProcessSet) }
}
