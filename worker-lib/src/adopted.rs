//! Memory of the program that operations use without a copy. The functions that turn an address
//! into memory are unsafe; nothing else here is.
//!
//! Making the shared memory takes longer than moving memory there, because the kernel clears each
//! page. It does not touch the program's memory, so a separate thread does it meanwhile.

use std::{os::fd::BorrowedFd, ptr::NonNull, sync::mpsc};

use gradwire_proto::{DType, Shape};
use gradwire_shm::arena::{self, AdoptionPlace, Owner};

use crate::{
    error::{GradwireError, Result},
    memory::{Buffer, SharedBuffer},
    session::Session,
    shared::Shared,
};

/// Shared memory that the daemon has, to which memory of the program can move. It is given back if
/// nothing moves there. See [`Session::adoption`].
#[derive(Debug)]
#[must_use = "it is given back when it is dropped"]
pub struct Adoption(arena::Adoption);

impl Adoption {
    /// The second part of [`Session::adopt`]: moves memory of the program here, which must have the
    /// same size. It gets a copy of the bytes at `contents`, which may be its own address. This
    /// takes as long as a copy, and does not wait for anything.
    ///
    /// # Errors
    /// [`GradwireError::Arena`] if the memory is not exactly the mapping of the file `fd`, or if it
    /// is shared with this session already. The memory is unchanged.
    ///
    /// # Safety
    /// As for [`Session::adopt`]. Nobody writes to the contents during the call.
    pub unsafe fn take_place(
        self,
        start: NonNull<u8>,
        fd: BorrowedFd<'_>,
        contents: NonNull<u8>,
        owner: Owner,
    ) -> Result<SharedBuffer> {
        let shape = Shape::new(&[self.0.bytes()])?;
        // SAFETY: the caller promises the same. The block is used only by operations on the buffer,
        // and by code that dereferences its address.
        let block = unsafe { self.0.take_place(start, fd, contents, owner) }?;
        Ok(Buffer::new(block, DType::U8, shape).into_shared())
    }
}

/// Shared memory that is being made in the background. See [`Session::prepare_adoption`].
#[derive(Debug)]
#[must_use = "the memory is given back when this is dropped"]
pub struct Preparation {
    making: mpsc::Receiver<Result<Adoption>>,
    made: Option<Result<Adoption>>,
}

impl Preparation {
    /// Whether [`Preparation::wait`] returns at once.
    pub fn is_done(&mut self) -> bool {
        if self.made.is_none() {
            self.made = match self.making.try_recv() {
                Ok(made) => Some(made),
                Err(mpsc::TryRecvError::Empty) => None,
                Err(mpsc::TryRecvError::Disconnected) => Some(Err(GradwireError::Closed)),
            };
        }
        self.made.is_some()
    }

    /// Waits until the memory has been made.
    ///
    /// # Errors
    /// As for [`Session::adopt`].
    pub fn wait(self) -> Result<Adoption> {
        let making = self.making;
        self.made.unwrap_or_else(|| making.recv().unwrap_or(Err(GradwireError::Closed)))
    }
}

/// Makes the shared memory.
fn make(shared: &Shared, place: AdoptionPlace) -> Result<Adoption> {
    place.make().map(Adoption).or_else(|error| {
        shared.check()?; // the first cause, not its consequence (TELL)
        Err(error.into())
    })
}

impl Session {
    /// Turns existing memory of the program into a buffer of bytes at the same addresses, so that
    /// operations read and write it without a copy. It must be exactly one mapping of the file
    /// `fd`, from the file's first byte, such as the memory of a tensor that a framework has moved
    /// into shared memory. Afterwards the descriptor refers to the new, sealed memory.
    ///
    /// The addresses still belong to the program. The program keeps the memory and its contents
    /// when the last clone of the buffer is dropped, and after the session's end. Then `owner` is
    /// dropped.
    ///
    /// # Errors
    /// [`GradwireError`] if the memory is not such a mapping, if it is shared with this session
    /// already, if shared memory can't be allocated, if the daemon can't use it, or if there are
    /// too many adopted buffers ([`Session::may_adopt`]). The memory is unchanged in any case.
    ///
    /// # Safety
    /// - Nobody writes to the memory during the call, nor uses `fd` or the file behind it. The same
    ///   holds for the memory during [`Session::rejoin`]; nobody unmaps it then, either.
    /// - While an operation on the buffer or a part of it is in flight, or its address is
    ///   dereferenced, the addresses stay mapped and belong to nobody else. An `owner` that unmaps
    ///   them on drop ensures this.
    /// - An operation accesses the memory like another thread of this process: while it writes, no
    ///   reference to the memory exists; while it only reads, no mutable reference exists.
    pub unsafe fn adopt(
        &self,
        start: NonNull<u8>,
        bytes: usize,
        fd: BorrowedFd<'_>,
        owner: Owner,
    ) -> Result<SharedBuffer> {
        let adoption = self.adoption(bytes)?;
        // SAFETY: the caller promises the same.
        unsafe { adoption.take_place(start, fd, start, owner) }
    }

    /// The first part of [`Session::adopt`]: makes shared memory of this size, to which memory of
    /// the program can move. It waits until the daemon has it, and does not touch the program's
    /// memory.
    ///
    /// # Errors
    /// As for [`Session::adopt`].
    pub fn adoption(&self, bytes: usize) -> Result<Adoption> {
        let place = self.place(bytes)?;
        let shared = self.shared();
        shared.noted(make(&shared, place))
    }

    /// Like [`Session::adoption`], but another thread makes the memory, after those that were
    /// prepared before. It counts as adopted from now on.
    ///
    /// # Errors
    /// [`GradwireError`] if the session has ended, or if there are too many adopted buffers. Other
    /// errors are those of [`Preparation::wait`].
    pub fn prepare_adoption(&self, bytes: usize) -> Result<Preparation> {
        let place = self.place(bytes)?;
        let ((sender, making), shared) = (mpsc::sync_channel(1), self.shared());
        // If nobody waits for the memory any more, it is given back.
        self.background().run(Box::new(move || drop(sender.send(make(&shared, place)))));
        Ok(Preparation { making, made: None })
    }

    fn place(&self, bytes: usize) -> Result<AdoptionPlace> {
        self.check_process()?;
        let shared = self.shared();
        shared.check()?;
        Shape::new(&[bytes as u64])?;
        let place = self.arena().adoption(bytes as u64).map_err(GradwireError::from);
        shared.noted(place)
    }

    /// The largest tensor that may be adopted, in bytes; `None` if `worker.adopt` is off.
    pub fn adopt_max_bytes(&self) -> Option<usize> {
        self.limits().adopt_bytes
    }

    /// Whether memory may be adopted now. At most half of `worker.max_segments` may be adopted at a
    /// time.
    pub fn may_adopt(&self) -> bool {
        self.limits().adopt_bytes.is_some() && self.arena().may_adopt()
    }
}
