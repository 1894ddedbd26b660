//! `gradwire run -np 2 -- target/release/examples/first_job`: each rank gives a vector, and all get
//! the sum.

use gradwire_worker::{AllreduceOptions, GradwireError, ReduceOp, Session};

fn main() -> Result<(), GradwireError> {
    let session = Session::from_env()?;
    let mut vector = [session.rank() as f32, 1.0, 10.0];
    session.allreduce_slice(&mut vector, AllreduceOptions::named("vector").op(ReduceOp::Sum))?;
    println!("rank {} of {}: the sum is {vector:?}", session.rank(), session.size());
    session.shutdown()
}
