//! Lines of a program's output, in bounded memory.

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

/// Longest line that is kept: a task line's limit, far more than a result needs.
pub(crate) const LINE_LEN_BYTES_MAX: usize = 64 << 10;
/// What is kept of a longer one.
const HEAD_LEN_BYTES: usize = 200;

/// One line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// Without its end; what is not UTF-8 is replaced.
    Text(String),
    /// Too long: only the start was kept.
    TooLong {
        /// Its length in bytes.
        len_bytes: usize,
        /// Its start.
        head: String,
    },
    /// The other side closed it, or reading failed, which for a pipe means the same.
    End,
}

/// Splits a stream into lines.
#[derive(Debug)]
pub(crate) struct LineReader<R> {
    inner: BufReader<R>,
    partial: Vec<u8>,
    /// Bytes of the current line that were dropped.
    dropped: usize,
    read_bytes: u64,
}

impl<R: AsyncRead + Unpin> LineReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner: BufReader::new(inner), partial: Vec::new(), dropped: 0, read_bytes: 0 }
    }

    /// Bytes read so far, the unfinished line included.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    /// The next line. Cancel-safe: what was read of a line is kept for the next call.
    ///
    /// Returns at the latest after `LINE_LEN_BYTES_MAX` bytes were read, with `None` when the line is not complete, so
    /// that a caller can look at [`Self::read_bytes`] even if no line ever ends.
    pub(crate) async fn next(&mut self) -> Option<Line> {
        let from = self.read_bytes;
        loop {
            let chunk = match self.inner.fill_buf().await {
                Ok(chunk) if !chunk.is_empty() => chunk,
                Ok(_) | Err(_) => {
                    let unfinished = !self.partial.is_empty() || self.dropped > 0;
                    return Some(if unfinished { self.take() } else { Line::End });
                }
            };
            let end = chunk.iter().position(|b| *b == b'\n');
            let part = &chunk[..end.unwrap_or(chunk.len())];
            let room = LINE_LEN_BYTES_MAX.saturating_sub(self.partial.len());
            self.partial.extend_from_slice(&part[..part.len().min(room)]);
            self.dropped += part.len().saturating_sub(room);
            let used = part.len() + usize::from(end.is_some());
            self.inner.consume(used);
            self.read_bytes += used as u64;
            if end.is_some() {
                return Some(self.take());
            }
            if self.read_bytes - from >= LINE_LEN_BYTES_MAX as u64 {
                return None;
            }
        }
    }

    fn take(&mut self) -> Line {
        let dropped = std::mem::take(&mut self.dropped);
        let bytes = std::mem::take(&mut self.partial);
        if dropped == 0 {
            return Line::Text(String::from_utf8_lossy(&bytes).into_owned());
        }
        let head = String::from_utf8_lossy(&bytes[..HEAD_LEN_BYTES.min(bytes.len())]).into_owned();
        Line::TooLong { len_bytes: bytes.len() + dropped, head }
    }
}

/// The last bytes of a stream.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    /// Enough for a Python traceback's end, little enough for a message in the mesh.
    const KEPT_LEN_BYTES: usize = 2 << 10;

    pub(crate) fn push(&mut self, chunk: &[u8]) {
        self.bytes.extend_from_slice(chunk);
        let excess = self.bytes.len().saturating_sub(Self::KEPT_LEN_BYTES);
        self.bytes.drain(..excess);
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).trim().to_owned()
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(bytes: &[u8]) -> Vec<Line> {
        let mut reader = LineReader::new(bytes);
        let mut out = Vec::new();
        loop {
            match reader.next().await {
                Some(Line::End) => return out,
                Some(line) => out.push(line),
                None => {}
            }
        }
    }

    #[tokio::test]
    async fn lines_are_split_and_an_unfinished_one_is_kept() {
        let text = |s: &str| Line::Text(s.to_owned());
        assert_eq!(lines(b"a\n\nb").await, [text("a"), text(""), text("b")]);
        assert_eq!(lines(b"").await, []);
    }

    #[tokio::test]
    async fn a_long_line_is_dropped_and_the_next_one_read() {
        let mut bytes = vec![b'x'; 5 * LINE_LEN_BYTES_MAX];
        bytes.extend_from_slice(b"\nnext\n");
        let got = lines(&bytes).await;
        assert_eq!(got[0], Line::TooLong { len_bytes: 5 * LINE_LEN_BYTES_MAX, head: "x".repeat(HEAD_LEN_BYTES) });
        assert_eq!(got[1], Line::Text("next".into()));
    }

    #[test]
    fn a_tail_keeps_the_end() {
        let mut tail = Tail::default();
        tail.push(&[b'a'; 5000]);
        tail.push(b"end\n");
        assert_eq!(tail.text().len(), Tail::KEPT_LEN_BYTES - 1);
        assert!(tail.text().ends_with("aend"));
    }
}
