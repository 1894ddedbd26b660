//! What a connection has sent and the peer may not have: the frames, with their places in the
//! stream of bytes. So another connection can continue where a broken one ended. Pure.
//!
//! A position counts the bytes of all successive connections of a slot. The frames are remembered
//! and not their bytes, which stay in the piece. If these are about to change while the peer may
//! not have them, they are [kept](Sent::keep) as a copy.
//!
//! Bytes that have arrived are forgotten. The list is therefore as long as a socket's buffer has
//! room for frames, and the copies are at most as large as that buffer (BOUND).

use std::collections::VecDeque;

use super::frame::{HEADER_BYTES, Header};

/// A chunk of data in a frame, and the step that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The header of the frame.
    pub header: Header,
    /// The step of the piece.
    pub step: u32,
}

/// The end of a payload.
#[derive(Debug)]
struct Kept {
    /// Its first byte in the payload.
    from: u64,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct Frame {
    /// The position of its first byte.
    begin: u64,
    header: [u8; HEADER_BYTES],
    /// The data after the header. A notice has no data.
    chunk: Option<Chunk>,
    kept: Option<Kept>,
}

impl Frame {
    fn end(&self) -> u64 {
        let payload = self.chunk.map_or(0, |chunk| u64::from(chunk.header.length));
        self.begin + HEADER_BYTES as u64 + payload
    }

    /// The byte of its payload at a position, or the first one.
    fn payload_at(&self, position: u64) -> u64 {
        position.saturating_sub(self.begin + HEADER_BYTES as u64)
    }
}

/// Where the bytes of a payload are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload<'a> {
    /// There are none.
    None,
    /// In the piece, from this byte of the chunk on.
    Piece(&'a Chunk, u64),
    /// These, because those in the piece may have changed.
    Kept(&'a [u8]),
}

/// The rest of the frame that is sent next.
#[derive(Debug, PartialEq, Eq)]
pub struct Due<'a> {
    /// The rest of its header.
    pub header: &'a [u8],
    /// The rest of its data.
    pub payload: Payload<'a>,
}

/// A part of a chunk was written for the first time.
#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    /// The chunk.
    pub chunk: Chunk,
    /// Whether that was its end.
    pub is_whole: bool,
}

/// The peer's count of received bytes is impossible: `read` is not between what it has acknowledged
/// and what was `written`.
#[derive(Debug, PartialEq, Eq)]
pub struct Impossible {
    /// What was written.
    pub written: u64,
    /// What the peer claims to have read.
    pub read: u64,
}

/// What was sent on the successive connections of a slot.
#[derive(Debug)]
pub struct Sent {
    frames: VecDeque<Frame>,
    /// The index of the frame to write next. This connection has carried all frames before it.
    next: usize,
    /// The position of the next byte to write.
    written: u64,
    /// The end of what was ever written. The pieces know about the bytes before it.
    furthest: u64,
    /// All bytes before this position have arrived.
    arrived: u64,
    /// All bytes that were written, including those written again.
    moved: u64,
    /// The end of the last chunk that was written.
    chunks_end: u64,
    /// Whether frames are remembered until they have arrived.
    remembers: bool,
}

impl Sent {
    /// Nothing sent yet. Unless it `remembers` frames, a connection can only be replaced between
    /// two of them.
    pub fn new(remembers: bool) -> Self {
        Self {
            frames: VecDeque::new(),
            next: 0,
            written: 0,
            furthest: 0,
            arrived: 0,
            moved: 0,
            chunks_end: 0,
            remembers,
        }
    }

    /// The position of the next byte to write.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// All bytes before this position have arrived.
    pub fn arrived(&self) -> u64 {
        self.arrived
    }

    /// All bytes that were written, including those written again.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// The end of the last chunk that was written.
    pub fn chunks_end(&self) -> u64 {
        self.chunks_end
    }

    /// How many frames are remembered.
    pub fn remembered(&self) -> usize {
        self.frames.len()
    }

    /// Whether it can take a frame to send.
    pub fn is_free(&self) -> bool {
        self.next == self.frames.len()
    }

    /// Whether a frame was written in part.
    pub fn is_within_frame(&self) -> bool {
        self.frames.get(self.next).is_some_and(|frame| frame.begin < self.written)
    }

    /// Takes a frame to send: a chunk with its header, or only a header.
    pub fn carry(&mut self, header: [u8; HEADER_BYTES], chunk: Option<Chunk>) {
        let begin = self.frames.back().map_or(self.written, Frame::end);
        self.frames.push_back(Frame { begin, header, chunk, kept: None });
    }

    /// What to write next.
    pub fn due(&self) -> Option<Due<'_>> {
        let frame = self.frames.get(self.next)?;
        let of_header = (self.written - frame.begin).min(HEADER_BYTES as u64) as usize;
        let from = frame.payload_at(self.written);
        let payload = match (&frame.chunk, &frame.kept) {
            (None, _) => Payload::None,
            (Some(_), Some(kept)) => Payload::Kept(&kept.bytes[(from - kept.from) as usize..]),
            (Some(chunk), None) => Payload::Piece(chunk, from),
        };
        Some(Due { header: &frame.header[of_header..], payload })
    }

    /// Notes that bytes of the due frame were written. Returns its chunk if a part of its payload
    /// was written for the first time.
    pub fn wrote(&mut self, bytes: u64) -> Option<Written> {
        let frame = self.frames.get(self.next)?;
        let (chunk, end) = (frame.chunk, frame.end());
        self.written += bytes;
        self.moved += bytes;
        debug_assert!(self.written <= end, "more than the due frame was written");
        let is_new = self.written > self.furthest;
        self.furthest = self.furthest.max(self.written);
        let is_whole = self.written == end;
        if is_whole {
            self.next += 1;
        }
        if chunk.is_some() {
            self.chunks_end = self.chunks_end.max(self.written);
        }
        if !self.remembers {
            self.has_arrived(self.written);
        }
        chunk.filter(|_| is_new).map(|chunk| Written { chunk, is_whole })
    }

    /// Forgets the frames that have arrived: the peer has all bytes before `position`.
    pub fn has_arrived(&mut self, position: u64) {
        self.arrived = self.arrived.max(position.min(self.written));
        while self.next > 0
            && let Some(first) = self.frames.front()
            && first.end() <= self.arrived
        {
            self.frames.pop_front();
            self.next -= 1;
        }
    }

    /// Continues on another connection, of which the peer has read `read` bytes. Returns how many
    /// bytes are sent again.
    ///
    /// # Errors
    /// [`Impossible`] if the peer can't have read as many, or must have read more.
    pub fn resume(&mut self, read: u64) -> Result<u64, Impossible> {
        let written = self.written;
        if !(self.arrived..=written).contains(&read) {
            return Err(Impossible { written, read });
        }
        self.has_arrived(read);
        (self.next, self.written) = (0, read);
        Ok(written - read)
    }

    /// The frames whose chunks the pieces no longer protect: they were written once, and their
    /// bytes are still those of the piece.
    fn unprotected(&mut self) -> impl Iterator<Item = (&mut Frame, Chunk)> {
        let furthest = self.furthest;
        let written = self.frames.iter_mut().take_while(move |frame| frame.end() <= furthest);
        let bare = written.filter(|frame| frame.kept.is_none());
        bare.filter_map(|frame| frame.chunk.map(|chunk| (frame, chunk)))
    }

    /// Whether the peer may lack one of these chunks, whose bytes are not kept.
    pub fn has(&mut self, which: impl Fn(&Chunk) -> bool) -> bool {
        self.unprotected().any(|(_, chunk)| which(&chunk))
    }

    /// Keeps what the peer may lack of these chunks, before their bytes change. `copy` gets a chunk
    /// and its first byte to keep.
    pub fn keep(
        &mut self,
        which: impl Fn(&Chunk) -> bool,
        mut copy: impl FnMut(&Chunk, u64) -> Vec<u8>,
    ) {
        let arrived = self.arrived;
        for (frame, chunk) in self.unprotected().filter(|(_, chunk)| which(chunk)) {
            let from = frame.payload_at(arrived);
            frame.kept = Some(Kept { from, bytes: copy(&chunk, from) });
        }
    }
}

#[cfg(test)]
mod tests;
