//! The options common to all collectives: name, priority, process set, reduction.

use gradwire_worker::{ObjectKind, ProcessSet, ReduceOp};

use crate::{error::PythonError, process_set};

/// Name, priority and process set of an operation.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) name: Option<String>,
    pub(crate) priority: i32,
    pub(crate) set: Option<ProcessSet>,
}

impl Common {
    pub(crate) fn new(
        name: Option<String>,
        priority: i32,
        set: Option<&process_set::ProcessSet>,
    ) -> Self {
        Self { name, priority, set: set.map(|set| set.inner.clone()) }
    }

    /// The name of the operation in messages.
    pub(crate) fn called(&self, collective: &str) -> String {
        self.name.clone().unwrap_or_else(|| collective.to_owned())
    }
}

/// Applies [`Common`] to options of the worker library.
macro_rules! apply {
    ($common:expr, $options:expr) => {{
        let common: &$crate::options::Common = &$common;
        let mut options = $options.priority(common.priority);
        if let Some(name) = &common.name {
            options = options.name(name.clone());
        }
        if let Some(set) = &common.set {
            options = options.process_set(set);
        }
        options
    }};
}

pub(crate) use apply;

/// Parses the kind of an object operation.
pub(crate) fn object_kind(name: &str) -> Result<ObjectKind, PythonError> {
    name.parse().map_err(|_| {
        let all = ObjectKind::NAMES.join(", ");
        PythonError::invalid(format!("unknown object operation {name:?}: use one of {all}"))
    })
}

/// Parses a reduction.
pub(crate) fn reduce_op(name: &str) -> Result<ReduceOp, PythonError> {
    name.parse().map_err(|_| {
        let all = ReduceOp::NAMES.join(", ");
        PythonError::invalid(format!("unknown reduction {name:?}: use one of {all}"))
    })
}
