//! What a node announces in a step, and what it must receive in return. Pure.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use gradwire_bench::shapes::Gradient;
use gradwire_launcher::error::CommandError;
use gradwire_proto::{DType, MAX_CONTROL_MESSAGE, ReduceOp, Request, Shape, pb};
use gradwire_worker::optimizer;
use prost::Message;

/// The size of announcements at which a daemon always sends a message, in bytes.
const READY_BYTES: usize = MAX_CONTROL_MESSAGE / 4;

/// A tensor that every node has.
#[derive(Debug)]
struct Tensor {
    name: String,
    priority: i32,
    elements: u64,
    request: pb::Request,
}

/// The tensors of a step, in the order in which they are announced: last layer first.
#[derive(Debug)]
pub struct Tensors {
    all: Vec<Tensor>,
    by_name: BTreeMap<String, usize>,
}

impl Tensors {
    /// The tensors of these gradients, given front layer first. They are averaged.
    ///
    /// # Errors
    /// [`CommandError`] if a tensor has an invalid name or shape.
    pub fn new(gradients: &[Gradient]) -> Result<Arc<Self>, CommandError> {
        let names = gradients.iter().map(|gradient| gradient.name.as_str());
        let planned = optimizer::plan("bench.", names).map_err(CommandError::usage)?;
        let tensor = |(gradient, planned): (&Gradient, optimizer::Planned)| {
            let shape = Shape::new(&gradient.dims).map_err(CommandError::usage)?;
            let elements = shape.elements();
            let request = Request::allreduce(DType::F32, shape, ReduceOp::Average);
            Ok(Tensor {
                name: planned.name.as_str().to_owned(),
                priority: planned.priority,
                elements,
                request: (&request).into(),
            })
        };
        let all = gradients.iter().zip(planned).rev().map(tensor);
        let all = all.collect::<Result<Vec<_>, CommandError>>()?;
        let by_name = all.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Arc::new(Self { all, by_name }))
    }

    /// The number of tensors.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// The number of elements of all tensors.
    pub fn elements(&self) -> u64 {
        self.all.iter().map(|tensor| tensor.elements).sum()
    }
}

/// A node's state of the tensors.
#[derive(Debug)]
pub struct Negotiated {
    tensors: Arc<Tensors>,
    rank: u32,
    /// The id of each tensor, once it has one.
    ids: Vec<Option<u32>>,
    by_id: HashMap<u32, usize>,
    /// For each tensor, the number of elements that no operation of this step has moved.
    left: Vec<u64>,
    /// The number of tensors with elements left.
    open: usize,
    /// The sequence number of the last operation.
    sequence: Option<u64>,
}

impl Negotiated {
    /// The state of the node whose only rank this is.
    pub fn new(tensors: Arc<Tensors>, rank: u32) -> Self {
        let count = tensors.count();
        Self {
            tensors,
            rank,
            ids: vec![None; count],
            by_id: HashMap::new(),
            left: vec![0; count],
            open: 0,
            sequence: None,
        }
    }

    /// Begins a step. Returns all announcements in `messages` messages, or more if these would be
    /// too long.
    pub fn begin(&mut self, messages: u32) -> Vec<pb::Ready> {
        let each = self.tensors.count().div_ceil(messages.max(1) as usize);
        let (mut all, mut ready, mut bytes) = (Vec::new(), pb::Ready::default(), 0);
        for (i, tensor) in self.tensors.all.iter().enumerate() {
            let announcement = announcement(tensor, self.ids[i], self.rank);
            bytes += announcement.encoded_len();
            ready.announcements.push(announcement);
            if ready.announcements.len() == each || bytes >= READY_BYTES {
                all.push(std::mem::take(&mut ready));
                bytes = 0;
            }
        }
        all.extend(Some(ready).filter(|ready| !ready.announcements.is_empty()));
        self.left = self.tensors.all.iter().map(|tensor| tensor.elements).collect();
        self.open = self.left.iter().filter(|left| **left > 0).count();
        all
    }

    /// Whether operations have moved every element of every tensor.
    pub fn is_done(&self) -> bool {
        self.open == 0
    }

    /// The name of an unfinished tensor, for errors.
    pub fn waits_for(&self) -> &str {
        let waiting = self.left.iter().position(|left| *left > 0);
        waiting.map_or("nothing", |i| &self.tensors.all[i].name)
    }

    /// Applies the received operations, and returns their sequence numbers.
    ///
    /// # Errors
    /// A description of invalid input (TRUST): an unknown tensor, operations out of order (ORD),
    /// elements that arrive twice (ONE), a failed tensor.
    pub fn execute(&mut self, execute: &pb::Execute) -> Result<Vec<u64>, String> {
        if let Some(failure) = execute.failures.iter().find_map(|failed| failed.failure.clone()) {
            return Err(gradwire_proto::Failure::from(failure).to_string());
        }
        for registration in &execute.registrations {
            let named = self.tensors.by_name.get(&registration.name);
            let i = *named.ok_or_else(|| format!("unknown tensor '{}'", registration.name))?;
            if let Some(old) = self.ids[i].replace(registration.id) {
                self.by_id.remove(&old);
            }
            self.by_id.insert(registration.id, i);
        }
        for operation in &execute.operations {
            if self.sequence.is_some_and(|last| last >= operation.sequence) {
                return Err(format!("operation {} is out of order", operation.sequence));
            }
            self.sequence = Some(operation.sequence);
            for segment in &operation.segments {
                self.take(segment)?;
            }
        }
        for id in &execute.evicted {
            if let Some(i) = self.by_id.remove(id) {
                self.ids[i] = None;
            }
        }
        Ok(execute.operations.iter().map(|operation| operation.sequence).collect())
    }

    fn take(&mut self, segment: &pb::Segment) -> Result<(), String> {
        let tensor = segment.tensor.as_ref().and_then(|tensor| tensor.tensor.as_ref());
        let found = match tensor {
            Some(pb::tensor_ref::Tensor::Id(id)) => self.by_id.get(id),
            Some(pb::tensor_ref::Tensor::Name(name)) => self.tensors.by_name.get(name),
            None => None,
        };
        let i = *found.ok_or_else(|| format!("unknown tensor {tensor:?}"))?;
        let left = self.left[i].checked_sub(segment.count).ok_or_else(|| {
            format!(
                "{} elements of '{}' were received twice",
                segment.count, self.tensors.all[i].name
            )
        })?;
        if left == 0 && self.left[i] > 0 {
            self.open -= 1;
        }
        self.left[i] = left;
        Ok(())
    }
}

fn announcement(tensor: &Tensor, id: Option<u32>, rank: u32) -> pb::Announcement {
    let named = || pb::tensor_ref::Tensor::Name(tensor.name.clone());
    let reference = id.map_or_else(named, pb::tensor_ref::Tensor::Id);
    let submitted = pb::Submitted {
        ranks: vec![rank],
        request: Some(tensor.request.clone()),
        priority: tensor.priority,
        duplicate: false,
        sites: Vec::new(),
    };
    pb::Announcement {
        process_set: 0,
        tensor: Some(pb::TensorRef { tensor: Some(reference) }),
        // With an id, the request is already known from the registration.
        submitted: Some(submitted).filter(|_| id.is_none()).into_iter().collect(),
        latest: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> Negotiated {
        let gradient = |name: &str, dims: &[u64]| Gradient { name: name.into(), dims: dims.into() };
        let gradients = [gradient("a", &[2, 3]), gradient("b", &[5]), gradient("c", &[])];
        Negotiated::new(Tensors::new(&gradients).unwrap(), 4)
    }

    fn operation(sequence: u64, parts: &[(&str, u64)]) -> pb::Operation {
        let segment = |(name, count): &(&str, u64)| {
            let tensor = match name.parse() {
                Ok(id) => pb::tensor_ref::Tensor::Id(id),
                Err(_) => pb::tensor_ref::Tensor::Name((*name).to_owned()),
            };
            let tensor = Some(pb::TensorRef { tensor: Some(tensor) });
            pb::Segment { tensor, count: *count, ..Default::default() }
        };
        let segments = parts.iter().map(segment).collect();
        pb::Operation { sequence, segments, ..Default::default() }
    }

    fn execute(operations: &[pb::Operation]) -> pb::Execute {
        pb::Execute { operations: operations.to_vec(), ..Default::default() }
    }

    #[test]
    fn names_are_sent_once_and_the_last_layer_first() {
        let mut node = node();
        let first = node.begin(1);
        let [ready] = &first[..] else { panic!("{first:?}") };
        assert_eq!(
            ready.announcements[0].tensor,
            execute(&[operation(1, &[("bench.c", 1)])]).operations[0].segments[0].tensor
        );
        assert!(ready.announcements.iter().all(|one| one.submitted[0].ranks == [4]));
        let name =
            |id: u32, name: &str| pb::Registration { id, name: name.into(), ..Default::default() };
        let registrations = vec![name(7, "bench.c"), name(8, "bench.b"), name(9, "bench.a")];
        let whole = operation(1, &[("7", 1), ("8", 5), ("bench.a", 6)]);
        let execute = pb::Execute { registrations, operations: vec![whole], ..Default::default() };
        assert_eq!(node.execute(&execute), Ok(vec![1]));
        assert!(node.is_done());
        let second = node.begin(2);
        assert_eq!(
            second.iter().map(|ready| ready.announcements.len()).collect::<Vec<_>>(),
            [2, 1]
        );
        assert!(
            second
                .iter()
                .flat_map(|ready| &ready.announcements)
                .all(|one| one.submitted.is_empty())
        );
        // The id takes two bytes, in a reference with two more, in an announcement with two more.
        assert!(second[0].encoded_len() <= 2 * 6, "{second:?}");
    }

    #[test]
    fn an_evicted_id_is_a_name_again() {
        let mut node = node();
        let registration = pb::Registration { id: 7, name: "bench.c".into(), ..Default::default() };
        let execute = pb::Execute { registrations: vec![registration], ..Default::default() };
        node.execute(&execute).unwrap();
        node.execute(&pb::Execute { evicted: vec![7, 8], ..Default::default() }).unwrap();
        let again = &node.begin(1)[0].announcements[0];
        assert_eq!(again.submitted.len(), 1, "{again:?}");
    }

    #[test]
    fn invalid_operations_are_reported() {
        for (operations, expected) in [
            (vec![operation(3, &[]), operation(3, &[])], "operation 3 is out of order"),
            (vec![operation(1, &[("bench.z", 1)])], "unknown tensor"),
            (vec![operation(1, &[("70", 1)])], "unknown tensor"),
            (
                vec![operation(1, &[("bench.b", 3), ("bench.b", 3)])],
                "3 elements of 'bench.b' were received twice",
            ),
        ] {
            let mut node = node();
            node.begin(1);
            let error = node.execute(&execute(&operations)).unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert!(!node.is_done() && node.waits_for().starts_with("bench."));
        }
        let mut node = node();
        let failure = pb::Failure { what: "ranks disagree".into(), ..Default::default() };
        let failed = pb::TensorFailure { failure: Some(failure), ..Default::default() };
        let execute = pb::Execute { failures: vec![failed], ..Default::default() };
        assert_eq!(node.execute(&execute), Err("ranks disagree".into()));
    }
}
