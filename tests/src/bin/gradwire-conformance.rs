//! Checks every collective on every element type, through the public API, against the reference.
//! Calls block or return handles, work in place or return separate results, and are grouped. They
//! are made in the world and in a process set of every second rank. Tensors have no dimensions, no
//! elements, a few elements or many.
//!
//! ```text
//! gradwire run -np 4 -- target/debug/gradwire-conformance
//! ```
//!
//! Each rank checks what it receives. The first wrong result ends the program with code 1.

#![forbid(unsafe_code)]

use std::{collections::BTreeMap, process::ExitCode};

use anyhow::{Result, anyhow, bail, ensure};
use gradwire_proto::{Collective, DType, Part, Rank, ReduceOp, Request, Shape};
use gradwire_reference::{Between, Values};
use gradwire_tests::calls::{
    COLLECTIVES, Call, Form, Pending, has_groups, is_rooted, reduces, request, with_op,
};
use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, Bool, BroadcastOptions, Complex, Element, F8E4m3, F8E5m2,
    GradwireError, ProcessSet, Session,
    half::{bf16, f16},
};

/// The number of calls with handles in flight at once.
const AT_ONCE: usize = 64;

fn main() -> ExitCode {
    match conforms() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn conforms() -> Result<()> {
    let session = Session::from_env()?;
    let counts = run(&session)?;
    session.shutdown()?;
    if session.rank() == 0 {
        for (collective, count) in counts {
            println!("{count:5} {collective}");
        }
    }
    println!("conforms");
    Ok(())
}

/// The calls of one rank.
struct Run<'a> {
    session: &'a Session,
    pending: Vec<(Call, Pending)>,
    counts: BTreeMap<&'static str, u64>,
    calls: u64,
}

fn run(session: &Session) -> Result<BTreeMap<&'static str, u64>> {
    let all = session.global_process_set();
    let second: Vec<u32> = (0..session.size()).step_by(2).collect();
    let second = session.add_process_set(&second)?;
    let mut run = Run { session, pending: Vec::new(), counts: BTreeMap::new(), calls: 0 };
    for set in [&all, &second] {
        for &dtype in DType::ALL {
            for collective in COLLECTIVES {
                run.shapes(set, collective, dtype)?;
            }
            run.ops(set, dtype)?;
        }
        run.groups(set)?;
    }
    run.wait()?;
    run.refusals()?;
    run.typed()?;
    session.remove_process_set(second)?;
    Ok(run.counts)
}

impl Run<'_> {
    /// A call in which ranks have different numbers of rows, if the collective allows it.
    fn request(of: Collective, dtype: DType, dims: &[u64], root: u32, members: &[u32]) -> Call {
        let same = request(of, dtype, dims, root);
        let mut call = Call::same("", members, &same);
        let n = members.len() as u64;
        for (at, asked) in (0..).zip(&mut call.requests) {
            let Some(rows) = dims.first() else { continue };
            let with = |rows: u64| same.shape.with_rows(rows).expect("a shape");
            match of {
                // Each rank has one row more than the previous one, modulo `n + 1`, so one may have
                // none.
                Collective::Allgather | Collective::Gather if *rows > 0 => {
                    asked.shape = with((rows + at) % (n + 1));
                }
                // Large tensors are split evenly, without a list.
                Collective::Alltoall | Collective::Scatter if *rows > 100 => {
                    let has = of == Collective::Alltoall || members[at as usize] == root;
                    asked.shape = with(if has { rows / n * n } else { 0 });
                }
                // Each rank sends different numbers of rows, and may keep one row.
                Collective::Alltoall if *rows > 0 => {
                    asked.list = (0..n).map(|to| (at + to) % 3).collect();
                    asked.shape = with(asked.list.iter().sum::<u64>() + at % 2);
                }
                Collective::Scatter if members[at as usize] == root => {
                    asked.list = (0..n).map(|to| to * rows / (n * n)).collect();
                }
                Collective::Scatter => asked.shape = with(0),
                _ => {}
            }
        }
        call
    }

    /// Calls of one collective with tensors of all shapes, blocking and with handles.
    fn shapes(&mut self, set: &ProcessSet, of: Collective, dtype: DType) -> Result<()> {
        let splits = [Collective::Scatter, Collective::ReduceScatter, Collective::Alltoall];
        let shapes: [&[u64]; 5] = [&[], &[0, 3], &[5], &[7, 1, 3], &[3001, 2]];
        for (number, dims) in shapes.into_iter().enumerate() {
            if dims.is_empty() && splits.contains(&of) {
                continue; // there is nothing to split: see `refusals`
            }
            for form in [Form::Blocking, Form::Handle] {
                self.calls += 1;
                let mut members = set.ranks();
                let root = members[self.calls as usize % members.len()];
                if of == Collective::SendReceive {
                    if members.len() < 2 {
                        continue;
                    }
                    let at = (self.calls as usize + 1) % members.len();
                    members = [root, members[at]].to_vec();
                }
                let to = *members.last().unwrap_or(&root);
                members.sort_unstable();
                let mut call = Self::request(of, dtype, dims, root, &members);
                if of == Collective::SendReceive {
                    for request in &mut call.requests {
                        (request.root, request.list) = (Rank(root), vec![to.into()]);
                    }
                }
                let values = if number % 2 == 0 { Values::Exact } else { Values::Usual };
                let named = of != Collective::SendReceive && !self.calls.is_multiple_of(3);
                let name = format!("{of}.{dtype}.{number}.{form:?}");
                let apart = self.calls % 4 < 2;
                let (name, seed) = (named.then_some(name), self.calls);
                self.call(set, Call { name, form, apart, values, seed, ..call })?;
            }
        }
        Ok(())
    }

    /// Every reduction, with factors where allowed.
    fn ops(&mut self, set: &ProcessSet, dtype: DType) -> Result<()> {
        for of in COLLECTIVES.into_iter().filter(|of| reduces(*of)) {
            for &op in ReduceOp::ALL.iter().filter(|op| op.refuses(dtype).is_none()) {
                for (values, prescale) in [(Values::Exact, 1.0), (Values::Usual, 0.5)] {
                    // Products of floats have no factors, because many factors exceed the range of
                    // a small float.
                    let small = op == ReduceOp::Product && dtype.is_float();
                    let factor = if small { 1.0 } else { prescale };
                    let scales = op.refuses_factors(dtype).is_none();
                    let prescale = if scales { factor } else { 1.0 };
                    self.calls += 1;
                    let root = set.ranks()[self.calls as usize % set.len()];
                    let asked = with_op(request(of, dtype, &[11, 3], root), op);
                    let asked = Request { prescale, postscale: prescale, ..asked };
                    let name = format!("{of}.{dtype}.{op}.{values:?}");
                    let call = Call::same(name, &set.ranks(), &asked);
                    self.call(set, Call { form: Form::Handle, values, seed: self.calls, ..call })?;
                }
            }
        }
        Ok(())
    }

    /// Groups of all element types that can be summed together.
    fn groups(&mut self, set: &ProcessSet) -> Result<()> {
        for of in COLLECTIVES.into_iter().filter(|of| has_groups(*of)) {
            for (form, apart) in
                [Form::Blocking, Form::Handle].map(|f| [(f, true), (f, false)]).concat()
            {
                self.calls += 1;
                let part = |(rows, dtype): (u64, &DType)| {
                    let shape = Shape::new(&[rows % 5, 3]).expect("a shape");
                    Part { dtype: *dtype, shape }
                };
                let more = (0..).zip(DType::ALL).map(part).collect();
                let asked = Request { more, ..request(of, DType::F32, &[4, 2], 0) };
                let name = format!("group.{of}.{form:?}.{apart}");
                let call = Call::same(name, &set.ranks(), &asked);
                self.call(set, Call { form, apart, seed: self.calls, ..call })?;
            }
        }
        Ok(())
    }

    fn call(&mut self, set: &ProcessSet, call: Call) -> Result<()> {
        let rank = self.session.rank();
        if !call.ranks.contains(&rank) {
            return Ok(());
        }
        *self.counts.entry(call.common().collective.name()).or_default() += 1;
        let pending = call.start(self.session, set);
        let pending = pending.map_err(|error| anyhow!("{}: {error}", call.title()))?;
        self.pending.push((call, pending));
        // A blocking call has ended. Calls with handles are waited for together.
        let blocking = self.pending.last().is_some_and(|(call, _)| call.form == Form::Blocking);
        if blocking || self.pending.len() >= AT_ONCE { self.wait() } else { Ok(()) }
    }

    fn wait(&mut self) -> Result<()> {
        let compression = self.session.compression();
        let between = Between { nodes: self.session.nodes().len(), compression };
        for (call, pending) in self.pending.drain(..) {
            let got = pending.finish().map_err(|error| anyhow!("{}: {error}", call.title()))?;
            call.check(self.session.rank(), &got, between).map_err(anyhow::Error::msg)?;
        }
        Ok(())
    }

    /// Invalid calls are refused immediately, on every rank, and start nothing.
    fn refusals(&self) -> Result<()> {
        let set = self.session.global_process_set();
        let refused = |asked: Request, expected: &str| {
            let call = Call::same("refused", &set.ranks(), &asked);
            match call.start(self.session, &set) {
                Err(GradwireError::Failed(failure)) => bail!("too late: {failure}"),
                Err(error) if error.to_string().contains(expected) => Ok(()),
                Err(error) => bail!("{}: {expected:?} is not in: {error}", call.title()),
                Ok(_) => bail!("{} is not refused", call.title()),
            }
        };
        for &dtype in DType::ALL {
            for of in COLLECTIVES.into_iter().filter(|of| reduces(*of)) {
                for &op in ReduceOp::ALL {
                    if let Some(why) = op.refuses(dtype) {
                        refused(with_op(request(of, dtype, &[2], 0), op), why)?;
                    }
                }
                for &op in ReduceOp::ALL.iter().filter(|op| op.refuses(dtype).is_none()) {
                    if let Some(what) = op.refuses_factors(dtype) {
                        let asked = with_op(request(of, dtype, &[2], 0), op);
                        refused(Request { prescale: 0.5, ..asked }, what)?;
                    }
                }
            }
        }
        for of in [Collective::Scatter, Collective::ReduceScatter, Collective::Alltoall] {
            let root = self.session.rank();
            refused(request(of, DType::F32, &[], root), "0-d")?;
        }
        for of in COLLECTIVES.into_iter().filter(|of| is_rooted(*of)) {
            refused(request(of, DType::F32, &[4], self.session.size()), "does not exist")?;
        }
        Ok(())
    }

    /// Calls with statically typed elements.
    fn typed(&self) -> Result<()> {
        self.elements(f16::from_f32, |value| value.to_f64())?;
        self.elements(bf16::from_f32, |value| value.to_f64())?;
        self.elements(F8E4m3::from_f32, |value| value.to_f32().into())?;
        self.elements(F8E5m2::from_f32, |value| value.to_f32().into())?;
        self.elements(|value| value, f64::from)?;
        self.elements(f64::from, |value: f64| value)?;
        self.elements(|value| value as i8, f64::from)?;
        self.elements(|value| value as u8, f64::from)?;
        self.elements(|value| value as i16, f64::from)?;
        self.elements(|value| value as u16, f64::from)?;
        self.elements(|value| value as i32, f64::from)?;
        self.elements(|value| value as u32, f64::from)?;
        self.elements(|value| value as i64, |value| value as f64)?;
        self.elements(|value| value as u64, |value| value as f64)?;
        self.elements(|value| Complex::new(value, -value), |value| (value.re - value.im).into())?;
        let double = |value: f32| Complex::new(f64::from(value), 0.0);
        self.elements(double, |value| value.re)?;
        let mut truth = self.session.tensor(&[Bool::from(self.session.rank() == 0)], &[1])?;
        self.session.allreduce(&mut truth, AllreduceOptions::default().op(ReduceOp::Max))?;
        ensure!(truth.as_slice()[0].get(), "the result must be true");
        Ok(())
    }

    /// Sums, moves and gathers values of one type; `back` turns a sum into a number.
    fn elements<T: Element>(&self, to: impl Fn(f32) -> T, back: impl Fn(T) -> f64) -> Result<()> {
        let (session, what) = (self.session, std::any::type_name::<T>());
        let weight = back(to(1.0));
        let mut sum = session.tensor(&[to(1.0)], &[])?;
        session.allreduce(&mut sum, AllreduceOptions::default().op(ReduceOp::Sum))?;
        let ranks = f64::from(session.size());
        ensure!(back(sum.as_slice()[0]) == ranks * weight, "{what}: {:?}", sum.as_slice());
        let root = session.size() - 1;
        let mut moved = [to(if session.rank() == root { 3.0 } else { 1.0 })];
        session.broadcast_slice(&mut moved, BroadcastOptions::from_rank(root))?;
        ensure!(back(moved[0]) == 3.0 * weight, "{what}: {moved:?}");
        let own = session.tensor(&[to(2.0)], &[1])?;
        let all = session.allgather(&own, AllgatherOptions::default())?;
        ensure!(all.rows == vec![1; session.size() as usize], "{what}: {:?}", all.rows);
        let twos = all.tensor.as_slice().iter().all(|value| back(*value) == 2.0 * weight);
        ensure!(twos, "{what}: {:?}", all.tensor);
        Ok(())
    }
}
