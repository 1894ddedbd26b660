//! The quantization errors of each tensor on this node, which are added the next time (error
//! feedback).
//!
//! A tensor is identified by its name and its length. Names that workers generate by counting are
//! reused for other data, so their errors are not kept. A piece takes its part of the errors when
//! it starts, and stores the new errors when it is published. No two pieces in flight have the same
//! part.
//!
//! All errors together take a limited amount of memory (BOUND). If a new tensor does not fit, those
//! that have not been used for a while are forgotten: their names never come back. If that isn't
//! enough, the tensor is rounded without feedback.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{metrics::Share, model::tensor::TensorKey};

/// How long an unused tensor is kept when another one needs its room.
const IDLE: Duration = Duration::from_secs(60);

const BYTES: usize = size_of::<f32>();

#[derive(Debug)]
pub(crate) struct Errors(Mutex<Vec<f32>>);

impl Errors {
    fn new(elements: u64) -> Self {
        Self(Mutex::new(vec![0.0; elements as usize]))
    }

    /// Copies the errors from element `first` on.
    pub(super) fn take(&self, first: u64, to: &mut [u8]) {
        let errors = self.0.lock();
        for (to, error) in to.as_chunks_mut::<BYTES>().0.iter_mut().zip(&errors[first as usize..]) {
            *to = error.to_ne_bytes();
        }
    }

    /// Replaces the errors from element `first` on.
    pub(super) fn put(&self, first: u64, from: &[u8]) {
        let mut errors = self.0.lock();
        for (error, from) in errors[first as usize..].iter_mut().zip(from.as_chunks::<BYTES>().0) {
            *error = f32::from_ne_bytes(*from);
        }
    }
}

#[derive(Debug)]
struct Kept {
    errors: Arc<Errors>,
    elements: u64,
    used: Instant,
}

#[derive(Debug)]
struct Tensors {
    kept: HashMap<(TensorKey, usize), Kept>,
    bytes: u64,
    memory: Share,
    /// Whether a lack of room has been logged.
    has_told: bool,
}

#[derive(Debug)]
pub(crate) struct Feedback {
    limit: u64,
    tensors: Mutex<Tensors>,
}

impl Feedback {
    /// Keeps at most `limit` bytes.
    pub(crate) fn new(limit: u64) -> Self {
        let memory = Share::of_memory("feedback");
        let tensors = Tensors { kept: HashMap::new(), bytes: 0, memory, has_told: false };
        Self { limit, tensors: Mutex::new(tensors) }
    }

    /// The errors of one tensor of a request, which has `elements` elements. `None` if its name is
    /// generated, or if it does not fit.
    pub(crate) fn of(
        &self,
        tensor: &TensorKey,
        part: usize,
        elements: u64,
        now: Instant,
    ) -> Option<Arc<Errors>> {
        if tensor.name.is_counted() {
            return None;
        }
        let key = (tensor.clone(), part);
        let mut tensors = self.tensors.lock();
        if let Some(kept) = tensors.kept.get_mut(&key)
            && kept.elements == elements
        {
            kept.used = now;
            return Some(Arc::clone(&kept.errors));
        }
        tensors.forget(&key);
        let bytes = elements.saturating_mul(BYTES as u64);
        if tensors.bytes.saturating_add(bytes) > self.limit {
            tensors.forget_idle(now);
        }
        if tensors.bytes.saturating_add(bytes) > self.limit {
            tensors.tell(tensor, self.limit);
            return None;
        }
        let errors = Arc::new(Errors::new(elements));
        tensors.bytes += bytes;
        tensors.memory.add(bytes as usize);
        tensors.kept.insert(key, Kept { errors: Arc::clone(&errors), elements, used: now });
        Some(errors)
    }
}

impl Tensors {
    fn forget(&mut self, key: &(TensorKey, usize)) {
        if let Some(kept) = self.kept.remove(key) {
            let bytes = kept.elements * BYTES as u64;
            self.bytes -= bytes;
            self.memory.remove(bytes as usize);
        }
    }

    fn forget_idle(&mut self, now: Instant) {
        let is_idle = |kept: &Kept| now.saturating_duration_since(kept.used) > IDLE;
        let idle = self.kept.iter().filter(|(_, kept)| is_idle(kept));
        let idle: Vec<_> = idle.map(|(key, _)| key.clone()).collect();
        idle.iter().for_each(|key| self.forget(key));
    }

    fn tell(&mut self, tensor: &TensorKey, limit: u64) {
        if !std::mem::replace(&mut self.has_told, true) {
            tracing::warn!(
                tensor = tensor.name.as_str(),
                limit,
                "this tensor is rounded without error feedback: the limit data.feedback_max_bytes \
                 is reached"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{ProcessSetId, TensorName};

    use super::*;

    fn key(name: &str) -> TensorKey {
        TensorKey { set: ProcessSetId::GLOBAL, name: TensorName::new(name).unwrap() }
    }

    fn errors(of: &Errors) -> Vec<f32> {
        of.0.lock().clone()
    }

    #[test]
    fn parts_of_a_tensor_are_taken_and_put_back() {
        let feedback = Feedback::new(1 << 20);
        let now = Instant::now();
        let first = feedback.of(&key("a"), 0, 4, now).unwrap();
        let bytes: Vec<u8> = [1.5f32, -2.0].into_iter().flat_map(f32::to_ne_bytes).collect();
        first.put(1, &bytes);
        let again = feedback.of(&key("a"), 0, 4, now).unwrap();
        assert_eq!(errors(&again), [0.0, 1.5, -2.0, 0.0]);
        let mut taken = vec![0; 8];
        again.take(1, &mut taken);
        assert_eq!(taken, bytes);
        assert_eq!(errors(&feedback.of(&key("a"), 1, 4, now).unwrap()), [0.0; 4]);
        // The same name with another length is another tensor.
        assert_eq!(errors(&feedback.of(&key("a"), 0, 5, now).unwrap()), [0.0; 5]);
        assert_eq!(errors(&feedback.of(&key("a"), 0, 4, now).unwrap()), [0.0; 4]);
    }

    /// Generated names are reused for other tensors.
    #[test]
    fn tensors_without_a_name_have_no_errors() {
        let feedback = Feedback::new(1 << 20);
        let now = Instant::now();
        for name in ["allreduce.#3", "allreduce.#1.3", "weights/#0"] {
            assert!(feedback.of(&key(name), 0, 4, now).is_none(), "{name}");
        }
        assert!(feedback.of(&key("allreduce.3"), 0, 4, now).is_some());
        assert!(!feedback.tensors.lock().has_told);
    }

    /// BOUND: tensors in use stay, others are forgotten after a while.
    #[test]
    fn idle_tensors_are_forgotten_at_the_limit() {
        let feedback = Feedback::new(100);
        let start = Instant::now();
        assert!(feedback.of(&key("large"), 0, 26, start).is_none());
        assert!(feedback.of(&key("a"), 0, 15, start).is_some());
        assert!(feedback.of(&key("b"), 0, 10, start).is_some());
        assert!(feedback.of(&key("c"), 0, 1, start).is_none());
        let later = start + IDLE + Duration::from_secs(1);
        assert!(feedback.of(&key("b"), 0, 10, later).is_some());
        assert!(feedback.of(&key("c"), 0, 15, later).is_some());
        assert!(feedback.of(&key("a"), 0, 15, later).is_none());
        let tensors = feedback.tensors.lock();
        assert_eq!((tensors.bytes, tensors.kept.len()), (100, 2));
    }
}
