//! A rank that follows the steps in its arguments, and prints the time of each event.
//!
//! ```text
//! gradwire-test-rank attach 2/sleep:500 reduce:x:1000 leave
//! ```
//!
//! A step may begin with the ranks that it is for: `0,2/step`, or `!1/step` for all but rank 1.
//! Each line of output is `@<microseconds of CLOCK_MONOTONIC> <word> <text>`, so a test can see how
//! long after a fault a rank got its error. A step that fails ends the rank: it prints `failed`
//! with the error's text, also on standard error, and exits with code 1.

#![forbid(unsafe_code)]

use std::{
    io::Write,
    path::Path,
    process::ExitCode,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gradwire_proto::ReduceOp;
use gradwire_reference::counted;
use gradwire_tests::{launched::now_us, script::Script};
use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, FailureKind, GradwireError, Session, SparseOptions,
    SparseRows, Tensor,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Longer than any test takes.
const FOREVER: Duration = Duration::from_secs(600);

fn say(word: &str, text: impl std::fmt::Display) {
    let text = text.to_string().replace('\n', "\\n");
    let line = format!("@{} {word} {text}\n", now_us());
    // Some tests close the reader.
    let _ = std::io::stdout().write_all(line.as_bytes());
}

fn main() -> ExitCode {
    let steps: Vec<String> = std::env::args().skip(1).collect();
    let mut rank = Rank::default();
    for step in &steps {
        match rank.step(step) {
            Ok(None) => {}
            Ok(Some(code)) => return ExitCode::from(code),
            Err(error) => {
                say("failed", &error);
                eprintln!("error: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

#[derive(Default)]
struct Rank {
    session: Option<Session>,
    /// Keeps SIGTERM from ending this process.
    deaf: Option<(tokio::runtime::Runtime, Signal)>,
}

/// Whether a step that begins with `whom/` is for `rank`.
fn concerns(whom: &str, rank: &str) -> bool {
    match whom.strip_prefix('!') {
        Some(others) => !concerns(others, rank),
        None => whom.split(',').any(|one| one == rank),
    }
}

/// The parts of `x:y:z` after the first, as numbers.
fn numbers<const N: usize>(step: &str) -> Result<[u64; N]> {
    let parts = step.split(':').skip(1).map(str::parse).collect::<Result<Vec<u64>, _>>();
    let parts = parts.with_context(|| format!("step {step:?} needs numbers"))?;
    let count = parts.len();
    parts.try_into().map_err(|_| anyhow::anyhow!("step {step:?} has {count} numbers, not {N}"))
}

impl Rank {
    fn session(&self) -> Result<&Session> {
        self.session.as_ref().context("attach comes first")
    }

    /// Executes one step; returns the exit code if it was the last.
    fn step(&mut self, step: &str) -> Result<Option<u8>> {
        let step = match step.split_once('/') {
            Some((whom, step)) => {
                if !concerns(whom, &std::env::var("GRADWIRE_RANK")?) {
                    return Ok(None);
                }
                step
            }
            None => step,
        };
        let (word, argument) = step.split_once(':').unwrap_or((step, ""));
        match word {
            "attach" => {
                let session = Session::from_env()?;
                say("attached", format_args!("{} of {}", session.rank(), session.size()));
                self.session = Some(session);
            }
            "loop" => self.repeat(numbers(step)?)?,
            "train" => self.train(numbers(step)?)?,
            "slice" => self.slice(numbers(step)?)?,
            "submit" => self.submit(numbers(step)?)?,
            "lend" => self.lend(numbers(step)?)?,
            "lonely" => self.lonely(numbers(step)?)?,
            "gather" => self.gather(numbers(step)?)?,
            "random" => self.random(numbers(step)?)?,
            "sparse" => self.sparse(numbers(step)?)?,
            "sleep" => sleep(Duration::from_millis(numbers::<1>(step)?[0])),
            "mark" => {
                let session = self.session()?;
                (0..numbers::<1>(step)?[0]).for_each(|_| session.mark_step());
            }
            "until" => until(Path::new(argument))?,
            "env" => say("env", std::env::var(argument).unwrap_or_default()),
            "say" => say("said", argument),
            "complain" => eprintln!("{argument}"),
            "deaf" => self.deaf = Some(become_deaf()?),
            "limit" => limit(argument)?,
            "leave" => {
                self.session()?.shutdown()?;
                say("left", "");
            }
            "hang" => sleep(FOREVER),
            "exit" => return Ok(Some(argument.parse()?)),
            _ => bail!("unknown step {step:?}"),
        }
        Ok(None)
    }

    /// Sums a tensor of `elements` elements `steps` times, and checks every element of the result.
    fn repeat(&self, [steps, elements]: [u64; 2]) -> Result<()> {
        let session = self.session()?;
        let mut tensor = session.zeros::<f32>(&[usize::try_from(elements)?])?;
        let begin = Instant::now();
        for step in 0..steps {
            counted::fill(tensor.as_mut_slice(), session.rank(), step);
            let options = AllreduceOptions::named(format!("loop.{elements}")).op(ReduceOp::Sum);
            session.allreduce(&mut tensor, options)?;
            check(&tensor, session.size(), step)?;
            if step == 0 {
                say("looping", "");
            }
        }
        say("looped", format_args!("{steps} in {:?}", begin.elapsed()));
        Ok(())
    }

    /// Repeats steps of `computation` milliseconds and a sum of `elements` elements, until some
    /// rank finds the file `end`.
    fn train(&self, [computation, elements]: [u64; 2]) -> Result<()> {
        let session = self.session()?;
        let mut tensor = session.zeros::<f32>(&[usize::try_from(elements)?])?;
        say("training", "");
        while tensor.as_slice()[0] == 0.0 {
            sleep(Duration::from_millis(computation));
            let is_over = Path::new("end").exists();
            tensor.as_mut_slice().fill(f32::from(u8::from(is_over)));
            session
                .allreduce(&mut tensor, AllreduceOptions::named("gradient").op(ReduceOp::Sum))?;
            session.mark_step();
        }
        Ok(())
    }

    /// Submits several tensors, prints that, and waits for them.
    fn submit(&self, [tensors, elements]: [u64; 2]) -> Result<()> {
        let session = self.session()?;
        let mut handles = Vec::new();
        for i in 0..tensors {
            let mut tensor = session.zeros::<f32>(&[usize::try_from(elements)?])?;
            counted::fill(tensor.as_mut_slice(), session.rank(), i);
            let options = AllreduceOptions::named(format!("layer.{i}")).op(ReduceOp::Sum);
            handles.push(session.allreduce_async(tensor, options)?);
        }
        say("submitted", "");
        for (i, handle) in (0..).zip(handles) {
            check(&handle.wait()?, session.size(), i)?;
        }
        say("done", "");
        Ok(())
    }

    /// Sums ordinary memory several times.
    fn slice(&self, [times, elements]: [u64; 2]) -> Result<()> {
        let session = self.session()?;
        let own = session.rank() as f32 + 1.0;
        let sum: f32 = (1..=session.size()).map(|rank| rank as f32).sum();
        for _ in 0..times {
            let mut slice = vec![own; usize::try_from(elements)?];
            let options = AllreduceOptions::named("slice").op(ReduceOp::Sum);
            session.allreduce_slice(&mut slice, options)?;
            ensure!(slice.iter().all(|element| *element == sum), "not {sum}: {:?}", slice[0]);
        }
        Ok(())
    }

    /// Sums tensors in place, alternately in shared and in ordinary memory, until a sum fails, and
    /// prints that. Then waits for the file `go`, and prints how many elements have changed since
    /// the failure.
    fn lend(&self, [elements]: [u64; 1]) -> Result<()> {
        let session = self.session()?;
        let elements = usize::try_from(elements)?;
        let mut tensor = session.zeros::<f32>(&[elements])?;
        let mut slice = vec![0.0f32; elements / 8];
        let own = session.rank() as f32 + 1.0;
        let sum = |name: &str| AllreduceOptions::named(name).op(ReduceOp::Sum);
        let mut step = 0;
        let error = loop {
            tensor.as_mut_slice().fill(own);
            slice.fill(own);
            let done = session
                .allreduce(&mut tensor, sum("tensor"))
                .and_then(|()| session.allreduce_slice(&mut slice, sum("slice")));
            if let Err(error) = done {
                break error;
            }
            if step == 0 {
                say("looping", "");
            }
            step += 1;
        };
        let before = [tensor.as_slice().to_vec(), slice.clone()];
        say("notified", &error);
        until(Path::new("go"))?;
        let now = [tensor.as_slice(), &slice];
        let changed = before.iter().zip(now).map(|(before, now)| {
            before.iter().zip(now).filter(|(before, now)| before != now).count()
        });
        say("changed", format_args!("{:?}", changed.collect::<Vec<_>>()));
        Ok(())
    }

    /// Submits tensors that another rank leaves without, and prints how many of them failed as
    /// expected.
    fn lonely(&self, [tensors]: [u64; 1]) -> Result<()> {
        let session = self.session()?;
        let mut handles = Vec::new();
        for i in 0..tensors {
            let options = AllreduceOptions::named(format!("lonely.{i}"));
            handles.push(session.allreduce_async(session.zeros::<f32>(&[1])?, options)?);
        }
        say("submitted", "");
        let mut left = 0;
        for handle in handles {
            let name = handle.name().clone();
            match handle.wait() {
                Err(GradwireError::Failed(failure)) if failure.kind == FailureKind::RankLeft => {
                    ensure!(failure.tensor == name.as_str(), "'{name}': {failure}");
                    left += 1;
                }
                Err(other) => bail!("'{name}': {other}"),
                Ok(_) => bail!("'{name}' was done by one rank alone"),
            }
        }
        say("lonely", left);
        Ok(())
    }

    /// Gathers elements from each rank except rank 1, which contributes none.
    fn gather(&self, [elements]: [u64; 1]) -> Result<()> {
        let session = self.session()?;
        let mine = if session.rank() == 1 { 0 } else { elements };
        let own = session.zeros::<u8>(&[usize::try_from(mine)?])?;
        let all = session.allgather(&own, AllgatherOptions::default())?;
        say("gathered", format_args!("{:?}", all.rows));
        Ok(())
    }

    /// Adds up every rank's first `count` rows of a tensor of `rows` rows.
    fn sparse(&self, [rows, count]: [u64; 2]) -> Result<()> {
        let session = self.session()?;
        let values = vec![1.0f32; usize::try_from(count)?];
        let indices = (0..values.len()).collect();
        let own = SparseRows { rows: usize::try_from(rows)?, cols: 1, indices, values };
        let options = SparseOptions::default().op(ReduceOp::Sum);
        let all = session.sparse_allreduce(&own, options)?;
        let ranks = session.size() as f32;
        ensure!(all.rows.values.iter().all(|value| *value == ranks), "{:?}", all.rows.values);
        say("sparse", if all.dense { "dense" } else { "rows" });
        Ok(())
    }

    /// Runs this rank's part of a random job, checks its results, and prints the hashes of those
    /// that must be equal on all ranks.
    fn random(&self, [seed, calls, most_bytes]: [u64; 3]) -> Result<()> {
        let session = self.session()?;
        let script = Script::of(seed, usize::try_from(calls)?, most_bytes);
        let results = script.run(session).map_err(anyhow::Error::msg)?;
        script.check_rank(session.rank(), &results).map_err(anyhow::Error::msg)?;
        for ((index, round), digest) in script.digests(&results) {
            say("digest", format_args!("{index} {round} {digest}"));
        }
        say("checked", format_args!("{} results", results.len()));
        Ok(())
    }
}

fn check(tensor: &Tensor<f32>, size: u32, step: u64) -> Result<()> {
    counted::check(tensor.as_slice(), size, step).map_err(anyhow::Error::msg)
}

fn until(path: &Path) -> Result<()> {
    let begin = Instant::now();
    while !path.exists() {
        ensure!(begin.elapsed() < FOREVER, "{} was not created", path.display());
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Handles SIGTERM like a program that then writes a checkpoint: the signal does not end it.
fn become_deaf() -> Result<(tokio::runtime::Runtime, Signal)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let entered = runtime.enter();
    let term = signal(SignalKind::terminate())?;
    drop(entered);
    Ok((runtime, term))
}

/// Limits a resource of this process: `name=number`. `as=+number` allows this much more address
/// space than the process uses now.
fn limit(argument: &str) -> Result<()> {
    let (name, number) = argument.split_once('=').context("limit:name=number")?;
    let resource = match name {
        "as" => Resource::As,
        "fsize" => Resource::Fsize,
        "nofile" => Resource::Nofile,
        _ => bail!("unknown limit {name:?}"),
    };
    let mut current: u64 = number.parse()?;
    if number.starts_with('+') {
        // The first number is the size, in pages.
        let pages = std::fs::read_to_string("/proc/self/statm")?;
        let pages: u64 = pages.split(' ').next().unwrap_or_default().parse()?;
        current += pages * rustix::param::page_size() as u64;
    }
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(current), maximum })?;
    Ok(())
}
