//! How long each step may take (WAIT), and how much it may send (BOUND).
//!
//! With eight hosts that answer there are seven rounds, so the whole takes about five seconds. If
//! some don't answer, the steps take their limits: `START` + `FACTS` + `CONNECT`, and `ROUND` seven
//! times.

use std::time::Duration;

/// How long a host may take to answer for the first time; `launch.start_timeout_ms` if that is
/// less.
pub const START: Duration = Duration::from_secs(8);

/// How long a host may take to report its facts.
pub const FACTS: Duration = Duration::from_secs(4);

/// How long each program that an agent asks may take. Less than [`FACTS`], which waits for it.
pub const PROGRAM: Duration = Duration::from_secs(3);

/// How long a connection may take, with its handshake; `data.connect_timeout_ms` if that is less.
/// The system repeats a packet that was lost after one second.
pub const CONNECT: Duration = Duration::from_secs(2);

/// How long the answer to a datagram may take before it is sent again.
pub const DATAGRAM: Duration = Duration::from_millis(200);

/// How long the launcher waits beyond the limit of an agent, for its answer.
pub const MARGIN: Duration = Duration::from_millis(500);

/// How long a pair may send small messages to measure the latency.
pub const LATENCY: Duration = Duration::from_millis(100);

/// How many of them count; those before are not counted.
pub const PINGS: usize = 200;

/// How many are sent before.
pub const WARM_UP: usize = 5;

/// How long the answer to a small message may take.
pub const PING: Duration = Duration::from_secs(1);

/// A message of many packets of the largest size, in bytes.
pub const LARGE: usize = 64 << 10;

/// How long such a message may take, there and back. A line of 10 Mbit/s needs a ninth of that.
pub const LARGE_WAIT: Duration = Duration::from_secs(1);

/// How long a pair sends as fast as it can.
pub const SENDING: Duration = Duration::from_millis(300);

/// How long what was sent may take to arrive. What arrives later is not counted.
pub const ARRIVING: Duration = Duration::from_millis(700);

/// How much a pair sends at most in each direction, in bytes.
pub const MAX_SENT: u64 = 2 << 30;

/// How many connections a pair opens at most; a job may have more.
pub const MAX_STREAMS: u32 = 16;

/// How long all measurements of a pair may take.
pub const ROUND: Duration = Duration::from_secs(4);

/// How many connections an agent accepts at a time; strangers are among them.
pub const MAX_ACCEPTED: usize = 512;

/// How often the clock of a host is read.
pub const CLOCKS: usize = 5;

/// How long an agent lives at most, whatever happens to its launcher.
pub const LIFE: Duration = Duration::from_secs(300);

/// How long an agent may take to end after it was asked to, before it is killed.
pub const END: Duration = Duration::from_secs(1);
