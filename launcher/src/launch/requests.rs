//! Requests of other commands to the launcher of an elastic job, over an abstract Unix socket.
//!
//! A request and its answer are lines of JSON. Only processes of the same user are answered
//! (TRUST), one at a time, and each for a limited time (WAIT, BOUND).

use std::{
    io,
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
            events.send(Event::Asked(request)).await.map_err(io::Error::other)?;
            answers.recv().await.unwrap_or_else(|| Err("the job has ended".to_owned()))
        }
        Err(error) => Err(error.to_string()),
    };
    write.write_all(to_line(&answer).as_bytes()).await
}

/// Sends a request to the launcher of a job, and waits for its answer.
///
/// # Errors
/// An error of the system if the job has ended, or is not elastic.
pub fn ask(job: &str, request: &Request) -> io::Result<Answer> {
    use std::io::{BufRead, Read, Write};
    let mut stream = Stream::connect_addr(&address(job)?)?;
    stream.set_read_timeout(Some(2 * LIMIT))?;
    stream.write_all(to_line(request).as_bytes())?;
    let mut line = String::new();
    io::BufReader::new(stream.take(MAX_LINE)).read_line(&mut line)?;
    from_line(&line).map_err(io::Error::other)
}
