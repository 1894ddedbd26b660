//! Statistics of TCP connections, an option that no safe library sets, and sends from memory that
//! others may change. Linux only.
//!
//! - [`interfaces`]: which network of a host carries the data
//!
//! Callers decide how long a connection may make no progress.

pub mod interfaces;

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

/// `TCP_RTO_MAX_MS` of Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// The range of that option, in milliseconds.
const RTO_MAX_MS: std::ops::RangeInclusive<u128> = 1000..=120_000;

/// Limits the time between two retransmissions of unacknowledged data to `max`, which is between
/// one second and two minutes. By default the system doubles this time up to two minutes, so after
/// an outage a connection may make no progress for about as long as the outage was. An accepted
/// connection has the value of its listener.
///
/// # Errors
/// If the system doesn't support it (before Linux 6.15), or if `socket` is not a TCP socket.
pub fn limit_retransmission_interval(socket: &impl AsFd, max: Duration) -> io::Result<()> {
    let max = max.as_millis().clamp(*RTO_MAX_MS.start(), *RTO_MAX_MS.end()) as libc::c_int;
    // SAFETY: the option's value is one int, which lives until the call returns.
    let failed = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            TCP_RTO_MAX_MS,
            (&raw const max).cast(),
            size_of_val(&max) as libc::socklen_t,
        )
    };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How many bytes written to a TCP socket the peer's system has not acknowledged, including bytes
/// that are not sent yet.
///
/// # Errors
/// If `socket` is not a connected TCP socket.
pub fn unacknowledged(socket: &impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which has the number of TIOCOUTQ, writes one int.
    let failed = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if failed == 0 { Ok(bytes.unsigned_abs().into()) } else { Err(io::Error::last_os_error()) }
}

/// Statistics of the path of a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// The smoothed round-trip time; zero before the first one.
    pub round_trip: Duration,
    /// The packets that were sent, including those sent again. The count wraps.
    pub packets: u32,
    /// The packets that were sent again. The count wraps.
    pub retransmits: u32,
}

/// The path of a TCP connection, from `TCP_INFO`.
///
/// # Errors
/// If `socket` is not a TCP socket.
pub fn path(socket: &impl AsFd) -> io::Result<Path> {
    let info = info(socket)?;
    Ok(Path {
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        packets: info.tcpi_segs_out,
        retransmits: info.tcpi_total_retrans,
    })
}

/// For how long the peer's system has not answered packets or probes, without the time that an
/// answer takes. Zero if it has answered, even if the peer reads nothing.
///
/// # Errors
/// If `socket` is not a TCP socket.
pub fn unanswered(socket: &impl AsFd) -> io::Result<Duration> {
    let info = info(socket)?;
    let has_asked = info.tcpi_retransmits > 0 || info.tcpi_probes > 0;
    let since = Duration::from_millis(info.tcpi_last_ack_recv.into());
    let trips = Duration::from_micros(info.tcpi_rtt.into()) * 4;
    Ok(if has_asked { since.saturating_sub(trips) } else { Duration::ZERO })
}

fn info(socket: &impl AsFd) -> io::Result<libc::tcp_info> {
    // SAFETY: all of its fields are numbers, for which zero is valid. An older system fills only a
    // part, and the rest stays zero.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the system writes at most `length` bytes to `info`, which lives until the call
    // returns.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if failed == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

/// Bytes to send, of a slice or of shared memory, which others may change meanwhile. Only the
/// system reads them.
#[derive(Debug, Clone, Copy)]
pub struct Bytes<'a> {
    start: *const u8,
    length: usize,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(slice: &'a [u8]) -> Self {
        Self { start: slice.as_ptr(), length: slice.len(), memory: PhantomData }
    }
}

impl Bytes<'_> {
    /// The bytes at an address.
    ///
    /// # Safety
    /// The memory stays mapped and readable for the lifetime. Others may write to it.
    pub unsafe fn at(start: *const u8, length: usize) -> Self {
        Self { start, length, memory: PhantomData }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

/// Writes a header and a payload to a socket, with one system call. Returns how many bytes were
/// written. A closed connection is an error and raises no signal.
///
/// # Errors
/// As `sendmsg(2)`.
pub fn send(socket: &impl AsFd, header: &[u8], payload: Bytes<'_>) -> io::Result<usize> {
    let part = |start: *const u8, length| libc::iovec {
        iov_base: start.cast_mut().cast(),
        iov_len: length,
    };
    let mut parts = [part(header.as_ptr(), header.len()), part(payload.start, payload.length)];
    // SAFETY: all of its fields are numbers and pointers, for which zero is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    // SAFETY: `message` and its two parts live until the call returns. The system only reads them:
    // a slice, and memory that stays readable by the contract of `Bytes`.
    let written = unsafe {
        libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        thread::sleep,
    };

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (here, listener.accept().unwrap().0)
    }

    /// Waits until the system reports the expected number, which may take a while.
    fn until(socket: &TcpStream, expected: impl Fn(u64) -> bool) -> u64 {
        for _ in 0..5000 {
            let bytes = unacknowledged(socket).unwrap();
            if expected(bytes) {
                return bytes;
            }
            sleep(Duration::from_millis(1));
        }
        panic!("{} bytes are not acknowledged", unacknowledged(socket).unwrap());
    }

    #[test]
    fn bytes_without_room_are_not_acknowledged() {
        let (mut here, mut there) = pair();
        here.write_all(&[0; 1000]).unwrap();
        until(&here, |bytes| bytes == 0);
        here.set_nonblocking(true).unwrap();
        let mut written = 1000;
        while let Ok(more) = here.write(&[0; 65536]) {
            written += more;
        }
        until(&here, |bytes| bytes > 0);
        there.read_exact(&mut vec![0; written]).unwrap();
        until(&here, |bytes| bytes == 0);
    }

    /// What a system has acknowledged, its process can read after a reset. The other system still
    /// says how much that is.
    #[test]
    fn acknowledged_bytes_are_read_after_a_reset() {
        let (mut here, mut there) = pair();
        here.set_nonblocking(true).unwrap();
        let mut written = 0;
        while let Ok(more) = here.write(&[0; 65536]) {
            written += more as u64;
        }
        let mut missing = until(&here, |bytes| bytes > 0);
        loop {
            sleep(Duration::from_millis(100));
            let before = std::mem::replace(&mut missing, unacknowledged(&here).unwrap());
            if before == missing {
                break;
            }
        }
        // Its peer gets a reset. One port is not enough: the system may give it to a connection of
        // another test with another peer.
        let [own, peer] = [here.local_addr(), here.peer_addr()].map(|at| at.unwrap().to_string());
        let words = ["-H", "-K", "-tn", "state", "established", "src", &own, "dst", &peer];
        let broken = std::process::Command::new("ss").args(words).output();
        if !broken.is_ok_and(|output| output.stdout.contains(&b'\n')) {
            println!("skipped: connections can't be broken here");
            return;
        }
        assert_eq!(unacknowledged(&here).unwrap(), missing);
        let mut read = Vec::new();
        let end = there.read_to_end(&mut read).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
        assert_eq!(read.len() as u64, written - missing);
    }

    #[test]
    fn a_path_has_a_round_trip_and_packets() {
        let (mut here, mut there) = pair();
        let before = path(&here).unwrap();
        here.write_all(&[0; 1000]).unwrap();
        there.read_exact(&mut [0; 1000]).unwrap();
        until(&here, |bytes| bytes == 0);
        let after = path(&here).unwrap();
        assert!(after.packets > before.packets, "{before:?} {after:?}");
        assert!(after.round_trip > Duration::ZERO, "{after:?}");
        assert!(after.retransmits < after.packets, "{after:?}");
    }

    #[test]
    fn a_header_and_its_payload_are_sent_together() {
        let (here, mut there) = pair();
        let payload: Vec<u8> = (0..200).collect();
        for (header, payload) in
            [(&b"head"[..], &payload[..]), (&b""[..], &payload[7..]), (b"x", b"")]
        {
            let bytes = Bytes::from(payload);
            assert_eq!((bytes.len(), bytes.is_empty()), (payload.len(), payload.is_empty()));
            let wanted = [header, payload].concat();
            assert_eq!(send(&here, header, bytes).unwrap(), wanted.len());
            let mut read = vec![0; wanted.len()];
            there.read_exact(&mut read).unwrap();
            assert_eq!(read, wanted);
        }
        here.set_nonblocking(true).unwrap();
        let full = loop {
            match send(&here, b"", Bytes::from(&[7; 1 << 16][..])) {
                Ok(written) => assert!(written <= 1 << 16),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop(there);
        let gone = (0..5000).find_map(|_| {
            sleep(Duration::from_millis(1));
            send(&here, b"x", Bytes::from(&[][..])).err().filter(|e| e.kind() != full.kind())
        });
        assert!(gone.is_some(), "no error and no signal");
    }

    #[test]
    fn other_files_are_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(unacknowledged(&file).is_err());
        assert!(path(&file).is_err());
        assert!(limit_retransmission_interval(&file, Duration::from_secs(1)).is_err());
    }

    #[test]
    fn the_interval_is_set_where_it_is_supported() {
        let (here, _there) = pair();
        for most in [0, 1, 4, 1000].map(Duration::from_secs) {
            match limit_retransmission_interval(&here, most) {
                Ok(()) => {}
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOPROTOOPT)),
            }
        }
    }
}
