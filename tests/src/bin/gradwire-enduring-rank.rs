//! A rank of an elastic job that may lose anything at any time: in each step it makes every
//! collective, in f32 and bf16, checks the results, and adds a gradient to its weights if all ranks
//! agree. It ends when all ranks have seen the file `stop`.
//!
//! The gradients are small whole numbers. So the weights follow exactly from the workers that took
//! part in each step, in any order of additions, and the reader of the output can replay them. A
//! line of output is `@<microseconds of CLOCK_MONOTONIC> step <number> <epoch> <workers> <weight>`.

use std::{io::Write, path::Path, process::ExitCode, thread::sleep, time::Duration};

use anyhow::{Result, anyhow, ensure};
use gradwire_proto::{Collective, DType, ReduceOp};
use gradwire_reference::{Between, Dice};
use gradwire_tests::{
    calls::{self, COLLECTIVES, Call, Form, Pending},
    launched::now_us,
};
use gradwire_worker::{
    AllreduceOptions, BroadcastOptions, GradwireError, Rejoined, Session, Tensor,
};

/// The pause between steps.
const PAUSE: Duration = Duration::from_millis(5);

/// The elements of the weights: several pieces, so that a loss interrupts operations midway.
const ELEMENTS: usize = 1 << 15;

/// The rows of other tensors: divisible by the numbers of ranks from 1 to 6.
const ROWS: u64 = 120;

fn say(word: &str, text: impl std::fmt::Display) {
    let line = format!("@{} {word} {text}\n", now_us());
    // Some tests close the reader.
    let _ = std::io::stdout().write_all(line.as_bytes());
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say("failed", format_args!("{error:#}").to_string().replace('\n', "\\n"));
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let session = Session::from_env()?;
    let (weights, sum) = (session.zeros(&[ELEMENTS])?, session.zeros(&[ELEMENTS])?);
    let holds = session.epoch() == 1;
    let (step, epoch, members, asks) = (0, 0, Vec::new(), false);
    let mut rank = Rank { session, weights, sum, step, holds, epoch, members, asks };
    loop {
        match rank.step() {
            Ok(Next::Step) => sleep(PAUSE),
            Ok(Next::Epoch) => rank.rejoin()?,
            Ok(Next::End) => break,
            Err(error) => {
                let own = error.downcast_ref::<GradwireError>();
                if !own.is_some_and(GradwireError::is_recoverable) {
                    return Err(error);
                }
                rank.rejoin()?;
            }
        }
    }
    rank.session.shutdown()?;
    say("left", rank.step);
    Ok(())
}

struct Rank {
    session: Session,
    weights: Tensor<f32>,
    sum: Tensor<f32>,
    /// The number of the next step.
    step: u64,
    /// Whether this process has the state of the job.
    holds: bool,
    /// The epoch in which the ranks last had the same state, and its workers by rank; none until
    /// they have in this one.
    epoch: u64,
    members: Vec<u64>,
    /// Whether the vote that is in flight decides about the step.
    asks: bool,
}

enum Next {
    Step,
    Epoch,
    End,
}

impl Rank {
    fn rejoin(&mut self) -> Result<()> {
        // SAFETY: this thread is the only one of the process that uses its tensors.
        #[expect(unsafe_code, reason = "the call moves tensors")]
        let Rejoined { vote, .. } = unsafe { self.session.rejoin() }?;
        if std::mem::take(&mut self.asks) && vote == Some(true) {
            self.keep()?;
        }
        self.members.clear();
        Ok(())
    }

    /// Gives newcomers the state, which all others must have alike.
    fn synchronize(&mut self) -> Result<()> {
        let worker: u64 = std::env::var("GRADWIRE_WORKER")?.parse()?;
        let weight = u64::from(self.weights[0].to_bits());
        let own = self.session.tensor(&[worker, self.holds.into(), self.step, weight], &[1, 4])?;
        let all = self.session.allgather(&own, Default::default())?.tensor.to_vec();
        let (all, _) = all.as_chunks::<4>();
        let states: Vec<_> = all.iter().filter(|[_, holds, ..]| *holds == 1).collect();
        let root = all.iter().position(|[_, holds, ..]| *holds == 1);
        let root = root.ok_or_else(|| anyhow!("no rank has the state"))? as u32;
        let alike = states.iter().all(|state| state[2..] == states[0][2..]);
        ensure!(alike, "the survivors differ: worker, has state, step, weight: {all:?}");
        let from = |name: &str| BroadcastOptions::from_rank(root).name(name);
        let mut step = [self.step];
        self.session.broadcast_slice(&mut step, from("step"))?;
        self.session.broadcast(&mut self.weights, from("weights"))?;
        // Only once all have it: a loss may come before.
        ensure!(self.session.vote(true)?, "all have voted for it");
        (self.step, self.holds, self.epoch) = (step[0], true, self.session.epoch());
        self.members = all.iter().map(|[worker, ..]| *worker).collect();
        Ok(())
    }

    fn step(&mut self) -> Result<Next> {
        if self.members.is_empty() {
            self.synchronize()?;
        }
        let pending = self.start_all()?;
        let own = gradient(self.members[self.session.rank() as usize], self.step);
        self.sum.fill(own);
        let options = AllreduceOptions::named("gradient").op(ReduceOp::Sum);
        self.session.allreduce(&mut self.sum, options)?;
        let nodes = self.session.nodes().len();
        let between = Between { nodes, compression: self.session.compression() };
        for (call, pending) in pending {
            let got = pending.finish()?;
            call.check(self.session.rank(), &got, between).map_err(|wrong| anyhow!(wrong))?;
        }
        self.asks = true;
        let keeps = self.session.vote(true)?;
        self.asks = false;
        ensure!(keeps, "all ranks have voted for the step");
        self.keep()?;
        let wants = Path::new("stop").exists();
        let goes_on = !wants && self.session.pending_change().is_none();
        if self.session.vote(goes_on)? {
            return Ok(Next::Step);
        }
        Ok(if self.session.vote(wants)? { Next::End } else { Next::Epoch })
    }

    /// Starts every collective.
    fn start_all(&self) -> Result<Vec<(Call, Pending)>> {
        let ranks: Vec<u32> = (0..self.session.size()).collect();
        let mut dice = Dice::of(&[self.step]);
        let all = self.session.global_process_set();
        let mut pending = Vec::new();
        for collective in COLLECTIVES {
            // A message is between two ranks only.
            if collective == Collective::SendReceive {
                continue;
            }
            for dtype in [DType::F32, DType::Bf16] {
                let columns = 1 + dice.below(60);
                let root = dice.below(ranks.len() as u64) as u32;
                let asked = calls::request(collective, dtype, &[ROWS, columns], root);
                let asked = match calls::reduces(collective) {
                    true => calls::with_op(asked, ReduceOp::Sum),
                    false => asked,
                };
                let call = Call {
                    seed: self.step,
                    form: Form::Handle,
                    ..Call::same(format!("{collective} of {dtype}"), &ranks, &asked)
                };
                let started = call.start(&self.session, &all)?;
                pending.push((call, started));
            }
        }
        Ok(pending)
    }

    /// Keeps the step, as all ranks do.
    fn keep(&mut self) -> Result<()> {
        self.weights.iter_mut().zip(self.sum.iter()).for_each(|(weight, sum)| *weight += sum);
        let weight = self.weights[0];
        ensure!(self.weights.iter().all(|other| *other == weight), "the weights differ");
        let members: Vec<_> = self.members.iter().map(ToString::to_string).collect();
        let (step, epoch, members) = (self.step, self.epoch, members.join(","));
        say("step", format_args!("{step} {epoch} {members} {weight}"));
        self.step += 1;
        Ok(())
    }
}

/// The part of a worker in a step; the test that reads the output has the same function.
fn gradient(worker: u64, step: u64) -> f32 {
    ((worker % 7 + 1) * (step % 5 + 1)) as f32
}
