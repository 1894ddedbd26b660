//! Where the tasks of a host meet before they are ranks: a socket in the abstract namespace, which
//! the first task's service opens and which leaves nothing behind (CLEAN).
//!
//! A task sends its process id and reads the answer: `+` and the variables of the job, or `-` and
//! what went wrong. Anyone on the host can open a socket of that name, so both sides look at the
//! user of the other one before they send or believe anything (TRUST).

use std::{
    io::{self, ErrorKind},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream},
    },
    time::Duration,
};

use gradwire_proto::JobId;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    time::{Instant, sleep, timeout, timeout_at},
};

/// How long a task may take to send its number once it is connected.
const GREETING: Duration = Duration::from_secs(5);

/// The pause between two attempts to find the meeting.
const PAUSE: Duration = Duration::from_millis(20);

/// The most bytes of an answer (BOUND).
const MAX_ANSWER: u64 = 64 << 10;

/// What a task gets: the variables of the job, or what went wrong.
pub(super) type Answer = Result<String, String>;

/// The host with number `node` of a job.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) job: JobId,
    pub(super) node: u32,
}

impl Place {
    fn address(&self) -> io::Result<SocketAddr> {
        let (Self { job, node }, user) = (self, rustix::process::getuid().as_raw());
        SocketAddr::from_abstract_name(format!("gradwire-join-{user}-{job}-{node}"))
    }
}

/// Whether the process at the other end belongs to this user, or to root.
fn is_own(stream: &UnixStream) -> bool {
    let own = rustix::process::getuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}

/// The meeting of a host, for the service of its first task.
#[derive(Debug)]
pub(super) struct Meeting(UnixListener);

impl Meeting {
    /// Opens it.
    pub(super) fn open(place: &Place) -> io::Result<Self> {
        let listener = StdListener::bind_addr(&place.address()?)?;
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener).map(Self)
    }

    /// Waits for the next task, and answers it. Returns its process id. Cancel-safe: a task whose
    /// connection ends asks again.
    pub(super) async fn next(&self, answer: &Answer) -> u32 {
        loop {
            let Ok((mut stream, _)) = self.0.accept().await else {
                sleep(PAUSE).await;
                continue;
            };
            if !is_own(&stream) {
                continue;
            }
            if let Ok(Ok(pid)) = timeout(GREETING, give(&mut stream, answer)).await {
                return pid;
            }
        }
    }
}

async fn give(stream: &mut UnixStream, answer: &Answer) -> io::Result<u32> {
    let pid = stream.read_u32_le().await?;
    let (sign, text) = match answer {
        Ok(text) => (b'+', text),
        Err(text) => (b'-', text),
    };
    stream.write_u8(sign).await?;
    stream.write_all(text.as_bytes()).await?;
    stream.shutdown().await?;
    Ok(pid)
}

/// Asks the meeting for the job of the task with this process id, until there is an answer or
/// `limit` has passed. `None`: nobody has answered.
pub(super) async fn ask(place: &Place, pid: u32, limit: Duration) -> io::Result<Option<Answer>> {
    let deadline = Instant::now() + limit;
    let address = place.address()?;
    while Instant::now() < deadline {
        match timeout_at(deadline, ask_once(&address, pid)).await {
            Ok(Ok(Some(answer))) => return Ok(Some(answer)),
            // The service has not opened it yet, or has just ended.
            Ok(Ok(None)) => sleep(PAUSE).await,
            Ok(Err(error)) if is_not_there(&error) => sleep(PAUSE).await,
            Ok(Err(error)) => return Err(error),
            Err(_) => {}
        }
    }
    Ok(None)
}

fn is_not_there(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionRefused
            | ErrorKind::ConnectionReset
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof
            | ErrorKind::NotFound
            | ErrorKind::WouldBlock
    )
}

async fn ask_once(address: &SocketAddr, pid: u32) -> io::Result<Option<Answer>> {
    let stream = StdStream::connect_addr(address)?;
    stream.set_nonblocking(true)?;
    let mut stream = UnixStream::from_std(stream)?;
    if !is_own(&stream) {
        let what = "another user's process has opened this host's meeting of the job";
        return Err(io::Error::new(ErrorKind::PermissionDenied, what));
    }
    stream.write_u32_le(pid).await?;
    let mut text = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut text).await?;
    let Some(sign) = text.chars().next() else { return Ok(None) };
    let rest = text[sign.len_utf8()..].to_owned();
    Ok(Some(if sign == '+' { Ok(rest) } else { Err(rest) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> Place {
        let job = JobId::new(&format!("meeting-{name}-{}", std::process::id())).unwrap();
        Place { job, node: 3 }
    }

    #[tokio::test]
    async fn tasks_wait_for_the_first_one() {
        let place = place("late");
        let asked = tokio::spawn({
            let place = place.clone();
            async move { ask(&place, 7, Duration::from_secs(20)).await }
        });
        sleep(3 * PAUSE).await;
        assert!(!asked.is_finished());
        let meeting = Meeting::open(&place).unwrap();
        // A task that ends before it has said anything changes nothing.
        drop(StdStream::connect_addr(&place.address().unwrap()).unwrap());
        assert_eq!(meeting.next(&Ok("A=1\n".to_owned())).await, 7);
        assert_eq!(asked.await.unwrap().unwrap(), Some(Ok("A=1\n".to_owned())));
        let asking = ask(&place, 8, Duration::from_secs(20));
        let refused = Err("no port".to_owned());
        let (pid, answer) = tokio::join!(meeting.next(&refused), asking);
        assert_eq!((pid, answer.unwrap()), (8, Some(refused)));
        assert!(Meeting::open(&place).is_err(), "there is one meeting");
    }

    #[tokio::test]
    async fn nobody_answers() {
        let answer = ask(&place("nobody"), 7, Duration::from_millis(100)).await;
        assert_eq!(answer.unwrap(), None);
    }
}
