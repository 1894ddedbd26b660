//! A thread with a reactor of its own, for work that must not wait for the rest of a process.

use std::{io, thread};

use tokio::runtime::{Builder, Runtime};

/// Starts a thread that does `work`, and ends with it.
///
/// # Errors
/// The system refuses a descriptor or the thread.
pub fn start<W, F>(name: &str, work: W) -> io::Result<()>
where
    W: FnOnce() -> F + Send + 'static,
    F: Future<Output = ()>,
{
    let reactor = Reactor(Some(Builder::new_current_thread().enable_all().build()?));
    let run = move || {
        if let Some(runtime) = &reactor.0 {
            runtime.block_on(work());
        }
    };
    thread::Builder::new().name(name.to_owned()).spawn(run)?;
    Ok(())
}

/// Ends without waiting for anything. A runtime that waits panics if it is dropped by another one,
/// which is what happens when the system refuses the thread.
#[derive(Debug)]
struct Reactor(Option<Runtime>);

impl Drop for Reactor {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_runs_on_a_thread_of_its_own() {
        let (say, said) = tokio::sync::oneshot::channel();
        start("gw-test", move || async move {
            let _ = say.send(thread::current().name().map(str::to_owned));
        })
        .unwrap();
        assert_eq!(said.await.unwrap().as_deref(), Some("gw-test"));
    }

    #[tokio::test]
    async fn a_reactor_without_a_thread_can_be_dropped() {
        drop(Reactor(Some(Builder::new_current_thread().enable_all().build().unwrap())));
    }
}
