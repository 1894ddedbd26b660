//! Requests of other commands to the launcher of an elastic job, over an abstract Unix socket.
//!
//! A request and its answer are lines of JSON. Only processes of the same user are answered
//! (TRUST), one at a time, and each for a limited time (WAIT, BOUND).

use std::{
    io::{self, ErrorKind},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener as Listener, UnixStream as Stream},
    },
    time::Duration,
};

use gradwire_services::launch::{from_line, to_line};
use rustix::process::geteuid;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::mpsc,
    time::{sleep, timeout},
};

use super::job::events::{Answer, Event, Request};
use crate::error::CommandError;

/// How long a request may take.
const LIMIT: Duration = Duration::from_secs(5);

/// The longest request or answer, in bytes.
const MAX_LINE: u64 = 4096;

/// The pause after an error of the system.
const PAUSE: Duration = Duration::from_millis(100);

fn address(job: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("gradwire-{job}-launcher"))
}

/// The socket of a job.
///
/// # Errors
/// An error of the system.
pub fn listen(job: &str) -> io::Result<UnixListener> {
    let listener = Listener::bind_addr(&address(job)?)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Passes requests on, and returns the answers that the launcher decides on.
pub async fn serve(
    listener: UnixListener,
    events: mpsc::Sender<Event>,
    mut answers: mpsc::Receiver<Answer>,
) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        let user = stream.peer_cred().map(|peer| peer.uid());
        if user.is_ok_and(|user| user == geteuid().as_raw()) {
            // A client that is too slow gets no answer.
            let _ = timeout(LIMIT, answer(stream, &events, &mut answers)).await;
        }
    }
}

async fn answer(
    stream: UnixStream,
    events: &mpsc::Sender<Event>,
    answers: &mut mpsc::Receiver<Answer>,
) -> io::Result<()> {
    // An answer that came too late is for an earlier client.
    while answers.try_recv().is_ok() {}
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    BufReader::new(read.take(MAX_LINE)).read_line(&mut line).await?;
    let answer: Answer = match from_line(&line) {
        Ok(request) => {
            events.send(Event::Requested(request)).await.map_err(io::Error::other)?;
            answers.recv().await.unwrap_or_else(|| Err("the job has ended".to_owned()))
        }
        Err(error) => Err(error.to_string()),
    };
    write.write_all(to_line(&answer).as_bytes()).await
}

/// How long a command waits for its answer.
const PATIENCE: Duration = LIMIT.saturating_mul(2);

/// Sends a request to the launcher of a job, and waits for its answer.
///
/// # Errors
/// [`CommandError`] if the launcher does not answer: the job has ended, is not elastic, or its
/// launcher is stopped.
pub fn ask(job: &str, request: &Request) -> Result<Answer, CommandError> {
    exchange(&address(job).map_err(|error| CommandError::system(&error))?, request, PATIENCE)
        .map_err(|error| no_answer(job, &error))
}

fn exchange(at: &SocketAddr, request: &Request, patience: Duration) -> io::Result<Answer> {
    use std::io::{BufRead, Read, Write};
    let mut stream = Stream::connect_addr(at)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(to_line(request).as_bytes())?;
    let mut line = String::new();
    io::BufReader::new(stream.take(MAX_LINE)).read_line(&mut line)?;
    from_line(&line).map_err(io::Error::other)
}

fn no_answer(job: &str, error: &io::Error) -> CommandError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            let seconds = PATIENCE.as_secs();
            CommandError::failed(format!(
                "the launcher of job {job} has not answered within {seconds} s"
            ))
            .hint("see whether its process is stopped (SIGSTOP), and try again")
        }
        ErrorKind::ConnectionRefused => {
            CommandError::failed(format!("job {job} takes no requests"))
                .hint("only elastic jobs can be changed: --min-np")
        }
        _ => CommandError::failed(format!("the launcher of job {job} does not answer: {error}"))
            .hint("see whether the job has ended meanwhile"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_launcher_is_told_from_none() {
        let request = Request::Drain { host: "a".to_owned() };
        let at = address(&format!("test-{}", std::process::id())).unwrap();
        let ask = || exchange(&at, &request, Duration::from_millis(50)).unwrap_err();
        let none = no_answer("gw1", &ask());
        assert_eq!(none.what, "job gw1 takes no requests");
        let _listener = Listener::bind_addr(&at).unwrap();
        let silent = no_answer("gw1", &ask());
        assert_eq!(silent.what, "the launcher of job gw1 has not answered within 10 s");
    }
}
