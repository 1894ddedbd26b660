//! Objects of the program: serialized with serde, and broadcast or gathered as bytes.
//!
//! The format is postcard, which can't run code. If a rank's object is too large or can't be
//! serialized, every rank receives the reason (TELL).

use gradwire_proto::{DType, Failure, FailureKind, Rank, Shape};
use gradwire_shm::control::Origin;
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    error::{GradwireError, Result},
    handle::Handle,
    memory::Tensor,
    options::{AllgatherOptions, BroadcastOptions, ObjectKind},
    session::Session,
    task::Parts,
};

/// A mark, and an object as bytes or the reason why it has none.
type Packed = (u8, Vec<u8>);

/// Marks an object; the others mark the reason why there is none.
const OBJECT: u8 = 0;
const UNFIT: u8 = 1;
const TOO_LARGE: u8 = 2;

/// The length of the prefix of a gathered object: its mark and its rank.
const PREFIX: usize = 5;

fn pack<T: Serialize + ?Sized>(object: &T, rank: u32, limit: usize) -> Packed {
    match postcard::to_allocvec(object) {
        // BOUND
        Ok(bytes) if bytes.len() <= limit => (OBJECT, bytes),
        Ok(bytes) => {
            let bytes = bytes.len();
            let reason = format!(
                "the object of rank {rank} has {bytes} bytes, but its worker.max_object_bytes \
                 allows {limit}"
            );
            (TOO_LARGE, reason.into_bytes())
        }
        Err(error) => {
            let reason = format!("the object of rank {rank} can't be serialized: {error}");
            (UNFIT, reason.into_bytes())
        }
    }
}

fn refused(rank: u32, what: impl Into<String>) -> Failure {
    Failure::new(FailureKind::Invalid, what).rank(Rank(rank))
}

/// The failure of all ranks if an object has this mark and this reason.
fn not_sent(rank: u32, mark: u8, reason: &[u8]) -> Failure {
    let failure = refused(rank, String::from_utf8_lossy(reason));
    match mark {
        TOO_LARGE => failure.hint("raise worker.max_object_bytes, or send large data as a tensor"),
        _ => failure,
    }
}

/// Deserializes an object, which must use all bytes.
fn unpack<T: DeserializeOwned>(rank: u32, bytes: &[u8]) -> Result<T, Failure> {
    let unreadable = |why: String| {
        let what = format!(
            "the object of rank {rank} can't be read as {}: {why}; all ranks must use \
             the same type",
            std::any::type_name::<T>()
        );
        refused(rank, what)
    };
    match postcard::take_from_bytes(bytes) {
        Ok((object, [])) => Ok(object),
        Ok((_, rest)) => {
            Err(unreadable(format!("{} of its {} bytes are left", rest.len(), bytes.len())))
        }
        Err(error) => Err(unreadable(error.to_string())),
    }
}

/// An object with its mark and its rank, for an allgather.
fn labelled(rank: u32, (kind, bytes): Packed) -> Vec<u8> {
    [&[kind][..], &rank.to_le_bytes(), &bytes].concat()
}

/// Deserializes gathered objects. If some ranks gave reasons, the first one is the failure of all
/// ranks.
fn unlabelled<T: DeserializeOwned>(bytes: &[u8], sizes: &[usize]) -> Result<Vec<T>, Failure> {
    let mut rest = bytes;
    let mut objects = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let label = rest.split_at_checked(size).and_then(|(own, others)| {
            rest = others;
            own.split_first_chunk::<PREFIX>()
        });
        let Some((&[kind, a, b, c, d], bytes)) = label else {
            let text = format!("a gathered object of {size} bytes has no label");
            return Err(Failure::new(FailureKind::Protocol, text));
        };
        objects.push((kind, u32::from_le_bytes([a, b, c, d]), bytes));
    }
    if let Some((mark, rank, reason)) = objects.iter().find(|(kind, ..)| *kind != OBJECT) {
        return Err(not_sent(*rank, *mark, reason));
    }
    objects.into_iter().map(|(_, rank, bytes)| unpack(rank, bytes)).collect()
}

impl Session {
    /// Gives every rank the root's object. Objects of other ranks are ignored. The root's
    /// `worker.max_object_bytes` limits the size.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), gradwire_worker::GradwireError> {
    /// # use gradwire_worker::{BroadcastOptions, Session};
    /// # let session = Session::from_env()?;
    /// let own = (session.rank() == 0).then(|| vec!["cat".to_owned(), "dog".to_owned()]);
    /// let classes = session.broadcast_object(own.as_ref(), BroadcastOptions::from_rank(0))?;
    /// assert_eq!(classes.len(), 2);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Session::broadcast`]. Every rank fails if the root's object is too large or can't
    /// be serialized. A rank fails if it asks for another type and so can't read the object.
    #[track_caller]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        object: Option<&T>,
        options: BroadcastOptions,
    ) -> Result<T> {
        let root = options.root;
        let (parts, packed) = self.pack_broadcast(object, options)?;
        self.run_parts(&parts, |session| session.move_object(&parts, root, packed))
    }

    /// Starts [`Session::broadcast_object`] without waiting for it.
    #[track_caller]
    pub fn broadcast_object_async<T: Serialize + DeserializeOwned + Send + 'static>(
        &self,
        object: Option<&T>,
        options: BroadcastOptions,
    ) -> Result<Handle<T>> {
        let root = options.root;
        let (parts, packed) = self.pack_broadcast(object, options)?;
        let own = parts.clone();
        self.spawn_parts(parts, move |session| session.move_object(&own, root, packed))
    }

    /// Gives every rank all ranks' objects, in rank order.
    ///
    /// # Errors
    /// As for [`Session::allgather`]. Every rank fails if an object is too large or can't be
    /// serialized, and the failure names its rank. A rank fails if it can't read an object as `T`.
    #[track_caller]
    pub fn allgather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        options: AllgatherOptions,
    ) -> Result<Vec<T>> {
        let (parts, packed) = self.pack_gather(object, options)?;
        self.run_parts(&parts, |session| session.gather_objects(&parts, &packed))
    }

    /// Starts [`Session::allgather_object`] without waiting for it.
    #[track_caller]
    pub fn allgather_object_async<T: Serialize + DeserializeOwned + Send + 'static>(
        &self,
        object: &T,
        options: AllgatherOptions,
    ) -> Result<Handle<Vec<T>>> {
        let (parts, packed) = self.pack_gather(object, options)?;
        let own = parts.clone();
        self.spawn_parts(parts, move |session| session.gather_objects(&own, &packed))
    }

    #[track_caller]
    fn pack_broadcast<T: Serialize>(
        &self,
        object: Option<&T>,
        options: BroadcastOptions,
    ) -> Result<(Parts, Packed)> {
        let (session, BroadcastOptions { common, root }) = (self.pinned(), options);
        let own = object.filter(|_| root == session.rank());
        if own.is_none() && root == session.rank() {
            let text = format!("rank {root} is the root of a broadcast but gives no object");
            return Err(GradwireError::Invalid(text));
        }
        session
            .membership()
            .sets
            .lock()
            .of_member(common.process_set.as_ref())?
            .check_peer("root", root)?;
        // Before the operation has a name, because the object's own code may panic.
        let packed = own.map_or((OBJECT, Vec::new()), |object| {
            pack(object, session.rank(), session.max_object_bytes())
        });
        let parts = session.parts(common, ObjectKind::Broadcast.name(), Origin::Object)?;
        Ok((parts, packed))
    }

    /// Broadcasts the size first, so that all ranks can allocate memory, and then the bytes.
    fn move_object<T: DeserializeOwned>(
        &self,
        parts: &Parts,
        root: u32,
        (kind, bytes): Packed,
    ) -> Result<T> {
        let mut size = self.tensor(&[u64::from(kind), bytes.len() as u64], &[2])?;
        let common = parts.part_of("size", Origin::Count);
        self.broadcast(&mut size, BroadcastOptions { common, root })?;
        let [kind, size] = [size.as_slice()[0], size.as_slice()[1]];
        let buffer = self.new_buffer(DType::U8, Shape::new(&[size])?)?;
        let mut data = Tensor::<u8>::new(buffer);
        if root == self.rank() {
            data.as_mut_slice().copy_from_slice(&bytes);
        }
        if size > 0 {
            self.broadcast(&mut data, BroadcastOptions { common: parts.part("data"), root })?;
        }
        let object = match u8::try_from(kind) {
            Ok(OBJECT) => unpack(root, data.as_slice()),
            mark => Err(not_sent(root, mark.unwrap_or(UNFIT), data.as_slice())),
        };
        object.map_err(|failure| parts.named(failure).into())
    }

    #[track_caller]
    fn pack_gather<T: Serialize>(
        &self,
        object: &T,
        options: AllgatherOptions,
    ) -> Result<(Parts, Vec<u8>)> {
        let session = self.pinned();
        // Before the operation has a name, as for a broadcast.
        let packed = pack(object, session.rank(), session.max_object_bytes());
        let parts = session.parts(options.common, ObjectKind::Allgather.name(), Origin::Object)?;
        Ok((parts, labelled(session.rank(), packed)))
    }

    fn gather_objects<T: DeserializeOwned>(&self, parts: &Parts, own: &[u8]) -> Result<Vec<T>> {
        let own = self.tensor(own, &[own.len()])?;
        let gathered =
            self.allgather(&own, AllgatherOptions { common: parts.part("data"), op: None })?;
        let objects = unlabelled(gathered.tensor.as_slice(), &gathered.rows);
        objects.map_err(|failure| parts.named(failure).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(all: &[Vec<u8>]) -> (Vec<u8>, Vec<usize>) {
        (all.concat(), all.iter().map(Vec::len).collect())
    }

    #[test]
    fn objects_come_back_in_order() {
        let labels: Vec<_> =
            ["a", "", "ccc"].iter().zip(0..).map(|(s, r)| labelled(r, pack(s, r, 100))).collect();
        let (bytes, sizes) = gathered(&labels);
        assert_eq!(unlabelled::<String>(&bytes, &sizes).unwrap(), ["a", "", "ccc"]);
    }

    #[test]
    fn an_object_that_is_too_large_names_its_rank() {
        let labels =
            [labelled(0, pack("fits", 0, 100)), labelled(1, pack(&"x".repeat(200), 1, 100))];
        let (bytes, sizes) = gathered(&labels);
        let error = unlabelled::<String>(&bytes, &sizes).unwrap_err().to_string();
        for part in ["rank 1", "202 bytes", "allows 100", "raise worker.max_object_bytes"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn bytes_of_another_type_are_refused() {
        let (_, bytes) = pack(&(1u8, 2u8), 3, 100);
        assert_eq!(unpack::<(u8, u8)>(3, &bytes).unwrap(), (1, 2));
        let error = unpack::<u8>(3, &bytes).unwrap_err().to_string();
        assert!(error.contains("1 of its 2 bytes are left") && error.contains("rank 3"), "{error}");
        let error = unpack::<(u8, u8, u8)>(3, &bytes).unwrap_err().to_string();
        assert!(error.contains("can't be read as (u8, u8, u8)"), "{error}");
        // TRUST: sizes come from other ranks.
        assert!(unlabelled::<u8>(&[0, 0], &[2]).is_err());
        assert!(unlabelled::<u8>(&[0, 0], &[usize::MAX]).is_err());
    }
}
