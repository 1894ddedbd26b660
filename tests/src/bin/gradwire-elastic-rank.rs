//! A rank of an elastic job: it sums and checks a tensor in each step, joins the next epoch after a
//! loss or for a change, and ends when all ranks have seen the file `stop`.
//!
//! ```text
//! gradwire run -np 3 --min-np 1 -- target/debug/gradwire-elastic-rank
//! ```
//!
//! Each line of output is `@<microseconds of CLOCK_MONOTONIC> <word> <text>`, as that of
//! `gradwire-test-rank`. In each epoch a rank says `epoch`, with its number, the rank and the size.

use std::{io::Write, path::Path, process::ExitCode, thread::sleep, time::Duration};

use anyhow::{Result, ensure};
use gradwire_proto::ReduceOp;
use gradwire_tests::launched::now_us;
use gradwire_worker::{AllreduceOptions, GradwireError, Session, Tensor};

/// The pause between steps.
const PAUSE: Duration = Duration::from_millis(5);

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
    // It stays valid in all epochs.
    let mut tensor = session.zeros::<f32>(&[1000])?;
    say_epoch(&session);
    loop {
        match step(&session, &mut tensor) {
            Ok(Next::Step) => sleep(PAUSE),
            Ok(Next::Change) => rejoin(&session)?,
            Ok(Next::End) => break,
            Err(error) => {
                let own = error.downcast_ref::<GradwireError>();
                if !own.is_some_and(GradwireError::is_recoverable) {
                    return Err(error);
                }
                rejoin(&session)?;
            }
        }
    }
    session.shutdown()?;
    say("left", "");
    Ok(())
}

fn say_epoch(session: &Session) {
    let (epoch, rank, size) = (session.epoch(), session.rank(), session.size());
    say("epoch", format_args!("{epoch} {rank} {size}"));
}

fn rejoin(session: &Session) -> Result<()> {
    // SAFETY: this thread is the only one of the process that uses its tensors.
    unsafe { session.rejoin() }?;
    say_epoch(session);
    Ok(())
}

enum Next {
    Step,
    Change,
    End,
}

/// Sums a tensor; all ranks agree on what comes next.
fn step(session: &Session, tensor: &mut Tensor<f32>) -> Result<Next> {
    tensor.as_mut_slice().fill(1.0);
    session.allreduce(tensor, AllreduceOptions::named("step").op(ReduceOp::Sum))?;
    let size = session.size() as f32;
    ensure!(tensor.as_slice().iter().all(|sum| *sum == size), "the sum of {size} ranks is wrong");
    if session.vote(Path::new("stop").exists())? {
        return Ok(Next::End);
    }
    let stays = session.vote(session.pending_change().is_none())?;
    Ok(if stays { Next::Step } else { Next::Change })
}
