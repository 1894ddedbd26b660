//! The numbered messages of a node stream, so that another stream can continue where a broken one
//! ended. Pure.
//!
//! Both ends count what they send and receive after the handshake, beginning with 1, so a message
//! carries no number. A sender keeps each message until the receiver's count, which comes with its
//! heartbeats, shows that it has arrived. A new stream begins with the counts of both receivers,
//! and each sender continues with the next message. So each message arrives once, and in order.
//!
//! What is kept is limited (BOUND). A receiver therefore tells its count after each [`TOLD_EVERY`]
//! messages at the latest.

use std::{collections::VecDeque, fmt};

/// The most messages that are kept.
pub const MAX_KEPT: usize = 1 << 16;

/// The most bytes of the messages that are kept, without the last one.
pub const MAX_KEPT_BYTES: usize = 64 << 20;

/// A receiver tells its count after this many messages, or with its next heartbeat.
pub const TOLD_EVERY: u64 = 256;

/// A count of received messages that can't be right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImpossibleCount {
    /// The count.
    pub received: u64,
    /// The count before, which can't become smaller.
    pub confirmed: u64,
    /// How many messages were sent.
    pub sent: u64,
}

impl fmt::Display for ImpossibleCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { received, confirmed, sent } = self;
        write!(f, "it counts {received} received messages, but must have {confirmed} to {sent}")
    }
}

/// The messages to one receiver that it may not have.
#[derive(Debug)]
pub struct Sent<M> {
    /// In order, with their bytes.
    messages: VecDeque<(M, usize)>,
    bytes: usize,
    /// How many messages have arrived. They are forgotten.
    confirmed: u64,
    /// How many of `messages` were sent on the current stream.
    sent: usize,
    /// Whether messages are kept until they have arrived.
    remembers: bool,
}

impl<M> Sent<M> {
    /// Nothing sent yet. Another stream can continue only if it `remembers` messages.
    pub fn new(remembers: bool) -> Self {
        Self { messages: VecDeque::new(), bytes: 0, confirmed: 0, sent: 0, remembers }
    }

    /// Whether messages are kept until they have arrived.
    pub fn remembers(&self) -> bool {
        self.remembers
    }

    /// Adds a message of this many bytes.
    pub fn push(&mut self, message: M, bytes: usize) {
        self.bytes += bytes;
        self.messages.push_back((message, bytes));
    }

    /// The message to send next on the current stream.
    pub fn next_to_send(&mut self) -> Option<M>
    where
        M: Clone,
    {
        let (message, _) = self.messages.get(self.sent)?;
        if self.remembers {
            self.sent += 1;
            return Some(message.clone());
        }
        let (message, bytes) = self.messages.pop_front()?;
        self.bytes -= bytes;
        self.confirmed += 1;
        Some(message)
    }

    /// How many messages have not been sent on the current stream.
    pub fn waiting(&self) -> usize {
        self.messages.len() - self.sent
    }

    /// How many messages are kept.
    pub fn kept(&self) -> usize {
        self.messages.len()
    }

    /// Whether more is kept than is allowed (BOUND).
    pub fn is_full(&self) -> bool {
        self.messages.len() >= MAX_KEPT || self.bytes >= MAX_KEPT_BYTES
    }

    /// Forgets what has arrived: the receiver has `received` messages.
    ///
    /// # Errors
    /// [`ImpossibleCount`] if it can't have as many, or must have more.
    pub fn confirm(&mut self, received: u64) -> Result<(), ImpossibleCount> {
        let Self { confirmed, .. } = *self;
        let sent = confirmed + self.sent as u64;
        if !(confirmed..=sent).contains(&received) {
            return Err(ImpossibleCount { received, confirmed, sent });
        }
        let arrived = (received - confirmed) as usize;
        let bytes: usize = self.messages.drain(..arrived).map(|(_, bytes)| bytes).sum();
        self.bytes -= bytes;
        self.confirmed = received;
        self.sent -= arrived;
        Ok(())
    }

    /// Continues on another stream, whose receiver has `received` messages. Returns how many are
    /// sent again.
    ///
    /// # Errors
    /// [`ImpossibleCount`], as [`Sent::confirm`].
    pub fn resume(&mut self, received: u64) -> Result<usize, ImpossibleCount> {
        self.confirm(received)?;
        Ok(std::mem::take(&mut self.sent))
    }
}

/// The count of received messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Received {
    count: u64,
    told: u64,
}

impl Received {
    /// Counts a message. Returns whether the sender must be told the count now.
    pub fn note(&mut self) -> bool {
        self.count += 1;
        self.count - self.told >= TOLD_EVERY
    }

    /// The count.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The count, to tell it to the sender.
    pub fn tell(&mut self) -> u64 {
        self.told = self.count;
        self.count
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sent(messages: u64) -> Sent<u64> {
        let mut sent = Sent::new(true);
        (1..=messages).for_each(|number| sent.push(number, 10));
        sent
    }

    #[test]
    fn another_stream_continues_after_the_count() {
        let mut sent = sent(5);
        let first: Vec<_> = (0..4).filter_map(|_| sent.next_to_send()).collect();
        assert_eq!(first, [1, 2, 3, 4]);
        assert_eq!(sent.confirm(1), Ok(()));
        assert_eq!(sent.resume(2), Ok(2), "3 and 4 are sent again");
        assert_eq!((sent.waiting(), sent.kept()), (3, 3));
        let rest: Vec<_> = std::iter::from_fn(|| sent.next_to_send()).collect();
        assert_eq!(rest, [3, 4, 5]);
        assert_eq!(sent.confirm(5), Ok(()));
        assert_eq!((sent.kept(), sent.bytes), (0, 0));
    }

    #[test]
    fn impossible_counts_are_refused() {
        let mut sent = sent(3);
        sent.next_to_send();
        sent.next_to_send();
        sent.confirm(1).unwrap();
        for received in [0, 3, u64::MAX] {
            let error = ImpossibleCount { received, confirmed: 1, sent: 2 };
            assert_eq!(sent.confirm(received), Err(error));
            assert_eq!(sent.resume(received), Err(error));
        }
        assert_eq!(
            ImpossibleCount { received: 3, confirmed: 1, sent: 2 }.to_string(),
            "it counts 3 received messages, but must have 1 to 2"
        );
        assert_eq!((sent.kept(), sent.next_to_send()), (2, Some(3)), "nothing has changed");
    }

    #[test]
    fn without_memory_a_message_is_sent_and_gone() {
        let mut sent = Sent::new(false);
        sent.push('a', 1);
        sent.push('b', 1);
        assert_eq!((sent.next_to_send(), sent.kept(), sent.waiting()), (Some('a'), 1, 1));
        assert_eq!(sent.resume(0).unwrap_err().confirmed, 1);
    }

    /// BOUND
    #[test]
    fn messages_and_bytes_are_limited() {
        let mut sent = sent(MAX_KEPT as u64 - 1);
        assert!(!sent.is_full());
        sent.push(0, 10);
        assert!(sent.is_full());
        let mut sent = Sent::new(true);
        sent.push(0, MAX_KEPT_BYTES - 1);
        assert!(!sent.is_full());
        sent.push(0, 1);
        assert!(sent.is_full());
    }

    #[test]
    fn the_sender_is_told_in_time() {
        let mut received = Received::default();
        let due = (1..=2 * TOLD_EVERY).filter(|_| received.note() && received.tell() > 0);
        assert_eq!(due.count(), 2);
        assert_eq!(received.count(), 2 * TOLD_EVERY);
    }

    /// What happens next on a line that breaks.
    #[derive(Debug, Clone)]
    enum Act {
        Push,
        /// A message leaves the sender.
        Send,
        /// A message arrives at the receiver.
        Arrive,
        /// The count leaves the receiver, and arrives at the sender.
        Tell,
        Told,
        /// All that is under way is lost.
        Break,
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            6 => Just(Act::Push),
            6 => Just(Act::Send),
            6 => Just(Act::Arrive),
            1 => Just(Act::Tell),
            1 => Just(Act::Told),
            1 => Just(Act::Break),
        ]
    }

    proptest! {
        /// ONE: each message arrives once and in order, wherever streams break, and only what has
        /// not been confirmed is kept (BOUND).
        #[test]
        fn each_message_arrives_once_and_in_order(acts in prop::collection::vec(act(), 0..400)) {
            let (mut sent, mut received) = (Sent::new(true), Received::default());
            let (mut line, mut back) = (VecDeque::new(), VecDeque::new());
            let (mut pushed, mut got) = (0_u64, Vec::new());
            // In the end everything arrives.
            let rest = std::iter::repeat_n([Act::Send, Act::Arrive], acts.len() + 1).flatten();
            for act in acts.into_iter().chain([Act::Break]).chain(rest) {
                match act {
                    Act::Push => {
                        pushed += 1;
                        sent.push(pushed, 1);
                    }
                    Act::Send => line.extend(sent.next_to_send()),
                    Act::Arrive => {
                        if let Some(number) = line.pop_front() {
                            got.push(number);
                            received.note();
                        }
                    }
                    Act::Tell => back.push_back(received.tell()),
                    Act::Told => {
                        if let Some(count) = back.pop_front() {
                            prop_assert_eq!(sent.confirm(count), Ok(()));
                            prop_assert_eq!(sent.kept() as u64, pushed - count);
                        }
                    }
                    Act::Break => {
                        line.clear();
                        back.clear();
                        prop_assert!(sent.resume(received.count()).is_ok());
                        prop_assert_eq!(sent.kept() as u64, pushed - received.count());
                    }
                }
                prop_assert!(sent.kept() as u64 <= pushed);
                prop_assert_eq!(sent.bytes, sent.kept());
            }
            prop_assert_eq!(got, (1..=pushed).collect::<Vec<_>>());
        }
    }
}
