//! Training that survives lost ranks:
//!
//! ```text
//! gradwire run -np 3 --min-np 2 -- target/release/examples/elastic
//! ```
//!
//! Kill a rank with `kill -9`: the others go on, a new process replaces it, and all ranks end with
//! the same model.

use std::{env, error::Error, thread, time::Duration};

use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, BroadcastOptions, GradwireError, ReduceOp, Session, Tensor,
};

/// How long each step computes, in this example by sleeping.
const COMPUTE: Duration = Duration::from_millis(1);

struct Model {
    weights: Tensor<f64>,
    gradient: Tensor<f64>,
    /// How many steps it was trained for.
    steps: u64,
}

/// What a rank does next.
enum Next {
    Step,
    Rejoin,
}

impl Model {
    /// Gives all ranks the model of one that was trained for the most steps.
    fn synchronize(&mut self, session: &Session) -> Result<Next, GradwireError> {
        let steps = session.allgather_object(&self.steps, AllgatherOptions::named("steps"))?;
        let most = steps.iter().copied().max().unwrap_or_default();
        let root = steps.iter().position(|&steps| steps == most).unwrap_or_default() as u32;
        let from_root = BroadcastOptions::from_rank(root).name("weights");
        session.broadcast(&mut self.weights, from_root)?;
        self.steps = most; // only now: a loss may interrupt the broadcast
        let (rank, size, epoch) = (session.rank(), session.size(), session.epoch());
        println!("epoch {epoch}: rank {rank} of {size} goes on after {most} steps");
        Ok(Next::Step)
    }

    /// Makes one step, on all ranks or on none.
    fn train(&mut self, session: &Session) -> Result<Next, GradwireError> {
        thread::sleep(COMPUTE);
        // Each rank has its own target. The average of all targets is 3.
        let target = 3.0 + f64::from(session.rank()) - f64::from(session.size() - 1) / 2.0;
        for (gradient, weight) in self.gradient.iter_mut().zip(self.weights.iter()) {
            *gradient = weight - target;
        }
        session.allreduce(&mut self.gradient, AllreduceOptions::named("gradient"))?;
        // A new process waits for the others, or a host has to be left. All ranks agree on it.
        let mut changes = [u8::from(session.pending_change().is_some())];
        let options = AllreduceOptions::named("changes").op(ReduceOp::Max);
        session.allreduce_slice(&mut changes, options)?;
        // If a loss interrupts the vote, `rejoin` returns its result.
        session.vote(true)?;
        self.update();
        Ok(if changes[0] == 0 { Next::Step } else { Next::Rejoin })
    }

    fn update(&mut self) {
        for (weight, gradient) in self.weights.iter_mut().zip(self.gradient.iter()) {
            *weight -= 0.01 * gradient;
        }
        self.steps += 1;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let steps = env::args().nth(1).map_or(Ok(10_000), |steps| steps.parse());
    let steps: u64 = steps.map_err(|_| "the argument must be the number of steps")?;
    let session = Session::from_env()?;
    let (weights, gradient) = (session.zeros(&[1000])?, session.zeros(&[1000])?);
    let mut model = Model { weights, gradient, steps: 0 };
    // A new process lacks the model, and does not know whether the job has just begun.
    let mut synchronized = false;
    while model.steps < steps {
        let done = if synchronized { model.train(&session) } else { model.synchronize(&session) };
        match done {
            Ok(Next::Step) => {
                synchronized = true;
                continue;
            }
            Ok(Next::Rejoin) => {}
            Err(error) if error.is_recoverable() => {}
            Err(error) => return Err(error.into()),
        }
        // SAFETY: this thread is the only one that uses tensors.
        #[expect(unsafe_code, reason = "the memory of tensors moves")]
        let rejoined = unsafe { session.rejoin() }?;
        if rejoined.vote == Some(true) {
            model.update();
        }
        synchronized = !rejoined.newcomers;
    }
    println!("rank {}: weight {:.3} after {} steps", session.rank(), model.weights[0], model.steps);
    Ok(session.shutdown()?)
}
