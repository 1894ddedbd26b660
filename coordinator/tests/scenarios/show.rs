//! The engine's answers, one command a line.

use std::fmt::Write as _;

use gradwire_coordinator::engine::{
    Command, Outcome, Output, Status,
    command::{Execute, Severity},
};
use gradwire_proto::{Collective, Failure, Request, convert::TensorRef};

fn tensor(tensor: &TensorRef) -> String {
    match tensor {
        TensorRef::Id(id) => format!("#{id}"),
        TensorRef::Name(name) => name.to_string(),
    }
}

fn request(request: &Request) -> String {
    let mut text = request.collective.to_string();
    let _ = match request.collective {
        Collective::Allreduce => write!(text, " {} {}", request.dtype, request.reduce_op),
        Collective::Broadcast => write!(text, " {} root={}", request.dtype, request.root),
        Collective::Barrier => Ok(()),
    };
    for (name, factor) in [("pre", request.prescale), ("post", request.postscale)] {
        if factor != 1.0 {
            let _ = write!(text, " {name}={factor}");
        }
    }
    text
}

/// All of a failure, its further lines indented.
fn failure(failure: &Failure) -> String {
    format!("{:?}: {}", failure.kind, failure.to_string().replace('\n', "\n    "))
}

fn execute(text: &mut String, execute: &Execute) {
    for r in &execute.registrations {
        let (shape, priority) = (&r.request.shape, r.priority);
        let _ = writeln!(
            text,
            "register #{} = {} {} {shape} prio={priority}",
            r.id,
            r.name,
            request(&r.request)
        );
    }
    for o in &execute.operations {
        let segments: Vec<String> = o
            .segments
            .iter()
            .map(|s| format!("{}[{}+{}]", tensor(&s.tensor), s.offset, s.count))
            .collect();
        let _ = writeln!(
            text,
            "run {}: {} {} on {}",
            o.sequence,
            o.algorithm,
            request(&o.request),
            segments.join(" ")
        );
    }
    for f in &execute.failures {
        let _ = writeln!(text, "fail {}: {}", tensor(&f.tensor), failure(&f.failure));
    }
}

/// What one step answered.
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
            Command::Finish(Outcome::Finished) => writeln!(text, "finish: finished"),
            Command::Finish(Outcome::Failed(f)) => writeln!(text, "finish: failed: {:?}", f.kind),
        };
    }
    // The text of a report is its reason, and a refusal's or an abort's is in it.
    let told = output
        .commands
        .iter()
        .any(|c| matches!(c, Command::Report { .. } | Command::Refuse { .. } | Command::Abort(_)));
    if !output.reason.is_empty() && !told {
        // What the cost model predicts is its own business.
        let parts = output.reason.split("; ").filter(|part| !part.contains(" predicted for "));
        let _ = writeln!(text, "because {}", parts.collect::<Vec<_>>().join("; "));
    }
    text
}

/// A status.
pub(crate) fn status(status: &Status) -> String {
    let mut text = format!("{}: {}\n", status.phase.name(), status.reason);
    for n in &status.nodes {
        let left: Vec<String> = n.left.iter().map(ToString::to_string).collect();
        let _ =
            writeln!(text, "node {} silent {:?} left [{}]", n.node.host, n.silent, left.join(","));
    }
    for p in &status.pending {
        let missing: Vec<String> = p.missing.iter().map(ToString::to_string).collect();
        let _ =
            writeln!(text, "pending {} {:?} missing [{}]", p.name, p.waiting, missing.join(","));
    }
    let c = &status.counts;
    let _ = writeln!(
        text,
        "{} pending, {} queued, {} in flight, {} started, {} done, {} stalled",
        c.pending, c.queued, c.in_flight, c.started, c.done, c.stalled
    );
    text
}
