//! Safe wrappers of `shim.cpp`: hooks on gradients, and tensors that own shared memory.

use std::{
    ffi::{CStr, c_char, c_void},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::{self, NonNull},
    sync::Arc,
};

use gradwire_worker::SharedBuffer;
use tch::{TchError, Tensor};
use torch_sys::C_tensor;

type Call = extern "C" fn(*mut c_void);
type Result<T> = std::result::Result<T, TchError>;

#[expect(unsafe_code, reason = "the functions of shim.cpp")]
// SAFETY: the declarations match shim.cpp. `C_tensor` is torch-sys' name for `at::Tensor`.
unsafe extern "C" {
    fn gradwire_forget(text: *mut c_char);
    fn gradwire_watch(
        parameter: *const C_tensor,
        context: *mut c_void,
        run: Call,
        drop: Call,
        watch: *mut *mut c_void,
    ) -> *mut c_char;
    fn gradwire_unwatch(watch: *mut c_void);
    fn gradwire_is_watched(parameter: *const C_tensor, watch: *const c_void) -> bool;
    fn gradwire_tensor(
        data: *mut c_void,
        like: *const C_tensor,
        owner: *mut c_void,
        drop: Call,
        made: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn gradwire_set_gradient(parameter: *const C_tensor, gradient: *const C_tensor) -> *mut c_char;
    fn gradwire_is_alone(tensor: *const C_tensor) -> bool;
}

/// The result of a call that returned this text.
fn checked(text: *mut c_char) -> Result<()> {
    if text.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a string with a terminating zero, which only this function
    // frees, after copying it.
    #[expect(unsafe_code, reason = "the text is a C string")]
    let text = unsafe {
        let words = CStr::from_ptr(text).to_string_lossy().into_owned();
        gradwire_forget(text);
        words
    };
    Err(TchError::Torch(text))
}

type Watcher = Box<dyn Fn() + Send + Sync>;

/// A function that runs whenever a backward pass has added to a parameter's gradient, on the thread
/// of that pass.
pub(crate) struct Hook {
    watch: NonNull<c_void>,
    /// The function has a weak reference to it.
    _alive: Arc<()>,
}

impl Hook {
    /// Registers a function. Its panics are caught. It is not called after the hook was dropped,
    /// even if a graph still keeps it: there may be another hook by then.
    ///
    /// # Errors
    /// If the tensor takes no gradients.
    pub(crate) fn new(
        parameter: &Tensor,
        watcher: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
        let alive = Arc::new(());
        let hook = Arc::downgrade(&alive);
        let watcher = move || {
            if hook.strong_count() > 0 {
                watcher();
            }
        };
        let context = Box::into_raw(Box::new(Box::new(watcher) as Watcher));
        let mut watch = ptr::null_mut();
        // SAFETY: the parameter lives during the call. The shim owns the context: it passes it to
        // `run`, and in the end once to `drop_watcher`, also if it fails. A successful call writes
        // `watch`.
        #[expect(unsafe_code, reason = "the shim is C++")]
        let text = unsafe {
            gradwire_watch(parameter.as_ptr(), context.cast(), run, drop_watcher, &mut watch)
        };
        checked(text)?;
        NonNull::new(watch)
            .map(|watch| Self { watch, _alive: alive })
            .ok_or_else(|| TchError::Torch("the hook was not registered".into()))
    }

    /// Whether it still sees this parameter's gradients. Changing the element type or device of a
    /// parameter removes its hooks.
    pub(crate) fn sees(&self, parameter: &Tensor) -> bool {
        // SAFETY: both live during the call, which changes neither.
        #[expect(unsafe_code, reason = "the shim is C++")]
        unsafe {
            gradwire_is_watched(parameter.as_ptr(), self.watch.as_ptr())
        }
    }
}

// SAFETY: `watch` is a counted reference to a node of autograd. Its count is atomic, and it is not
// used in any other way.
#[expect(unsafe_code, reason = "raw pointers are not Send")]
unsafe impl Send for Hook {}

impl Drop for Hook {
    fn drop(&mut self) {
        // A graph that is still alive may keep the node, and with it the function.
        // SAFETY: `gradwire_watch` made `watch`, and it is released only here, once.
        #[expect(unsafe_code, reason = "the shim is C++")]
        unsafe {
            gradwire_unwatch(self.watch.as_ptr());
        }
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hook").finish_non_exhaustive()
    }
}

extern "C" fn run(context: *mut c_void) {
    // SAFETY: the context of `Hook::new`, which the shim keeps until it calls `drop_watcher`.
    // Several threads may be here at once: the function is `Sync`.
    #[expect(unsafe_code, reason = "the context went through C++")]
    let watcher = unsafe { &*context.cast::<Watcher>() };
    // A panic is reported by the lock that it poisons.
    let _ = catch_unwind(AssertUnwindSafe(watcher));
}

extern "C" fn drop_watcher(context: *mut c_void) {
    // SAFETY: the context of `Hook::new`, which the shim drops once.
    #[expect(unsafe_code, reason = "the context went through C++")]
    drop(unsafe { Box::from_raw(context.cast::<Watcher>()) });
}

extern "C" fn drop_memory(owner: *mut c_void) {
    // SAFETY: the owner of `tensor_over`, which the shim drops once.
    #[expect(unsafe_code, reason = "the owner went through C++")]
    drop(unsafe { Box::from_raw(owner.cast::<SharedBuffer>()) });
}

/// A contiguous tensor over shared memory, which it keeps allocated, with the shape and the element
/// type of `like`.
///
/// # Errors
/// If the memory has another size, and errors of libtorch.
pub(crate) fn tensor_over(memory: SharedBuffer, like: &Tensor) -> Result<Tensor> {
    let bytes = like.numel() * like.kind().elt_size_in_bytes();
    if bytes != memory.byte_len() {
        let text = format!("the tensor has {bytes} bytes, the memory {}", memory.byte_len());
        return Err(TchError::Shape(text));
    }
    let data = memory.as_ptr();
    let owner = Box::into_raw(Box::new(memory));
    let mut made = ptr::null_mut();
    // SAFETY: the memory is as long as the tensor, as checked above, aligned for every element
    // type, and stays mapped while its owner lives. The shim drops the owner with the tensor's
    // storage, or at once if it fails. Nobody else owns the new tensor.
    #[expect(unsafe_code, reason = "tch has no tensors that own external memory")]
    let made = unsafe {
        let text =
            gradwire_tensor(data.cast(), like.as_ptr(), owner.cast(), drop_memory, &mut made);
        checked(text)?;
        Tensor::from_ptr(made)
    };
    Ok(made)
}

/// Makes a tensor the gradient of a parameter; `None` removes the gradient.
///
/// # Errors
/// If the tensor has another shape, element type or device.
pub(crate) fn set_gradient(parameter: &Tensor, gradient: Option<&Tensor>) -> Result<()> {
    let gradient = gradient.map_or(ptr::null(), Tensor::as_ptr);
    // SAFETY: both live during the call; libtorch counts its own reference to the gradient.
    #[expect(unsafe_code, reason = "tch can't set gradients")]
    checked(unsafe { gradwire_set_gradient(parameter.as_ptr(), gradient) })
}

/// Whether there are no other references to this tensor or its memory.
pub(crate) fn is_alone(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is defined and lives during the call.
    #[expect(unsafe_code, reason = "tch does not expose reference counts")]
    unsafe {
        gradwire_is_alone(tensor.as_ptr())
    }
}
