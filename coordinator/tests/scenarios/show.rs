//! The engine's answers, one command per line.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use gradwire_coordinator::{
    engine::Engine,
    model::{
        Command, Output,
        command::{Execute, Operation, Segment, Severity},
    },
};
use gradwire_proto::{
    Agreed, Collective, Ending, Failure, NO_PART, NodeId, ProcessSetId, Request, TensorName,
    convert::TensorRef,
};

/// A tensor with its process set, unless that is the global one.
fn tensor(set: ProcessSetId, tensor: &TensorRef) -> String {
    let set = if set == ProcessSetId::GLOBAL { String::new() } else { format!("{set}/") };
    match tensor {
        TensorRef::Id(id) => format!("{set}#{id}"),
        TensorRef::Name(name) => format!("{set}{name}"),
    }
}

fn numbers<T: ToString>(all: impl IntoIterator<Item = T>) -> String {
    all.into_iter().map(|one| one.to_string()).collect::<Vec<_>>().join(",")
}

fn request(request: &Request) -> String {
    let mut text = request.collective.to_string();
    let _ = match request.collective {
        Collective::Allreduce | Collective::Reduce | Collective::ReduceScatter => {
            write!(text, " {} {}", request.dtype, request.reduce_op)
        }
        Collective::Barrier => Ok(()),
        _ => write!(text, " {}", request.dtype),
    };
    for (name, factor) in [("pre", request.prescale), ("post", request.postscale)] {
        if factor != 1.0 {
            let _ = write!(text, " {name}={factor}");
        }
    }
    text
}

/// An agreed request, with the fields that a piece does not have.
fn agreed(agreed: &Agreed) -> String {
    let r = agreed.request();
    let mut text = format!("{} {}", request(r), r.shape);
    for part in &r.more {
        let _ = write!(text, " + {} {}", part.dtype, part.shape);
    }
    let rooted = matches!(
        r.collective,
        Collective::Broadcast
            | Collective::Reduce
            | Collective::Gather
            | Collective::Scatter
            | Collective::SendReceive
    );
    if rooted {
        let _ = write!(text, " root={}", r.root);
    }
    for (name, list) in [("list", &r.list[..]), ("rows", agreed.rows())] {
        if !list.is_empty() {
            let _ = write!(text, " {name}={}", numbers(list));
        }
    }
    text
}

/// `request.tensor[first+count]`. The number of the first tensor is left out. `!` marks a notice
/// that a request without data is done.
fn segment(set: ProcessSetId, segment: &Segment) -> String {
    let tensor = tensor(set, &segment.tensor);
    match segment.part {
        NO_PART => format!("{tensor}!"),
        0 => format!("{tensor}[{}+{}]", segment.offset, segment.count),
        part => format!("{tensor}.{part}[{}+{}]", segment.offset, segment.count),
    }
}

fn operation(text: &mut String, o: &Operation) {
    let segments: Vec<String> = o.segments.iter().map(|s| segment(o.set, s)).collect();
    let without = match o.absent.is_empty() {
        true => String::new(),
        false => format!(" without {}", numbers(o.absent.iter())),
    };
    let what = request(&o.request);
    let on = segments.join(" ");
    let chunk = o.chunk.map_or_else(String::new, |bytes| format!(" in chunks of {bytes}"));
    let _ = writeln!(text, "run {}: {} {what}{without} on {on}{chunk}", o.sequence, o.spec.spec);
    let mut named: Vec<_> = o.segments.iter().filter(|s| s.agreed.is_some()).collect();
    named.dedup_by_key(|s| &s.tensor);
    for s in named {
        let what = s.agreed.as_deref().map_or_else(String::new, agreed);
        let _ = writeln!(text, "    {} = {what}", tensor(o.set, &s.tensor));
    }
}

/// A whole failure, with its further lines indented.
fn failure(failure: &Failure) -> String {
    format!("{:?}: {}", failure.kind, failure.to_string().replace('\n', "\n    "))
}

fn execute(text: &mut String, execute: &Execute) {
    for c in &execute.sets_created {
        let by = tensor(ProcessSetId::GLOBAL, &c.tensor);
        let _ = writeln!(text, "create {} of {} by {by}", c.set, numbers(&c.ranks));
    }
    for r in &execute.registrations {
        let name = tensor(r.set, &TensorRef::Name(r.name.clone()));
        let (what, priority) = (agreed(&r.agreed), r.priority);
        let _ = writeln!(text, "register #{} = {name} {what} prio={priority}", r.id);
    }
    if let Some(arranged) = &execute.arrangement {
        let _ = writeln!(text, "arrange racks {:?} order {:?}", arranged.racks, arranged.order);
    }
    for p in &execute.probes {
        let group = |group: &Vec<NodeId>| {
            let nodes: Vec<String> = group.iter().map(|node| node.0.to_string()).collect();
            nodes.join("+")
        };
        let groups: Vec<String> = p.groups.iter().map(group).collect();
        let _ = writeln!(text, "  probe {} {} of {}", p.sequence, p.pattern, groups.join(" "));
    }
    for o in &execute.operations {
        operation(text, o);
    }
    for f in &execute.failures {
        let _ = writeln!(text, "fail {}: {}", tensor(f.set, &f.tensor), failure(&f.failure));
    }
    for j in &execute.joined {
        let _ = writeln!(text, "joined {}, last {}", j.set, j.last);
    }
    for gone in &execute.sets_removed {
        let by = tensor(ProcessSetId::GLOBAL, &gone.tensor);
        let _ = writeln!(text, "remove {} by {by}", gone.set);
    }
    for id in &execute.evicted {
        let _ = writeln!(text, "evict #{id}");
    }
}

/// The answer of one step.
pub(crate) fn output(output: &Output) -> String {
    let mut text = String::new();
    for command in &output.commands {
        let _ = match command {
            Command::Welcome { connection, node, world } => {
                let nodes: Vec<String> = world
                    .nodes
                    .iter()
                    .map(|n| format!("{}@{} {}+{}", n.host, n.data_address, n.first_rank, n.slots))
                    .collect();
                writeln!(text, "welcome {} as node {node}: {}", connection.0, nodes.join(", "))
            }
            Command::Resume { connection, earlier, received } => {
                let earlier = earlier.map_or_else(|| "none".to_owned(), |at| at.0.to_string());
                writeln!(text, "resume {} instead of {earlier} from {received}", connection.0)
            }
            Command::Moved { node, data_address } => {
                writeln!(text, "node {node} is at {data_address}")
            }
            Command::Refuse { connection, kind, text: why } => {
                writeln!(text, "refuse {}: {kind:?}: {why}", connection.0)
            }
            Command::Execute(e) => {
                execute(&mut text, e);
                Ok(())
            }
            Command::Abort(f) => writeln!(text, "abort: {}", failure(f)),
            Command::Shutdown => writeln!(text, "shutdown"),
            Command::Report { severity: Severity::Info, text: line } => {
                writeln!(text, "info: {line}")
            }
            Command::Report { severity: Severity::Warning, text: line } => {
                writeln!(text, "warning: {line}")
            }
            Command::Stalled { texts } => {
                texts.iter().try_for_each(|line| writeln!(text, "stalled: {line}"))
            }
            Command::Finish(Ending::Finished) => writeln!(text, "finish: finished"),
            Command::Finish(Ending::Failed(f)) => writeln!(text, "finish: failed: {:?}", f.kind),
        };
    }
    // The reason repeats the text of a report, a refusal or an abort.
    let reported = output.commands.iter().any(|c| {
        matches!(
            c,
            Command::Report { .. }
                | Command::Stalled { .. }
                | Command::Refuse { .. }
                | Command::Abort(_)
        )
    });
    if !output.reason.is_empty() && !reported {
        // Predictions of the cost model may change.
        let parts = output.reason.split("; ").filter(|part| !part.contains(" predicted for "));
        let _ = writeln!(text, "because {}", parts.collect::<Vec<_>>().join("; "));
    }
    text
}

/// A status.
pub(crate) fn status(engine: &Engine, now: Duration) -> String {
    let status = engine.status(&BTreeMap::new(), now);
    let mut text = format!("{}: {}\n", status.phase, status.reason);
    for n in &status.nodes {
        let (silent, left) = (Duration::from_millis(n.silent_ms), numbers(&n.left_ranks));
        let _ = writeln!(text, "node {} silent {silent:?} left [{left}]", n.host);
    }
    for s in &status.process_sets {
        // The global set is shown only if ranks have joined.
        if ProcessSetId(s.process_set) != ProcessSetId::GLOBAL || !s.joined_ranks.is_empty() {
            let (ranks, joined) = (numbers(&s.ranks), numbers(&s.joined_ranks));
            let _ = writeln!(text, "set {} [{ranks}] joined [{joined}]", s.process_set);
        }
    }
    for p in &status.pending {
        let name = TensorRef::Name(TensorName::new(&p.name).expect("a name"));
        let name = tensor(ProcessSetId(p.process_set), &name);
        let (waiting, missing) = (Duration::from_millis(p.waiting_ms), numbers(&p.missing_ranks));
        let _ = writeln!(text, "pending {name} {waiting:?} missing [{missing}]");
    }
    let c = engine.counts();
    let _ = writeln!(
        text,
        "{} pending, {} queued, {} in flight, {} started, {} done, {} stalled",
        c.pending, c.queued, c.in_flight, c.started, c.done, c.stalled
    );
    text
}
