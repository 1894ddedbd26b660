//! Every collective through the public API, with ranks as threads and a fake daemon that has a real
//! socket and real shared memory.

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "../fake/mod.rs"]
mod fake;

mod composite;
mod errors;
mod finite;
mod gates;
mod messages;
mod plain;
mod sets;

use std::thread;

use fake::FakeDaemon;
use gradwire_worker::{GradwireError, Session, SessionBuilder};

/// Runs `body` as each rank of a job.
fn ranks(size: u32, body: impl Fn(Session) + Sync) {
    ranks_with(size, |_, builder| builder, body);
}

/// Like [`ranks`], with settings for each rank.
fn ranks_with(
    size: u32,
    settings: impl Fn(u32, SessionBuilder) -> SessionBuilder,
    body: impl Fn(Session) + Sync,
) {
    let daemon = FakeDaemon::start(size);
    thread::scope(|scope| {
        for rank in 0..size {
            let builder = settings(rank, daemon.rank(rank));
            let body = &body;
            scope.spawn(move || {
                let session = builder.attach().unwrap();
                body(session.clone());
                // Without it, dropping the session would be a failure.
                let _ = session.shutdown();
            });
        }
    });
}

/// The text of an expected error.
fn text<T>(result: Result<T, impl Into<GradwireError>>) -> String {
    match result {
        Ok(_) => panic!("no error"),
        Err(error) => error.into().to_string(),
    }
}
