//! Cuts output into lines. Pure.
//!
//! A line ends with a newline, or with a carriage return, which is how progress bars draw over
//! themselves; a very long one is cut (BOUND). No byte is lost or added.

use gradwire_services::launch::{LineEnd, Text};

/// The longest part of a line that is passed on in one piece, in bytes.
pub const MAX_STRETCH: usize = 16 << 10;

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
pub struct Splitter {
    pending: Vec<u8>,
}

impl Splitter {
    /// Takes bytes and returns the lines that are complete, in order.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<(Text, LineEnd)> {
        self.pending.extend_from_slice(bytes);
        let (mut lines, mut from) = (Vec::new(), 0);
        loop {
            let rest = &self.pending[from..];
            let stretch = &rest[..rest.len().min(MAX_STRETCH)];
            let (length, end, skip) = match stretch.iter().position(|b| matches!(b, b'\n' | b'\r'))
            {
                Some(at) if rest[at] == b'\n' => (at, LineEnd::Newline, 1),
                Some(at) => match rest.get(at + 1) {
                    Some(b'\n') => (at, LineEnd::Newline, 2),
                    Some(_) => (at, LineEnd::Return, 1),
                    // A newline may follow in the next bytes.
                    None => break,
                },
                None if stretch.len() == MAX_STRETCH => (MAX_STRETCH, LineEnd::Open, 0),
                None => break,
            };
            lines.push((Text::from(&rest[..length]), end));
            from += length + skip;
        }
        self.pending.drain(..from);
        lines
    }

    /// The rest when the stream has ended.
    pub fn finish(&mut self) -> Option<(Text, LineEnd)> {
        let pending = std::mem::take(&mut self.pending);
        match pending.strip_suffix(b"\r") {
            Some(line) => Some((Text::from(line), LineEnd::Return)),
            None if pending.is_empty() => None,
            None => Some((Text::from(&pending[..]), LineEnd::Open)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<(String, LineEnd)> {
        let mut splitter = Splitter::default();
        let mut lines: Vec<_> = chunks.iter().flat_map(|chunk| splitter.push(chunk)).collect();
        lines.extend(splitter.finish());
        lines.into_iter().map(|(text, end)| (text.to_string(), end)).collect()
    }

    #[test]
    fn lines_and_progress_bars_are_distinguished() {
        use LineEnd::{Newline, Open, Return};
        let expected =
            [("a", Newline), ("10%", Return), ("20%", Return), ("b", Newline), ("c", Open)]
                .map(|(text, end)| (text.to_owned(), end));
        assert_eq!(split(&[b"a\n10%\r2", b"0%\rb\r", b"\nc"]), expected);
        assert_eq!(split(&[b"x\r"]), [("x".to_owned(), Return)]);
        assert_eq!(split(&[b"\n"]), [(String::new(), Newline)]);
        assert_eq!(split(&[b""]), []);
    }

    #[test]
    fn a_line_without_an_end_is_cut() {
        let mut splitter = Splitter::default();
        let lines = splitter.push(&vec![b'x'; 3 * MAX_STRETCH + 5]);
        assert!(
            lines
                .iter()
                .all(|(text, end)| *end == LineEnd::Open && text.as_bytes().len() == MAX_STRETCH)
        );
        assert_eq!((lines.len(), splitter.pending.len()), (3, 5), "BOUND");
    }

    proptest! {
        #[test]
        fn no_byte_is_lost_wherever_the_stream_is_cut(
            bytes in prop::collection::vec(
                prop_oneof![Just(b'\n'), Just(b'\r'), any::<u8>()],
                0..400,
            ),
            cut in 1usize..50,
        ) {
            let mut splitter = Splitter::default();
            let chunks = bytes.chunks(cut);
            let mut lines: Vec<_> = chunks.flat_map(|chunk| splitter.push(chunk)).collect();
            lines.extend(splitter.finish());
            let mut whole = Vec::new();
            for (text, end) in &lines {
                whole.extend_from_slice(text.as_bytes());
                whole.extend_from_slice(end.as_bytes());
            }
            prop_assert_eq!(whole, normal(&bytes));
        }
    }

    /// `\r\n` is one end of line and becomes `\n`; everything else is unchanged.
    fn normal(bytes: &[u8]) -> Vec<u8> {
        let pairs = bytes.iter().zip(bytes.iter().skip(1).map(Some).chain([None]));
        pairs.filter(|(b, next)| **b != b'\r' || *next != Some(&b'\n')).map(|(b, _)| *b).collect()
    }
}
