//! Makes calls through the public API.

use std::fmt;

use gradwire_proto::{Collective, Request, Shape};
use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, AlltoallOptions, BarrierOptions, BroadcastOptions, Buffer,
    GatherOptions, Gathered, GradwireError, Handle, ProcessSet, ReceiveOptions, ReduceOptions,
    ReduceScatterOptions, ScatterOptions, SendOptions, Session,
};

use super::call::{Call, Form, Got, Piece};

type Result<T> = std::result::Result<T, GradwireError>;

/// A call that has been made.
pub struct Pending(Box<dyn FnOnce() -> Result<Got> + Send>);

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

impl Pending {
    /// Waits for the result and returns it.
    ///
    /// # Errors
    /// The error of the session.
    ///
    /// # Panics
    /// If an input has changed that must not change.
    pub fn finish(self) -> Result<Got> {
        self.0()
    }
}

fn piece(buffer: &Buffer) -> Option<Piece> {
    let dims: Vec<u64> = buffer.shape().iter().map(|dim| *dim as u64).collect();
    let (shape, bytes) = (Shape::new(&dims).expect("a shape of a buffer"), buffer.bytes().to_vec());
    Some(Piece { shape, bytes, rows: Vec::new() })
}

/// Numbers of rows, or dimensions, as the library takes them.
fn sizes(numbers: &[u64]) -> Vec<usize> {
    numbers.iter().map(|number| *number as usize).collect()
}

fn pieces(buffers: &[Buffer]) -> Got {
    buffers.iter().map(piece).collect()
}

fn gathered(gathered: &Gathered<Buffer>) -> Option<Piece> {
    Some(Piece {
        rows: gathered.rows.iter().map(|rows| *rows as u64).collect(),
        ..piece(&gathered.tensor)?
    })
}

/// Handles the result of a handle.
fn then<T: Send + 'static>(
    handle: Handle<T>,
    got: impl FnOnce(T) -> Got + Send + 'static,
) -> Pending {
    Pending(Box::new(move || Ok(got(handle.wait()?))))
}

fn done(got: Got) -> Pending {
    Pending(Box::new(move || Ok(got)))
}

/// Sets the options that most collectives share.
macro_rules! options {
    ($ask:expr, $options:expr) => {{
        let options = $options.priority($ask.call.priority).process_set($ask.set);
        match &$ask.call.name {
            Some(name) => options.name(name.clone()),
            None => options,
        }
    }};
}

/// Sets the options that most collectives share, and those of reductions.
macro_rules! reduction {
    ($ask:expr, $options:expr) => {{
        let request = $ask.request;
        options!($ask, $options)
            .op(request.reduce_op)
            .prescale(request.prescale)
            .postscale(request.postscale)
    }};
}

struct Ask<'a> {
    call: &'a Call,
    set: &'a ProcessSet,
    session: &'a Session,
    request: &'a Request,
    handle: bool,
}

pub(super) fn start(call: &Call, session: &Session, set: &ProcessSet) -> Result<Pending> {
    let request = call.request(session.rank());
    let ask = Ask { call, set, session, request, handle: call.form == Form::Handle };
    match request.collective {
        Collective::Allreduce => ask.allreduce(),
        Collective::Reduce => ask.reduce(),
        Collective::Broadcast => ask.broadcast(),
        Collective::Allgather => ask.allgather(),
        Collective::Gather => ask.gather(),
        Collective::Scatter => ask.scatter(),
        Collective::ReduceScatter => ask.reducescatter(),
        Collective::Alltoall => ask.alltoall(),
        Collective::SendReceive if ask.is_root() => ask.send(),
        Collective::SendReceive => ask.receive(),
        Collective::Barrier => ask.barrier(),
        other => panic!("{other} is not supported here"),
    }
}

impl Ask<'_> {
    fn is_root(&self) -> bool {
        self.request.root.0 == self.session.rank()
    }

    fn buffer(&self, part: usize) -> Result<Buffer> {
        let request = self.request;
        let shape = sizes(request.shape_of(part).dims());
        let mut buffer = self.session.buffer(request.dtype_of(part), &shape)?;
        buffer.bytes_mut().copy_from_slice(&self.call.input(self.session.rank(), part));
        Ok(buffer)
    }

    fn buffers(&self) -> Result<Vec<Buffer>> {
        (0..self.request.parts()).map(|part| self.buffer(part)).collect()
    }

    fn is_group(&self) -> bool {
        self.request.parts() > 1
    }

    /// Checks that inputs are unchanged.
    fn kept(&self) -> impl Fn(&[Buffer]) + Send + 'static {
        let (call, rank) = (self.call.clone(), self.session.rank());
        move |buffers| {
            for (part, buffer) in buffers.iter().enumerate() {
                let same = buffer.bytes() == call.input(rank, part);
                assert!(same, "input {part} of {} has changed", call.title());
            }
        }
    }

    fn allreduce(&self) -> Result<Pending> {
        let options = reduction!(self, AllreduceOptions::default());
        let (session, kept) = (self.session, self.kept());
        if self.is_group() {
            let mut group = self.buffers()?;
            return Ok(match (self.handle, self.call.apart) {
                (true, false) => {
                    then(session.grouped_allreduce_async(group, options)?, |group| pieces(&group))
                }
                (true, true) => {
                    let handle = session.grouped_allreduce_to_async(group, options)?;
                    then(handle, move |(group, results)| {
                        kept(&group);
                        pieces(&results)
                    })
                }
                (false, false) => {
                    session.grouped_allreduce(&mut group, options)?;
                    done(pieces(&group))
                }
                (false, true) => {
                    let results = session.grouped_allreduce_to(&group, options)?;
                    kept(&group);
                    done(pieces(&results))
                }
            });
        }
        let mut buffer = self.buffer(0)?;
        Ok(match (self.handle, self.call.apart) {
            (true, false) => {
                then(session.allreduce_async(buffer, options)?, |buffer| vec![piece(&buffer)])
            }
            (true, true) => {
                let handle = session.allreduce_to_async(buffer, options)?;
                then(handle, move |(buffer, result)| {
                    kept(&[buffer]);
                    vec![piece(&result)]
                })
            }
            (false, false) => {
                session.allreduce(&mut buffer, options)?;
                done(vec![piece(&buffer)])
            }
            (false, true) => {
                let result = session.allreduce_to(&buffer, options)?;
                kept(&[buffer]);
                done(vec![piece(&result)])
            }
        })
    }

    fn reduce(&self) -> Result<Pending> {
        let options = reduction!(self, ReduceOptions::to_rank(self.request.root.0));
        let mut buffer = self.buffer(0)?;
        if self.handle {
            let handle = self.session.reduce_async(buffer, options)?;
            return Ok(then(handle, |buffer| vec![piece(&buffer)]));
        }
        self.session.reduce(&mut buffer, options)?;
        Ok(done(vec![piece(&buffer)]))
    }

    fn broadcast(&self) -> Result<Pending> {
        let options = options!(self, BroadcastOptions::from_rank(self.request.root.0));
        let mut buffer = self.buffer(0)?;
        if self.handle {
            let handle = self.session.broadcast_async(buffer, options)?;
            return Ok(then(handle, |buffer| vec![piece(&buffer)]));
        }
        self.session.broadcast(&mut buffer, options)?;
        Ok(done(vec![piece(&buffer)]))
    }

    fn allgather(&self) -> Result<Pending> {
        let options = options!(self, AllgatherOptions::default());
        let (session, kept) = (self.session, self.kept());
        let group = self.buffers()?;
        Ok(match (self.is_group(), self.handle) {
            (true, true) => {
                let handle = session.grouped_allgather_async(group, options)?;
                then(handle, move |(group, results)| {
                    kept(&group);
                    results.iter().map(gathered).collect()
                })
            }
            (true, false) => {
                let results = session.grouped_allgather(&group, options)?;
                kept(&group);
                done(results.iter().map(gathered).collect())
            }
            (false, true) => {
                let handle = session.allgather_async(self.buffer(0)?, options)?;
                then(handle, move |(buffer, result)| {
                    kept(&[buffer]);
                    vec![gathered(&result)]
                })
            }
            (false, false) => {
                let result = session.allgather(&group[0], options)?;
                kept(&group);
                done(vec![gathered(&result)])
            }
        })
    }

    fn gather(&self) -> Result<Pending> {
        let options = options!(self, GatherOptions::to_rank(self.request.root.0));
        let (buffer, kept) = (self.buffer(0)?, self.kept());
        if self.handle {
            let handle = self.session.gather_async(buffer, options)?;
            return Ok(then(handle, move |(buffer, result)| {
                kept(&[buffer]);
                vec![result.as_ref().and_then(gathered)]
            }));
        }
        let result = self.session.gather(&buffer, options)?;
        kept(&[buffer]);
        Ok(done(vec![result.as_ref().and_then(gathered)]))
    }

    fn scatter(&self) -> Result<Pending> {
        let root = self.request.root.0;
        let mut options = options!(self, ScatterOptions::from_rank(root).dtype(self.request.dtype));
        if self.is_root() && !self.request.list.is_empty() {
            options = options.splits(&sizes(&self.request.list));
        }
        let buffer = if self.is_root() { Some(self.buffer(0)?) } else { None };
        let kept = self.kept();
        if self.handle {
            let handle = self.session.scatter_async(buffer, options)?;
            return Ok(then(handle, move |(buffer, result)| {
                kept(buffer.as_slice());
                vec![piece(&result)]
            }));
        }
        let result = self.session.scatter(buffer.as_ref(), options)?;
        kept(buffer.as_slice());
        Ok(done(vec![piece(&result)]))
    }

    fn reducescatter(&self) -> Result<Pending> {
        let options = reduction!(self, ReduceScatterOptions::default());
        let (session, kept) = (self.session, self.kept());
        let group = self.buffers()?;
        Ok(match (self.is_group(), self.handle) {
            (true, true) => {
                let handle = session.grouped_reducescatter_async(group, options)?;
                then(handle, move |(group, results)| {
                    kept(&group);
                    pieces(&results)
                })
            }
            (true, false) => {
                let results = session.grouped_reducescatter(&group, options)?;
                kept(&group);
                done(pieces(&results))
            }
            (false, true) => {
                let handle = session.reducescatter_async(self.buffer(0)?, options)?;
                then(handle, move |(buffer, result)| {
                    kept(&[buffer]);
                    vec![piece(&result)]
                })
            }
            (false, false) => {
                let result = session.reducescatter(&group[0], options)?;
                kept(&group);
                done(vec![piece(&result)])
            }
        })
    }

    fn alltoall(&self) -> Result<Pending> {
        let mut options = options!(self, AlltoallOptions::default().leave_rest());
        if !self.request.list.is_empty() {
            options = options.splits(&sizes(&self.request.list));
        }
        let (buffer, kept) = (self.buffer(0)?, self.kept());
        if self.handle {
            let handle = self.session.alltoall_async(buffer, options)?;
            return Ok(then(handle, move |(buffer, result)| {
                kept(&[buffer]);
                vec![gathered(&result)]
            }));
        }
        let result = self.session.alltoall(&buffer, options)?;
        kept(&[buffer]);
        Ok(done(vec![gathered(&result)]))
    }

    fn send(&self) -> Result<Pending> {
        let to = self.request.list[0] as u32;
        let options = SendOptions::to_rank(to).tag(self.call.tag).process_set(self.set);
        let options = options.priority(self.call.priority);
        let buffer = self.buffer(0)?;
        if self.handle {
            let handle = self.session.send_async(buffer, options)?;
            return Ok(then(handle, |buffer| vec![piece(&buffer)]));
        }
        self.session.send(&buffer, options)?;
        Ok(done(vec![piece(&buffer)]))
    }

    /// Receives in one of three ways: without a shape, with an expected shape (which may be wrong),
    /// or into an existing tensor.
    fn receive(&self) -> Result<Pending> {
        let (session, dtype) = (self.session, self.request.dtype);
        let sent = &self.call.request(self.request.root.0).shape;
        let options = ReceiveOptions::from_rank(self.request.root.0).tag(self.call.tag);
        let options = options.process_set(self.set).priority(self.call.priority);
        let rows = sent.rows() + self.call.seed % 2;
        let dims: Vec<usize> =
            [rows].iter().chain(sent.dims().iter().skip(1)).map(|&dim| dim as usize).collect();
        match self.call.seed % 6 {
            0 => {
                let buffer = session.buffer(dtype, &sizes(sent.dims()))?;
                return self.receive_into(buffer, options);
            }
            1..=3 => return self.receive_new(options.dtype(dtype).expecting(&dims)),
            _ => {}
        }
        self.receive_new(options.dtype(dtype))
    }

    fn receive_new(&self, options: ReceiveOptions) -> Result<Pending> {
        if self.handle {
            let handle = self.session.receive_async::<Buffer>(options)?;
            return Ok(then(handle, |buffer| vec![piece(&buffer)]));
        }
        Ok(done(vec![piece(&self.session.receive::<Buffer>(options)?)]))
    }

    fn receive_into(&self, mut buffer: Buffer, options: ReceiveOptions) -> Result<Pending> {
        if self.handle {
            let handle = self.session.receive_into_async(buffer, options)?;
            return Ok(then(handle, |buffer| vec![piece(&buffer)]));
        }
        self.session.receive_into(&mut buffer, options)?;
        Ok(done(vec![piece(&buffer)]))
    }

    fn barrier(&self) -> Result<Pending> {
        let options = options!(self, BarrierOptions::default());
        if self.handle {
            return Ok(then(self.session.barrier_with_async(options)?, |()| vec![None]));
        }
        self.session.barrier_with(options)?;
        Ok(done(vec![None]))
    }
}
