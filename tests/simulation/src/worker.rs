//! A training process: the real [`Past`] and [`Formation`], and a [`program`] that uses them as an
//! optimizer with `on_loss="skip"` does.

mod hello;
mod program;

use std::collections::{BTreeMap, BTreeSet};

use gradwire_launcher::launch::job::events::Event as Launched;
use gradwire_proto::{DType, Failure, FailureKind, ProcessSetId, ReduceOp, Request, Shape};
use gradwire_services::launch::{ProcessEnd, Role};
use gradwire_worker::formation::{Formation, Hello, KnownSet, Past, VoteId};

use self::{
    hello::{WORDS, read_hello, write_hello},
    program::add_set,
};
use crate::{
    daemon::{DaemonIn, Key},
    plants::Plant,
    world::{Buffer, Pid, Time, What, World, ms},
};

/// The steps of the program.
const STEPS: u64 = 10;
/// How long the daemon may be silent.
const SILENCE: Time = Time::from_secs(4);

#[derive(Debug)]
pub(crate) enum WorkerIn {
    Begin,
    Thawed,
    Terminate,
    Closed(Pid),
    Later,
    Attached {
        rank: u32,
        size: u32,
        epoch: u64,
    },
    Changed,
    Completed {
        key: Key,
        result: Result<Option<ProcessSetId>, Failure>,
    },
    Aborted {
        failure: Failure,
        is_common: bool,
    },
    Detached,
    /// It looks for a daemon.
    Seek,
    /// A part of a step is computed, in this attachment.
    Computed(u64),
    /// It looks at the heartbeats of its daemon.
    Watch(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Seeking,
    Attaching,
    Introducing,
    Registering,
    /// The ranks find the one with the newest state, and receive it.
    Ages,
    State,
    Computing,
    Creating,
    Reducing,
    Voting,
    /// A rank that has left could not tell the others how the last vote has ended.
    Waiting,
    Leaving,
    Finishing,
    Over,
}

#[derive(Debug)]
pub(crate) struct Worker {
    pid: Pid,
    agent: usize,
    id: u32,
    stage: Stage,
    past: Past,
    hello: Option<Hello>,
    formation: Option<Formation>,
    /// The sets, by their numbers in this epoch.
    sets: BTreeMap<u32, KnownSet>,
    /// The sets before the epoch that forms.
    old_sets: Vec<KnownSet>,
    attached: u64,
    attachments: u64,
    epoch: u64,
    daemon: Option<Pid>,
    rank: u32,
    size: u32,
    pending: BTreeSet<Key>,
    vote: Option<VoteId>,
    /// Its own voice in the last vote.
    voice: bool,
    has_told: bool,
    is_wanted: bool,
    /// The steps that were applied, and what came of them.
    step: u64,
    state: u64,
    has_state: bool,
    /// It may lack the state of the job, for all that the ranks know.
    lacks_state: bool,
    gradients: u64,
    leaves: bool,
}

impl Worker {
    pub(crate) fn new(pid: Pid, agent: usize, id: u32) -> Self {
        Self {
            pid,
            agent,
            id,
            stage: Stage::Seeking,
            past: Past::default(),
            hello: None,
            formation: None,
            sets: BTreeMap::new(),
            old_sets: Vec::new(),
            attached: 0,
            attachments: 0,
            epoch: 0,
            daemon: None,
            rank: 0,
            size: 0,
            pending: BTreeSet::new(),
            vote: None,
            voice: false,
            has_told: false,
            is_wanted: false,
            step: 0,
            state: 0,
            has_state: false,
            lacks_state: false,
            gradients: 0,
            leaves: false,
        }
    }

    pub(crate) fn happens(&mut self, world: &mut World, event: WorkerIn) {
        match event {
            WorkerIn::Begin | WorkerIn::Seek if self.stage == Stage::Seeking => self.seek(world),
            WorkerIn::Terminate => world.end(self.pid, ProcessEnd::Signal(15), false),
            WorkerIn::Closed(pid) if self.daemon == Some(pid) => match self.stage {
                Stage::Attaching => self.later(world),
                Stage::Finishing => self.exit(world, 0),
                Stage::Leaving => self.rejoin(world),
                _ => {
                    let what = "the daemon has ended";
                    self.loses(world, Failure::new(FailureKind::NodeLost, what), false);
                }
            },
            WorkerIn::Later if self.stage == Stage::Attaching => {
                if let Some(daemon) = self.daemon {
                    world.close(self.pid, daemon);
                }
                self.later(world);
            }
            WorkerIn::Attached { rank, size, epoch } if self.stage == Stage::Attaching => {
                (self.rank, self.size, self.attached) = (rank, size, epoch);
                self.attachments += 1;
                self.is_wanted = false;
                world.after(ms(1000), What::Worker(self.pid, WorkerIn::Watch(self.attachments)));
                self.introduce(world);
            }
            WorkerIn::Changed => self.is_wanted = true,
            WorkerIn::Completed { key, result } if self.pending.contains(&key) => match result {
                Ok(set) => self.completed(world, &key, set),
                Err(failure) => self.loses(world, failure, false),
            },
            WorkerIn::Aborted { failure, is_common } if self.is_attached() => match self.stage {
                Stage::Finishing => self.exit(world, if failure.is_recoverable() { 0 } else { 1 }),
                Stage::Leaving => self.rejoin(world),
                _ => self.loses(world, failure, is_common),
            },
            WorkerIn::Detached if self.stage == Stage::Finishing => self.exit(world, 0),
            WorkerIn::Detached if self.stage == Stage::Leaving => self.rejoin(world),
            WorkerIn::Computed(attachment)
                if attachment == self.attachments && self.stage == Stage::Computing =>
            {
                self.begin_step(world);
            }
            WorkerIn::Watch(attachment) if attachment == self.attachments => self.watch(world),
            _ => {}
        }
    }

    fn is_attached(&self) -> bool {
        !matches!(self.stage, Stage::Seeking | Stage::Attaching | Stage::Over)
    }

    fn exit(&mut self, world: &mut World, code: i32) {
        self.stage = Stage::Over;
        if code == 0 {
            world.check.finished(self.step, self.state);
        }
        world.end(self.pid, ProcessEnd::Code(code), false);
    }

    fn watch(&mut self, world: &mut World) {
        let Some(daemon) = self.daemon.filter(|_| self.is_attached()) else { return };
        let frozen = world.processes[daemon].frozen.filter(|(_, until)| *until > world.now);
        if frozen.is_some_and(|(since, _)| world.now > since + SILENCE) {
            world.close(self.pid, daemon);
            let what = "the daemon is silent";
            match self.stage {
                Stage::Finishing => self.exit(world, 0),
                Stage::Leaving => self.rejoin(world),
                _ => self.loses(world, Failure::new(FailureKind::NodeLost, what), false),
            }
            return;
        }
        world.after(ms(1000), What::Worker(self.pid, WorkerIn::Watch(self.attachments)));
    }

    /// Looks for the daemon of a later epoch.
    fn seek(&mut self, world: &mut World) {
        let mut daemons = world.processes.iter().enumerate().filter(|(_, process)| {
            process.is_alive && process.agent == self.agent && process.role == Role::Daemon
        });
        // A frozen one does not answer.
        let found = daemons.next_back().map(|(pid, process)| (pid, process.epoch));
        match found.filter(|(pid, _)| world.frozen_until(*pid).is_none()) {
            Some((pid, epoch)) if epoch > self.attached => {
                self.stage = Stage::Attaching;
                self.daemon = Some(pid);
                world.connect(self.pid, pid);
                let message = DaemonIn::Attach { worker: self.id, pid: self.pid };
                world.tell_daemon(self.pid, pid, message);
            }
            _ => self.later(world),
        }
    }

    fn later(&mut self, world: &mut World) {
        (self.stage, self.daemon) = (Stage::Seeking, None);
        if !std::mem::replace(&mut self.has_told, true) {
            world
                .tell_launcher(self.agent, Launched::Waiting { node: self.agent, worker: self.id });
        }
        let pause = world.dice.time(20, 100);
        world.after(pause, What::Worker(self.pid, WorkerIn::Seek));
    }

    fn rejoin(&mut self, world: &mut World) {
        self.pending.clear();
        let World { memory, processes, .. } = world;
        memory.retain(|(daemon, pid, _), _| *pid != self.pid || processes[*daemon].is_alive);
        (self.stage, self.has_told, self.daemon) = (Stage::Seeking, false, None);
        self.seek(world);
    }

    /// The epoch has ended for this rank.
    fn loses(&mut self, world: &mut World, failure: Failure, is_common: bool) {
        world.note(|| format!("worker {} loses epoch {}: {failure}", self.id, self.attached));
        world.check.told(self.attached, self.id, &failure, is_common);
        for ((daemon, pid, key), buffer) in &world.memory {
            if *pid == self.pid && Some(*daemon) == self.daemon {
                world.check.aborted(&key.1, buffer);
            }
        }
        if !failure.is_recoverable() {
            return self.exit(world, 1);
        }
        let is_running = matches!(self.stage, Stage::Computing | Stage::Creating | Stage::Reducing);
        if is_running
            && self.vote.is_none()
            && self.epoch == self.attached
            && self.step.is_multiple_of(2)
        {
            // A rank that has not voted may ask for the result all the same.
            self.past.ask(self.epoch);
            self.voice = false;
        }
        if let Some(daemon) = self.daemon {
            world.close(self.pid, daemon);
        }
        self.vote = None;
        self.rejoin(world);
    }

    fn submit(&mut self, world: &mut World, set: u32, name: &str, input: Vec<u64>, op: ReduceOp) {
        let shape = Shape::new(&[input.len() as u64]).expect("a small shape");
        let request = Request::allreduce(DType::I64, shape, op);
        let written = vec![false; input.len()];
        let buffer = Buffer { data: input.clone(), input, written };
        let key = (ProcessSetId(set), name.to_owned());
        if let Some(daemon) = self.daemon {
            world.memory.insert((daemon, self.pid, key), buffer);
        }
        self.request(world, set, name, request);
    }

    fn request(&mut self, world: &mut World, set: u32, name: &str, request: Request) {
        let key = (ProcessSetId(set), name.to_owned());
        self.pending.insert(key.clone());
        if let Some(daemon) = self.daemon {
            let message = DaemonIn::Submit { pid: self.pid, key, request };
            world.tell_daemon(self.pid, daemon, message);
        }
    }

    fn take(&self, world: &mut World, set: u32, name: &str) -> Vec<u64> {
        let key = (ProcessSetId(set), name.to_owned());
        let place = self.daemon.map(|daemon| (daemon, self.pid, key));
        let buffer = place.and_then(|place| world.memory.remove(&place));
        buffer.map(|buffer| buffer.data).unwrap_or_default()
    }

    fn introduce(&mut self, world: &mut World) {
        self.stage = Stage::Introducing;
        self.old_sets = self.sets.values().cloned().collect();
        let hello = self.past.hello(self.id, self.old_sets.clone());
        self.past.enter(self.attached);
        let mut words = vec![0; WORDS * self.size as usize];
        let own = &mut words[WORDS * self.rank as usize..][..WORDS];
        write_hello(&hello, own);
        self.hello = Some(hello);
        self.submit(world, 0, "gradwire.epoch", words, ReduceOp::Sum);
    }

    fn completed(&mut self, world: &mut World, key: &Key, set: Option<ProcessSetId>) {
        self.pending.remove(key);
        if let Some(set) = set {
            self.created(key, set);
        }
        if self.stage == Stage::Reducing && key.1.starts_with("gradient") {
            let result = self.take(world, key.0.0, &key.1);
            let members = match self.sets.get(&key.0.0) {
                Some(known) => known.workers.clone(),
                None => self.workers(),
            };
            world.check.result((self.epoch, key.0.0, &key.1, self.step), &members, &result);
            let digest =
                result.iter().fold(u64::from(key.0.0), |sum, one| sum.rotate_left(7) ^ one);
            if key.0 == ProcessSetId::GLOBAL {
                self.gradients ^= digest;
            }
        }
        if !self.pending.is_empty() {
            return;
        }
        match self.stage {
            Stage::Introducing => self.introduced(world),
            Stage::Registering => self.form(world),
            Stage::Ages => {
                let oldest = self.take(world, 0, "ages")[0];
                let (root, age) = ((255 - oldest % 256) as u32, oldest / 256);
                let own = [self.state, self.step];
                let input = if root == self.rank { own.to_vec() } else { vec![0; 2] };
                world.check.root(age, self.lacks_state, self.step);
                if age == 0 {
                    // All ranks with the state of the job are lost.
                    return self.exit(world, 1);
                }
                self.stage = Stage::State;
                self.submit(world, 0, "state", input, ReduceOp::Sum);
            }
            Stage::State => {
                let state = self.take(world, 0, "state");
                (self.state, self.step, self.has_state) = (state[0], state[1], true);
                self.compute(world);
            }
            Stage::Creating => self.reduce(world),
            Stage::Reducing => {
                self.leaves = self.take(world, 0, "wanted")[0] > 0;
                self.ask(world);
            }
            Stage::Voting => self.voted(world),
            Stage::Waiting => {
                self.stage = Stage::Finishing;
                self.detach(world);
            }
            _ => {}
        }
    }

    fn workers(&self) -> Vec<u32> {
        self.formation.as_ref().map(|formation| formation.workers.clone()).unwrap_or_default()
    }

    /// A process set exists. Its name has its members.
    fn created(&mut self, key: &Key, set: ProcessSetId) {
        let known = if self.stage == Stage::Registering {
            let sets = self.formation.iter().flat_map(|formation| &formation.sets);
            sets.clone().find(|known| name_of(known) == key.1).cloned()
        } else {
            let members = key.1.split('.').skip(1).filter_map(|id| id.parse().ok());
            Some(KnownSet { epoch: self.epoch, id: set.0, workers: members.collect() })
        };
        self.sets.extend(known.map(|known| (set.0, known)));
    }

    fn introduced(&mut self, world: &mut World) {
        let words = self.take(world, 0, "gradwire.epoch");
        let hellos: Vec<Hello> = words.chunks(WORDS).map(read_hello).collect();
        let mut formation = match Formation::of(&hellos) {
            Ok(formation) => formation,
            Err(why) => {
                world.check.fault("MEMBER", why);
                return;
            }
        };
        world.check.world(self.attached, &formation.workers);
        if world.has(Plant::DeadMember)
            && let Some(hello) = hellos.iter().max_by_key(|hello| hello.formed)
        {
            formation.sets.clone_from(&hello.sets);
        }
        self.formation = Some(formation);
        self.stage = Stage::Registering;
        self.sets.clear();
        let sets = self.formation.as_ref().map(|it| it.sets.clone()).unwrap_or_default();
        for known in sets {
            let ranks = self.formation.as_ref().map(|it| it.ranks_of(&known)).unwrap_or_default();
            let request = add_set(&ranks);
            self.request(world, 0, &name_of(&known), request);
        }
        if self.pending.is_empty() {
            self.form(world);
        }
    }

    fn form(&mut self, world: &mut World) {
        let (Some(formation), Some(hello)) = (self.formation.clone(), self.hello.take()) else {
            return;
        };
        self.epoch = self.attached;
        let lacks = formation.lacks_state(&hello);
        let mut outcome = self.past.form(self.epoch, &formation, &hello);
        if world.has(Plant::VoteSplit) {
            outcome = outcome.map(|_| self.voice);
        }
        if let (Some(vote), Some(yes)) = (hello.asked, outcome) {
            world.check.answered(self.id, vote, yes, &formation.workers);
            if yes {
                self.apply();
            }
        }
        world.check.sets(self.epoch, self.sets.values(), &formation.workers);
        let state = (!lacks).then_some((self.step, self.state));
        world.check.formed(self.epoch, self.id, &formation, state);
        world.note(|| {
            format!(
                "worker {} forms epoch {} of {:?} as rank {}, state {state:?}, vote {outcome:?}",
                self.id, self.epoch, formation.workers, self.rank
            )
        });
        self.has_state |= !lacks;
        self.lacks_state = lacks;
        if formation.newcomers {
            self.stage = Stage::Ages;
            let age = if self.has_state { self.step + 1 } else { 0 };
            self.submit(
                world,
                0,
                "ages",
                vec![age * 256 + 255 - u64::from(self.rank)],
                ReduceOp::Max,
            );
        } else {
            self.compute(world);
        }
    }
}

fn name_of(known: &KnownSet) -> String {
    format!("back.{}.{}", known.epoch, known.id)
}
