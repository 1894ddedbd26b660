//! The messages to the other end of a node stream, until that end has received them. The stream
//! takes its messages from here. If it breaks, another one takes over what has not arrived; see
//! [`gradwire_proto::numbered`].

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use gradwire_proto::numbered::{ImpossibleCount, Sent};
use gradwire_services::shared::Shared;
use parking_lot::Mutex;
use prost::Message;
use tokio_stream::Stream;
use tonic::Status;

/// How many messages may wait for a node that reads them.
pub(crate) const OUTBOX: usize = 1024;

/// How many messages of a node may wait for the coordinator.
const QUEUE: usize = 64;

type Item<M> = Result<Arc<Shared<M>>, Status>;

#[derive(Debug)]
struct State<M> {
    /// What is sent before all numbered messages.
    handshake: VecDeque<Item<M>>,
    numbered: Sent<Arc<Shared<M>>>,
    /// Whether the handshake is over, so that numbered messages are sent.
    is_open: bool,
    /// Whether no more messages will come.
    is_closed: bool,
    /// Whether the stream has ended.
    is_broken: bool,
    /// How many messages waited when this stream began, because an earlier one had broken.
    backlog: usize,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl<M> State<M> {
    fn has_room(&self) -> bool {
        self.numbered.waiting() < QUEUE && !self.numbered.is_full()
    }

    fn wake_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    fn wake_writer(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }
}

/// Closes the stream when it is dropped.
#[derive(Debug)]
struct Owner<M>(Arc<Mutex<State<M>>>);

impl<M> Drop for Owner<M> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        state.wake_reader();
    }
}

/// The sender's side. The stream ends after its messages when the last copy of this is dropped.
#[derive(Debug)]
pub struct Outbox<M>(Arc<Owner<M>>);

impl<M> Clone for Outbox<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M: Message + Clone> Outbox<M> {
    /// A new stream. Another one can take over its messages if it `remembers` them.
    pub fn new(remembers: bool) -> (Self, OutboxStream<M>) {
        let state = Arc::new(Mutex::new(State {
            handshake: VecDeque::new(),
            numbered: Sent::new(remembers),
            is_open: false,
            is_closed: false,
            is_broken: false,
            backlog: 0,
            reader: None,
            writer: None,
        }));
        (Self(Arc::new(Owner(state.clone()))), OutboxStream(state))
    }

    /// Whether another stream can take over its messages.
    pub(crate) fn remembers(&self) -> bool {
        self.0.0.lock().numbered.remembers()
    }

    /// Sends a message of the handshake, or the status with which the stream ends.
    pub fn greet(&self, message: Result<M, Status>) {
        let mut state = self.0.0.lock();
        state.handshake.push_back(message.map(Shared::new));
        state.wake_reader();
    }

    /// The handshake is over: numbered messages follow.
    pub fn open(&self) {
        let mut state = self.0.0.lock();
        state.is_open = true;
        state.wake_reader();
    }

    /// Sends a numbered message.
    pub fn send(&self, message: Arc<Shared<M>>) {
        let mut state = self.0.0.lock();
        let remembers = state.numbered.remembers();
        if remembers || !state.is_broken {
            let bytes = if remembers { message.encode() } else { 0 };
            state.numbered.push(message, bytes);
            state.wake_reader();
        }
    }

    /// The other end has received this many numbered messages. A heartbeat that was sent again has
    /// an old count, which changes nothing.
    ///
    /// # Errors
    /// [`ImpossibleCount`] if fewer were sent.
    pub fn confirm(&self, received: u64) -> Result<(), ImpossibleCount> {
        let mut state = self.0.0.lock();
        if !state.numbered.remembers() {
            return Ok(());
        }
        match state.numbered.confirm(received) {
            Err(error) if error.received > error.confirmed => return Err(error),
            Ok(()) | Err(_) => state.wake_writer(),
        }
        Ok(())
    }

    /// Whether the other end has received all numbered messages.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.0.0.lock().numbered.kept() == 0
    }

    /// Takes over the messages of an `earlier` stream. The other end has received the first
    /// `received` of them. Returns how many are sent again.
    ///
    /// # Errors
    /// [`ImpossibleCount`]; then nothing is sent again.
    pub fn take_over(&self, earlier: &Self, received: u64) -> Result<usize, ImpossibleCount> {
        let mut numbered = {
            let mut earlier = earlier.0.0.lock();
            earlier.is_closed = true;
            earlier.wake_reader();
            std::mem::replace(&mut earlier.numbered, Sent::new(false))
        };
        let again = numbered.resume(received);
        let mut state = self.0.0.lock();
        state.backlog = numbered.waiting();
        state.numbered = numbered;
        state.is_open = true;
        state.wake_reader();
        again
    }

    /// Why no more messages may be sent: too many wait for the node (BOUND).
    pub(crate) fn overrun(&self) -> Option<String> {
        let state = self.0.0.lock();
        let (waiting, kept) = (state.numbered.waiting(), state.numbered.kept());
        if state.numbered.is_full() {
            return Some(format!("it does not confirm its messages, and {kept} are kept for it"));
        }
        (!state.is_broken && waiting > state.backlog + OUTBOX)
            .then(|| format!("it does not read its messages, and {waiting} are waiting"))
    }

    /// Whether a node may send more messages (BOUND).
    pub fn has_room(&self) -> bool {
        self.0.0.lock().has_room()
    }

    /// Waits until a node may send more messages. One task may wait.
    pub async fn room(&self) {
        poll_fn(|context| {
            let mut state = self.0.0.lock();
            if state.has_room() {
                return Poll::Ready(());
            }
            state.writer = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// The messages that a stream sends.
#[derive(Debug)]
pub struct OutboxStream<M>(Arc<Mutex<State<M>>>);

impl<M: Message + Clone> Stream for OutboxStream<M> {
    type Item = Item<M>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item<M>>> {
        let mut state = self.0.lock();
        if let Some(message) = state.handshake.pop_front() {
            return Poll::Ready(Some(message));
        }
        if state.is_open
            && let Some(message) = state.numbered.next_to_send()
        {
            state.wake_writer();
            return Poll::Ready(Some(Ok(message)));
        }
        if state.is_closed {
            return Poll::Ready(None);
        }
        state.reader = Some(context.waker().clone());
        Poll::Pending
    }
}

impl<M> Drop for OutboxStream<M> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_broken = true;
        state.wake_writer();
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::pb::{Done, NodeMessage, node_message::Message};
    use tokio_stream::StreamExt;

    use super::*;

    fn message(number: u64) -> NodeMessage {
        NodeMessage { message: Some(Message::Done(Done { sequences: vec![number] })) }
    }

    /// The numbers of the next messages.
    async fn read(stream: &mut OutboxStream<NodeMessage>, count: usize) -> Vec<u64> {
        let mut numbers = Vec::new();
        for _ in 0..count {
            let next = stream.next().await.unwrap().unwrap().into_message();
            let Some(Message::Done(done)) = next.message else { panic!("{next:?}") };
            numbers.extend(done.sequences);
        }
        numbers
    }

    #[tokio::test]
    async fn another_stream_takes_over() {
        let (first, mut stream) = Outbox::new(true);
        first.open();
        (1..=4).for_each(|number| first.send(Shared::new(message(number))));
        assert_eq!(read(&mut stream, 3).await, [1, 2, 3]);
        let (second, mut other) = Outbox::new(true);
        second.greet(Ok(message(99)));
        assert_eq!(second.take_over(&first, 1), Ok(2));
        assert!(stream.next().await.is_none(), "the earlier stream has ended");
        second.send(Shared::new(message(5)));
        assert_eq!(read(&mut other, 5).await, [99, 2, 3, 4, 5]);
        assert!(!second.is_confirmed());
        second.confirm(5).unwrap();
        second.confirm(3).unwrap();
        assert!(second.is_confirmed());
        assert!(second.confirm(6).is_err());
        drop(second);
        assert!(other.next().await.is_none());
    }

    #[tokio::test]
    async fn a_node_waits_for_room() {
        let (outbox, mut stream) = Outbox::new(false);
        outbox.open();
        (0..QUEUE as u64).for_each(|number| outbox.send(Shared::new(message(number))));
        assert!(!outbox.has_room());
        let (_, numbers) = tokio::join!(outbox.room(), read(&mut stream, 1));
        assert_eq!(numbers, [0]);
        assert!(outbox.has_room());
    }

    /// BOUND
    #[tokio::test]
    async fn a_node_that_does_not_read_is_noticed() {
        let (outbox, stream) = Outbox::new(true);
        outbox.open();
        (0..=OUTBOX as u64).for_each(|number| outbox.send(Shared::new(message(number))));
        assert!(outbox.overrun().unwrap().contains("it does not read its messages"));
        drop(stream);
        assert_eq!(outbox.overrun(), None, "it may come back");
        let (second, mut other) = Outbox::new(true);
        second.take_over(&outbox, 0).unwrap();
        assert_eq!(second.overrun(), None, "it has not had the time");
        assert_eq!(read(&mut other, 2).await, [0, 1]);
    }
}
