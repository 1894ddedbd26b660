//! The files of PyTorch's flight recorder, one for each rank, as its analyser reads them
//! (`torch.distributed.flight_recorder.fr_trace`, release 2.15).
//!
//! The analyser compares the operations of a group by their sequence numbers. Gradwire's ranks may
//! submit in different orders, so the numbers here are those of the merged job: the same operation
//! has the same number on all ranks. Each pair of ranks that exchanges messages is a group of its
//! own, because only these two take part.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::{Collective, DType};
use gradwire_trace::flight::{KEPT, Operation, Outcome};
use serde_json::{Map, Value, json};

use super::{
    merge::{Job, is_in_flight},
    pickle,
    waits::{Key, key, members},
};

/// The version of the format.
const VERSION: &str = "2.10";

/// The name that the analyser expects for a library that it does not know.
const LIBRARY: &str = "c10d";

/// The beginning of the name of a file; the rank follows.
pub const PREFIX: &str = "gradwire_rank_";

/// A group of ranks: a process set, or two ranks that exchange messages.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Set(u32),
    Pair(u32, u32),
}

impl Group {
    fn of(operation: &Operation) -> Self {
        match Collective::from_wire(operation.collective.into()) {
            Some(Collective::SendReceive) => {
                let (from, to) = (operation.root, operation.receiver as u32);
                Self::Pair(from.min(to), from.max(to))
            }
            _ => Self::Set(operation.process_set),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Set(set) => set.to_string(),
            Self::Pair(one, other) => format!("messages.{one}.{other}"),
        }
    }

    fn description(&self) -> String {
        match self {
            Self::Set(0) => "default_pg".to_owned(),
            Self::Set(set) => format!("process set {set}"),
            Self::Pair(one, other) => format!("messages between ranks {one} and {other}"),
        }
    }
}

/// An operation of all ranks.
#[derive(Debug, Default)]
struct Joint<'a> {
    first_ns: u64,
    parts: BTreeMap<u32, &'a Operation>,
}

/// What the ranks of an operation have in common. Small operations inside a node have no place in
/// the order of the job; all of their ranks get the order at the same time.
type JointKey = (Group, Key, u64);

fn joint_key(operation: &Operation) -> JointKey {
    let at_ns = if operation.sequence.is_none() { operation.ordered_ns } else { 0 };
    (Group::of(operation), key(operation), at_ns)
}

/// The files: the name and the contents of each.
pub fn files(job: &Job) -> Vec<(String, Vec<u8>)> {
    let joints = joints(job);
    let mut entries: BTreeMap<u32, Vec<Value>> =
        job.ranks.keys().map(|rank| (*rank, Vec::new())).collect();
    let mut used: BTreeMap<u32, BTreeMap<String, Value>> = BTreeMap::new();
    let mut numbers: BTreeMap<Group, u64> = BTreeMap::new();
    for ((group, ..), joint) in &joints {
        let number = numbers.entry(group.clone()).or_insert(0);
        *number += 1;
        let ranks = joint.parts.values().next().map_or_else(BTreeSet::new, |it| members(job, it));
        let listed = format!("{:?}", ranks.iter().collect::<Vec<_>>());
        let about = json!({ "name": group.name(), "desc": group.description(), "ranks": listed });
        for (rank, operation) in &joint.parts {
            let all = entries.entry(*rank).or_default();
            all.push(entry(group, *number, all.len(), *rank, operation, joint, &ranks));
            used.entry(*rank).or_default().insert(group.name(), about.clone());
        }
    }
    // The analyser needs to know of groups that a missing rank is in.
    let groups: BTreeMap<String, Value> = used.into_values().flatten().collect();
    let of = |rank: u32| {
        let contains = |about: &Value| {
            let ranks = about["ranks"].as_str().and_then(|text| serde_json::from_str(text).ok());
            ranks.is_some_and(|ranks: Vec<u32>| ranks.contains(&rank))
        };
        let own = groups.iter().filter(|(_, about)| contains(about));
        own.map(|(name, about)| (name.clone(), about.clone())).collect::<Map<_, _>>()
    };
    let file = |(rank, entries): (u32, Vec<Value>)| {
        let dump = json!({ "version": VERSION, "pg_config": of(rank), "entries": entries });
        (format!("{PREFIX}{rank}"), pickle::to_bytes(&dump))
    };
    entries.into_iter().map(file).collect()
}

/// The operations of the job in their order, without those that some ranks may have forgotten.
fn joints(job: &Job) -> Vec<(JointKey, Joint<'_>)> {
    let forgotten = job.ranks.values().filter(|rank| rank.count > KEPT as u64);
    let firsts = forgotten.filter_map(|rank| rank.operations.first());
    let since_ns = firsts.map(|operation| operation.submitted_ns).max().unwrap_or_default();
    let mut joints: BTreeMap<JointKey, Joint<'_>> = BTreeMap::new();
    for (rank, record) in &job.ranks {
        for operation in &record.operations {
            let joint = joints.entry(joint_key(operation)).or_default();
            joint.first_ns = match joint.first_ns {
                0 => operation.submitted_ns,
                earlier => earlier.min(operation.submitted_ns),
            };
            joint.parts.insert(*rank, operation);
        }
    }
    let mut joints: Vec<_> =
        joints.into_iter().filter(|(_, joint)| joint.first_ns >= since_ns).collect();
    // Operations that had been ordered come in that order, then those that had not.
    joints.sort_by_key(|((_, (_, name, sequence), ordered_ns), joint)| {
        let ordered = joint.parts.values().map(|it| it.ordered_ns).filter(|at| *at > 0).min();
        let is_open = sequence.is_none() && *ordered_ns == 0;
        (is_open, ordered.unwrap_or(joint.first_ns), *sequence, name.clone())
    });
    joints
}

fn entry(
    group: &Group,
    number: u64,
    record: usize,
    rank: u32,
    operation: &Operation,
    joint: &Joint<'_>,
    ranks: &BTreeSet<u32>,
) -> Value {
    let is_message = matches!(group, Group::Pair(..));
    let (name, inputs, outputs) = called(operation, rank, joint, ranks);
    let dtype = torch_dtype(operation);
    let dtypes = |sizes: &Vec<Vec<u64>>| vec![dtype; sizes.len()];
    let state = match operation.outcome {
        Outcome::Done => "completed",
        _ if is_in_flight(operation) && operation.ordered_ns > 0 => "started",
        _ => "scheduled",
    };
    let known = |at_ns: u64| (at_ns > 0).then_some(at_ns);
    let duration_ns = operation.ended_ns.saturating_sub(operation.begun_ns);
    let duration_ms = (operation.ended_ns > 0).then_some(duration_ns as f64 / 1e6);
    json!({
        "record_id": record,
        "pg_id": 0,
        "process_group": [group.name(), group.description()],
        "collective_seq_id": number,
        "p2p_seq_id": if is_message { number } else { 0 },
        "op_id": operation.number,
        "profiling_name": format!("{LIBRARY}:{name}"),
        "time_created_ns": operation.submitted_ns,
        "input_dtypes": dtypes(&inputs),
        "output_dtypes": dtypes(&outputs),
        "input_sizes": inputs,
        "output_sizes": outputs,
        "state": state,
        "time_discovered_started_ns": known(operation.begun_ns),
        "time_discovered_completed_ns": known(operation.ended_ns),
        "duration_ms": duration_ms,
        "retired": operation.ended_ns > 0,
        "timeout_ms": 0,
        "is_p2p": is_message,
        "frames": frames(&operation.site),
        "gradwire_name": operation.name,
    })
}

type Sizes = Vec<Vec<u64>>;

/// PyTorch's name of an operation, and the sizes of its inputs and outputs by PyTorch's rules.
fn called(
    operation: &Operation,
    rank: u32,
    joint: &Joint<'_>,
    ranks: &BTreeSet<u32>,
) -> (String, Sizes, Sizes) {
    let own = operation.dims.clone();
    let size = ranks.len() as u64;
    let rows = |of: &[u64]| of.first().copied().unwrap_or(1);
    let with_rows = |rows: u64| match own.split_first() {
        Some((_, rest)) => [&[rows], rest].concat(),
        None => vec![rows],
    };
    let all_rows = joint.parts.values().map(|it| rows(&it.dims));
    // The numbers of a damaged file may be of any size (TRUST).
    let total = all_rows.fold(0, u64::saturating_add);
    let is_even = joint.parts.values().all(|it| it.dims == own);
    let plain = |name: &str| (name.to_owned(), vec![own.clone()], vec![own.clone()]);
    match Collective::from_wire(operation.collective.into()) {
        Some(Collective::Allreduce) => plain("all_reduce"),
        Some(Collective::Broadcast) => plain("broadcast"),
        Some(Collective::Reduce) => plain("reduce"),
        Some(Collective::Allgather) if is_even => (
            "_all_gather_base".to_owned(),
            vec![own.clone()],
            vec![with_rows(rows(&own).saturating_mul(size))],
        ),
        // Ranks may give different numbers of rows, which the analyser would take for a mistake.
        Some(Collective::Allgather) => {
            let all = vec![with_rows(total)];
            ("all_gather_v".to_owned(), all.clone(), all)
        }
        Some(Collective::ReduceScatter) if size > 0 && rows(&own).is_multiple_of(size) => {
            let part = with_rows(rows(&own) / size);
            ("_reduce_scatter_base".to_owned(), vec![own.clone()], vec![part])
        }
        Some(Collective::ReduceScatter) => plain("reduce_scatter_v"),
        Some(Collective::Alltoall) => plain("all_to_all_single"),
        Some(Collective::Gather) => plain("gather"),
        Some(Collective::Scatter) => plain("scatter"),
        Some(Collective::SendReceive) => {
            let place = |rank: u32| ranks.iter().position(|it| *it == rank).unwrap_or_default();
            let (from, to) = (place(operation.root), place(operation.receiver as u32));
            let (name, arrow) =
                if rank == operation.root { ("send", "->") } else { ("recv", "<-") };
            let (own_place, other) = if rank == operation.root { (from, to) } else { (to, from) };
            (format!("{name} {own_place}{arrow}{other}"), vec![own.clone()], vec![own.clone()])
        }
        Some(Collective::AddProcessSet | Collective::RemoveProcessSet) => plain("split"),
        Some(Collective::Barrier | Collective::Join) | None => plain("barrier"),
    }
}

/// PyTorch's name of an element type.
fn torch_dtype(operation: &Operation) -> &'static str {
    match DType::from_wire(operation.dtype.into()) {
        Some(DType::F32) => "Float",
        Some(DType::F64) => "Double",
        Some(DType::F16) => "Half",
        Some(DType::Bf16) => "BFloat16",
        Some(DType::I8) => "Char",
        Some(DType::U8) => "Byte",
        Some(DType::I16) => "Short",
        Some(DType::I32) => "Int",
        Some(DType::I64) => "Long",
        Some(DType::U16) => "UInt16",
        Some(DType::U32) => "UInt32",
        Some(DType::U64) => "UInt64",
        Some(DType::Bool) => "Bool",
        Some(DType::F8E4m3) => "Float8_e4m3fn",
        Some(DType::F8E5m2) => "Float8_e5m2",
        Some(DType::C64) => "ComplexFloat",
        Some(DType::C128) => "ComplexDouble",
        None => "Undefined",
    }
}

/// The one frame that is known: `train.py:12 in step`.
fn frames(site: &str) -> Vec<Value> {
    let (place, name) = site.split_once(" in ").unwrap_or((site, ""));
    let Some((file, line)) = place.rsplit_once(':') else { return Vec::new() };
    let line: u64 = line.parse().unwrap_or_default();
    vec![json!({ "name": name, "filename": file, "line": line })]
}
