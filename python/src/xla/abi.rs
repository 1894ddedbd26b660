//! The C interface between XLA and functions that compiled programs call. XLA calls it FFI.
//!
//! The structures are those of `xla/ffi/api/c_api.h`, under our names; nothing is linked. XLA
//! passes a call frame, which contains a pointer to the functions that we may call. New versions
//! append fields, and each structure begins with its size, so a call frame is read only if its
//! version and the sizes of its parts include all fields that are used here.
//!
//! This module checks and copies what XLA describes (TRUST). The other modules see a [`Call`] with
//! operands and texts, and a [`Promise`] that tells XLA later that the call has ended.

use std::{
    collections::HashMap,
    ffi::{CString, c_char, c_int, c_void},
    mem::{self, offset_of},
    panic::{self, AssertUnwindSafe},
    ptr, slice, str,
};

use gradwire_worker::DType;
use pyo3::{ffi, prelude::*};

/// The major version of the interface, and the oldest minor version that has all fields used here.
const MAJOR: c_int = 0;
const OLDEST_MINOR: c_int = 2;

/// The tag of a structure with the handler's version, which XLA wants instead of a call.
const METADATA: c_int = 1;

/// The tag of arguments and results that are tensors.
const TENSOR: c_int = 1;

/// The tag of attributes that are texts.
const TEXT: c_int = 4;

/// `XLA_FFI_Error_Code_ABORTED`.
const ABORTED: c_int = 10;

/// An error of XLA, which belongs to XLA once it is returned.
#[repr(C)]
pub(crate) struct XlaError([u8; 0]);

/// A future of XLA, which belongs to XLA once it is in the call frame.
#[repr(C)]
struct XlaFuture([u8; 0]);

#[repr(C)]
struct Extension {
    size: usize,
    kind: c_int,
    next: *mut Self,
}

#[repr(C)]
struct Version {
    size: usize,
    extensions: *mut Extension,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct Metadata {
    size: usize,
    version: Version,
    traits: u32,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct Bytes {
    start: *const u8,
    len: usize,
}

#[repr(C)]
struct Tensor {
    size: usize,
    extensions: *mut Extension,
    element: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`.
#[repr(C)]
struct Tensors {
    size: usize,
    extensions: *mut Extension,
    count: i64,
    kinds: *const c_int,
    values: *const *const c_void,
}

#[repr(C)]
struct Attributes {
    size: usize,
    extensions: *mut Extension,
    count: i64,
    kinds: *const c_int,
    names: *const *const Bytes,
    values: *const *const c_void,
}

/// `XLA_FFI_CallFrame`.
#[repr(C)]
pub(crate) struct CallFrame {
    size: usize,
    extensions: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Tensors,
    results: Tensors,
    attributes: Attributes,
    future: *mut XlaFuture,
}

#[repr(C)]
struct ErrorCreate {
    size: usize,
    extensions: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct ErrorDestroy {
    size: usize,
    extensions: *mut Extension,
    error: *mut XlaError,
}

/// The arguments of the functions that create a future and make it available.
#[repr(C)]
struct OfFuture {
    size: usize,
    extensions: *mut Extension,
    future: *mut XlaFuture,
}

#[repr(C)]
struct FutureSetError {
    size: usize,
    extensions: *mut Extension,
    future: *mut XlaFuture,
    error: *mut XlaError,
}

/// A function that is not used here.
type Unused = *const c_void;

/// `XLA_FFI_Api`: the functions of XLA, in the order of its header. Later versions have more.
#[repr(C)]
struct Api {
    size: usize,
    extensions: *mut Extension,
    version: Version,
    internal: *const c_void,
    error_create: unsafe extern "C" fn(*mut ErrorCreate) -> *mut XlaError,
    error_get_message: Unused,
    error_destroy: unsafe extern "C" fn(*mut ErrorDestroy),
    handler_register: Unused,
    stream_get: Unused,
    type_register: Unused,
    execution_context_get: Unused,
    state_set: Unused,
    state_get: Unused,
    device_memory_allocate: Unused,
    device_memory_free: Unused,
    thread_pool_schedule: Unused,
    thread_pool_num_threads: Unused,
    future_create: unsafe extern "C" fn(*mut OfFuture) -> *mut XlaError,
    future_set_available: unsafe extern "C" fn(*mut OfFuture) -> *mut XlaError,
    future_set_error: unsafe extern "C" fn(*mut FutureSetError) -> *mut XlaError,
}

/// A tensor of a call. XLA keeps its memory until the call has ended, but not its description.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    /// `None`: not a type that can be exchanged.
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: Vec<usize>,
    /// The address of the first byte.
    pub(crate) address: usize,
}

/// A call of a handler.
pub(crate) struct Call<'f> {
    pub(crate) arguments: Vec<Operand>,
    pub(crate) results: Vec<Operand>,
    texts: HashMap<&'f str, &'f str>,
    api: &'static Api,
    future: &'f mut *mut XlaFuture,
}

/// Tells XLA that a call has ended. If it is dropped before, the call fails (WAIT).
pub(crate) struct Promise {
    api: &'static Api,
    future: *mut XlaFuture,
}

// SAFETY: any thread may complete a future of XLA.
unsafe impl Send for Promise {}

/// The error of a call that was not made by `gradwire.jax`.
const NO_TOKEN: &str = "this call of Gradwire has no token: use gradwire.jax";

impl Operand {
    /// Whether it has the type of a token: XLA may lack 64-bit numbers.
    fn is_token(&self) -> bool {
        self.dtype == Some(DType::U32) && self.shape == [2]
    }

    /// The size in bytes; 0 for an element type that is not known.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.map_or(0, DType::size)
    }
}

impl<'f> Call<'f> {
    /// An attribute of the call; empty if there is none.
    pub(crate) fn text(&self, name: &str) -> &'f str {
        self.texts.get(name).copied().unwrap_or_default()
    }

    /// Writes a token, which is the last result.
    pub(crate) fn write_token(&self, token: u64) -> Result<(), String> {
        let place = self.results.last().filter(|place| place.is_token()).ok_or(NO_TOKEN)?;
        let to = ptr::with_exposed_provenance_mut::<u64>(place.address);
        // SAFETY: XLA gives memory for a result of this size, which nobody else uses during the
        // call.
        unsafe { to.write_unaligned(token) };
        Ok(())
    }

    /// The tokens of earlier calls, which are the last `count` arguments.
    pub(crate) fn tokens(&self, count: usize) -> Result<Vec<u64>, String> {
        let first = self.arguments.len().checked_sub(count).ok_or(NO_TOKEN)?;
        let token = |place: &Operand| {
            let from = ptr::with_exposed_provenance::<u64>(place.address);
            // SAFETY: XLA gives an argument of this size, which nobody writes to during the call.
            place.is_token().then(|| unsafe { from.read_unaligned() }).ok_or(NO_TOKEN.to_owned())
        };
        self.arguments[first..].iter().map(token).collect()
    }

    /// The call ends when the promise is kept, and not when the handler returns.
    pub(crate) fn promise(&mut self) -> Result<Promise, String> {
        let (extensions, future) = (ptr::null_mut(), ptr::null_mut());
        let mut wanted = OfFuture { size: size_of::<OfFuture>(), extensions, future };
        // SAFETY: a function of XLA, with arguments that live during the call.
        let error = unsafe { (self.api.future_create)(&mut wanted) };
        self.api.destroy(error)?;
        *self.future = wanted.future;
        Ok(Promise { api: self.api, future: wanted.future })
    }
}

impl Promise {
    /// The call has succeeded: XLA may use its results. This thread may run a part of the program.
    pub(crate) fn keep(self) {
        let Self { api, future } = self;
        mem::forget(self);
        let mut ended =
            OfFuture { size: size_of::<OfFuture>(), extensions: ptr::null_mut(), future };
        // SAFETY: a function of XLA, with arguments that live during the call. The future is
        // completed once: this value is gone.
        let error = unsafe { (api.future_set_available)(&mut ended) };
        let _ = api.destroy(error); // nothing else can be done about it
    }

    /// The call has failed.
    pub(crate) fn fail(self, why: &str) {
        let Self { api, future } = self;
        mem::forget(self);
        api.fail(future, why);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.api.fail(self.future, "a call of Gradwire was given up");
    }
}

impl Api {
    /// A new error, which XLA or [`Api::destroy`] must get.
    fn error(&self, why: &str) -> *mut XlaError {
        let text = CString::new(why.replace('\0', "?")).unwrap_or_default();
        let mut made = ErrorCreate {
            size: size_of::<ErrorCreate>(),
            extensions: ptr::null_mut(),
            message: text.as_ptr(),
            code: ABORTED,
        };
        // SAFETY: a function of XLA, which copies the text; the arguments live during the call.
        unsafe { (self.error_create)(&mut made) }
    }

    /// Completes a future with an error.
    fn fail(&self, future: *mut XlaFuture, why: &str) {
        let mut failed = FutureSetError {
            size: size_of::<FutureSetError>(),
            extensions: ptr::null_mut(),
            future,
            error: self.error(why),
        };
        // SAFETY: a function of XLA, with arguments that live during the call. It owns the error
        // from then on. Only a promise calls this, once.
        let error = unsafe { (self.future_set_error)(&mut failed) };
        let _ = self.destroy(error); // nothing else can be done about it
    }

    /// Whether a function of XLA has succeeded. Frees its error.
    fn destroy(&self, error: *mut XlaError) -> Result<(), String> {
        if error.is_null() {
            return Ok(());
        }
        let extensions = ptr::null_mut();
        let mut gone = ErrorDestroy { size: size_of::<ErrorDestroy>(), extensions, error };
        // SAFETY: a function of XLA; the error is not used any more.
        unsafe { (self.error_destroy)(&mut gone) };
        Err("XLA can't complete a call later".to_owned())
    }

    /// Refuses an interface that lacks something.
    fn check(&self, frame: &CallFrame) -> Result<(), String> {
        let Version { major, minor, .. } = self.version;
        let sizes = [
            (self.size, offset_of!(Api, future_set_error) + size_of::<usize>()),
            (frame.size, offset_of!(CallFrame, future)),
            (frame.arguments.size, size_of::<Tensors>()),
            (frame.results.size, size_of::<Tensors>()),
            (frame.attributes.size, size_of::<Attributes>()),
        ];
        let is_complete = sizes.iter().all(|(size, needed)| size >= needed);
        if major == MAJOR && minor >= OLDEST_MINOR && is_complete {
            return Ok(());
        }
        Err(format!(
            "this jaxlib has version {major}.{minor} of XLA's FFI, and Gradwire needs {MAJOR}.\
             {OLDEST_MINOR} or a later {MAJOR}.x: install jax 0.10 or later"
        ))
    }
}

/// The element type of XLA's number for it.
fn dtype(element: c_int) -> Option<DType> {
    Some(match element {
        1 => DType::Bool,
        2 => DType::I8,
        3 => DType::I16,
        4 => DType::I32,
        5 => DType::I64,
        6 => DType::U8,
        7 => DType::U16,
        8 => DType::U32,
        9 => DType::U64,
        10 => DType::F16,
        11 => DType::F32,
        12 => DType::F64,
        15 => DType::C64,
        16 => DType::Bf16,
        18 => DType::C128,
        19 => DType::F8E5m2,
        20 => DType::F8E4m3,
        _ => return None,
    })
}

/// A list of XLA, which may be null if it is empty.
///
/// # Safety
/// There are `count` elements at `start`, which nobody changes during `'f`.
unsafe fn list<'f, T>(start: *const T, count: i64) -> Result<&'f [T], String> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: by the contract.
        Ok(count) if !start.is_null() => Ok(unsafe { slice::from_raw_parts(start, count) }),
        _ => Err(format!("XLA gives a list of {count} elements")),
    }
}

/// # Safety
/// The structure is one of a call frame of XLA.
unsafe fn operands(tensors: &Tensors) -> Result<Vec<Operand>, String> {
    // SAFETY: XLA's lists of kinds and values have this length.
    let (kinds, values) =
        unsafe { (list(tensors.kinds, tensors.count)?, list(tensors.values, tensors.count)?) };
    let operand = |(kind, value): (&c_int, &*const c_void)| {
        if *kind != TENSOR {
            return Err(format!("XLA gives an operand of the unknown kind {kind}"));
        }
        // SAFETY: a value of this kind is a tensor.
        let tensor = unsafe { value.cast::<Tensor>().as_ref() };
        let tensor = tensor.filter(|tensor| tensor.size >= size_of::<Tensor>());
        let tensor = tensor.ok_or_else(|| "XLA gives a tensor of another layout".to_owned())?;
        // SAFETY: a tensor has as many dimensions as its rank.
        let dims = unsafe { list(tensor.dims, tensor.rank)? };
        let dim = |dim: &i64| usize::try_from(*dim).map_err(|_| format!("a dimension of {dim}"));
        Ok(Operand {
            dtype: dtype(tensor.element),
            shape: dims.iter().map(dim).collect::<Result<_, _>>()?,
            address: tensor.data.expose_provenance(),
        })
    };
    kinds.iter().zip(values).map(operand).collect()
}

/// # Safety
/// The structure is one of a call frame of XLA, which lives for `'f`.
unsafe fn texts<'f>(attributes: &Attributes) -> Result<HashMap<&'f str, &'f str>, String> {
    let Attributes { count, .. } = *attributes;
    // SAFETY: XLA's lists of kinds, names and values have this length.
    let (kinds, names, values) = unsafe {
        (
            list(attributes.kinds, count)?,
            list(attributes.names, count)?,
            list(attributes.values, count)?,
        )
    };
    let text = |bytes: *const Bytes| {
        // SAFETY: names, and values of this kind, are bytes, or the pointer is null.
        let bytes = unsafe { bytes.as_ref() }.ok_or("XLA gives no text")?;
        // SAFETY: they have this length and live as long as the call frame.
        let bytes = unsafe { list(bytes.start, bytes.len as i64)? };
        str::from_utf8(bytes).map_err(|error| format!("XLA gives an invalid text: {error}"))
    };
    let mut found = HashMap::new();
    for ((kind, name), value) in kinds.iter().zip(names).zip(values) {
        if *kind == TEXT {
            found.insert(text(*name)?, text(value.cast())?);
        }
    }
    Ok(found)
}

/// Runs a handler. Returns the error that the call ends with, or null.
///
/// # Safety
/// XLA calls this, with a call frame that nobody else uses meanwhile.
unsafe fn enter(
    frame: *mut CallFrame,
    handler: fn(&mut Call<'_>) -> Result<(), String>,
) -> *mut XlaError {
    // SAFETY: by the contract, and the functions of XLA live as long as the process. The beginning
    // of both structures is the same in all versions.
    let api: &'static Api = unsafe { &*(*frame).api };
    // SAFETY: by the contract.
    let frame = unsafe { &mut *frame };
    let run = || {
        api.check(frame)?;
        // SAFETY: an extension is valid, or the pointer is null.
        if let Some(extension) = unsafe { frame.extensions.as_ref() }
            && extension.kind == METADATA
        {
            // SAFETY: an extension of this kind has a structure to fill in. It has our fields in
            // the versions that were checked.
            unsafe {
                let wanted = &mut *(*frame.extensions.cast::<MetadataExtension>()).metadata;
                wanted.version.major = api.version.major;
                wanted.version.minor = OLDEST_MINOR;
            }
            return Ok(());
        }
        // SAFETY: these are the parts of a call frame, whose sizes were checked.
        let (arguments, results, texts) = unsafe {
            (operands(&frame.arguments)?, operands(&frame.results)?, texts(&frame.attributes)?)
        };
        handler(&mut Call { arguments, results, texts, api, future: &mut frame.future })
    };
    // A panic must not reach C++.
    let ended = panic::catch_unwind(AssertUnwindSafe(run));
    match ended.unwrap_or_else(|_| Err("Gradwire panicked in a call of XLA".to_owned())) {
        Ok(()) => ptr::null_mut(),
        Err(why) => api.error(&why),
    }
}

/// What the calls do.
pub(crate) trait Handlers {
    /// Starts an operation.
    fn start(call: &mut Call<'_>) -> Result<(), String>;

    /// Waits for operations.
    fn done(call: &mut Call<'_>) -> Result<(), String>;
}

unsafe extern "C" fn start<H: Handlers>(frame: *mut CallFrame) -> *mut XlaError {
    // SAFETY: only XLA calls this function.
    unsafe { enter(frame, H::start) }
}

unsafe extern "C" fn done<H: Handlers>(frame: *mut CallFrame) -> *mut XlaError {
    // SAFETY: only XLA calls this function.
    unsafe { enter(frame, H::done) }
}

/// The handlers by their names, in capsules as `jax.ffi.register_ffi_target` expects them.
pub(crate) fn capsules<H: Handlers>(
    py: Python<'_>,
) -> PyResult<Vec<(&'static str, Bound<'_, PyAny>)>> {
    type Handler = unsafe extern "C" fn(*mut CallFrame) -> *mut XlaError;
    let capsule = |handler: Handler| {
        let name = c"xla._CUSTOM_CALL_TARGET".as_ptr();
        // SAFETY: the interpreter is attached; the pointer is that of a function, which lives as
        // long as the process, and so does the name. Nothing is to be freed.
        let made = unsafe { ffi::PyCapsule_New(handler as *mut c_void, name, None) };
        // SAFETY: a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, made) }
    };
    Ok(vec![("gradwire_start", capsule(start::<H>)?), ("gradwire_done", capsule(done::<H>)?)])
}
