//! How long each step may take (WAIT), and how much it may send (BOUND).
//!
//! Eight hosts that answer have seven rounds, which take about five seconds in all. If some don't
//! answer, the steps take their limits: `START` + `FACTS` + `CONNECT`, and `ROUND` seven times.

use std::time::Duration;

/// How long a host may take for its first answer; `launch.start_timeout_ms` if that is less.
pub const START: Duration = Duration::from_secs(8);

/// How long a host may take to report its facts.
pub const FACTS: Duration = Duration::from_secs(4);

/// How long each program that an agent runs may take. Less than [`FACTS`], which includes it.
pub const PROGRAM: Duration = Duration::from_secs(3);

/// How long a connection may take, with its handshake; `data.connect_timeout_ms` if that is less.
/// The system repeats a lost packet after one second.
pub const CONNECT: Duration = Duration::from_secs(2);

/// How long the answer to a datagram may take before it is sent again.
pub const DATAGRAM: Duration = Duration::from_millis(200);

/// How much longer than an agent's limit the launcher waits for its answer.
pub const MARGIN: Duration = Duration::from_millis(500);

/// How long a pair may measure the latency with small messages.
pub const LATENCY: Duration = Duration::from_millis(100);

/// How many small messages count.
pub const PINGS: usize = 200;

/// How many small messages before these don't count.
pub const WARM_UP: usize = 5;

/// How long the answer to a small message may take.
pub const PING: Duration = Duration::from_secs(1);

/// The size of the large message, which needs many packets of the largest size, in bytes.
pub const LARGE: usize = 64 << 10;

/// How long the large message may take there and back. A line of 10 Mbit/s needs a ninth of that.
pub const LARGE_WAIT: Duration = Duration::from_secs(1);

/// How long a pair sends as fast as it can.
pub const SENDING: Duration = Duration::from_millis(300);

/// How long sent bytes may take to arrive. Later ones are not counted.
pub const ARRIVING: Duration = Duration::from_millis(700);

/// The most bytes that a pair sends in each direction.
pub const MAX_SENT: u64 = 2 << 30;

/// The most connections of a pair; a job may have more.
pub const MAX_STREAMS: u32 = 16;

/// How long all measurements of a pair may take.
pub const ROUND: Duration = Duration::from_secs(4);

/// How many interfaces an agent offers (BOUND).
pub const MAX_OFFERS: usize = 16;

/// How many connections an agent accepts at a time, including connections from strangers.
pub const MAX_ACCEPTED: usize = 512;

/// How many times the clock of a host is read.
pub const CLOCKS: usize = 5;

/// The longest life of an agent, whatever happens to its launcher.
pub const LIFE: Duration = Duration::from_secs(300);

/// How long an agent may take to end after it was asked to, before it is killed.
pub const END: Duration = Duration::from_secs(1);
