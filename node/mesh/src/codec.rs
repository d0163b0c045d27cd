//! Frames on a substream: a length (u32, little endian), for calls one byte more (service or status), then the body.

use bytes::{Buf, Bytes};
use futures::{AsyncRead, AsyncWrite};
use libp2p::Stream;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

/// Bodies up to this length are copied behind their header, which saves a packet; longer ones are written from where
/// they lie.
const COPY_LEN_BYTES_MAX: usize = 32 << 10;
/// Room of a stream for small frames: most calls and tokens. 384 streams a connection × 4 KiB = 1.5 MiB.
const READ_LEN_BYTES: usize = 4 << 10;
/// How long closing a stream in order may take before it is simply dropped.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A substream that one task may read while another writes. The lock is held for one poll at a time.
///
/// A failed read is the last thing that is asked of the stream. When the connection breaks before the peer has confirmed
/// the protocol, libp2p's stream is left in a state in which whatever is asked of it next panics
/// (multistream-select 0.14, `Negotiated::poll`); so it is dropped there. A failed write is harmless, and what the peer
/// has sent before may still be read.
pub(crate) struct Duplex {
    /// `None` once a read has failed.
    stream: Mutex<Option<Stream>>,
    closed: AtomicBool,
}

impl Duplex {
    pub(crate) fn new(stream: Stream) -> Self {
        Self { stream: Mutex::new(Some(stream)), closed: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Stream>> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the stream for something, unless a read has failed.
    fn ask<T>(&self, what: impl FnOnce(Pin<&mut Stream>) -> Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match self.lock().as_mut() {
            Some(stream) => what(Pin::new(stream)),
            None => Poll::Ready(Err(io::Error::new(io::ErrorKind::BrokenPipe, "the stream has failed before"))),
        }
    }

    fn poll_read(&self, cx: &mut Context<'_>, room: &mut [u8]) -> Poll<io::Result<usize>> {
        let read = self.ask(|stream| stream.poll_read(cx, room));
        if let Poll::Ready(Err(_)) = &read {
            *self.lock() = None;
        }
        read
    }

    async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = poll_fn(|cx| self.ask(|stream| stream.poll_write(cx, bytes))).await?;
            if n == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Writes `header` and `body` and flushes. Not cancel-safe.
    pub(crate) async fn write(&self, header: &[u8], body: &[u8]) -> io::Result<()> {
        if body.len() <= COPY_LEN_BYTES_MAX {
            let mut frame = Vec::with_capacity(header.len() + body.len());
            frame.extend_from_slice(header);
            frame.extend_from_slice(body);
            self.write_all(&frame).await?;
        } else {
            self.write_all(header).await?;
            self.write_all(body).await?;
        }
        poll_fn(|cx| self.ask(|stream| stream.poll_flush(cx))).await
    }

    /// Ends our side in order, in the background, once; the peer reads what was written and then the end.
    pub(crate) fn close_later(self: &Arc<Self>) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Outside of a runtime nothing can be sent any more: dropping resets the stream.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let this = Arc::clone(self);
            runtime.spawn(async move {
                let close = poll_fn(|cx| this.ask(|stream| stream.poll_close(cx)));
                let _ = tokio::time::timeout(CLOSE_LIMIT, close).await;
            });
        }
    }
}

/// Bytes that were read and not yet taken. Reading is cancel-safe: whatever came stays here.
#[derive(Default)]
pub(crate) struct Inbox {
    /// Zeroed room; what was read and not taken is `bytes[start..end]`. Kept between small frames; a long frame gets
    /// room of exactly its length, and takes it along.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// Reads until at least `len` bytes are here. `false` when the stream ended in order before the first of them.
    pub(crate) async fn fill(&mut self, from: &Duplex, len: usize) -> io::Result<bool> {
        while self.end - self.start < len {
            self.make_room(len);
            let room = &mut self.bytes[self.end..];
            let n = poll_fn(|cx| from.poll_read(cx, room)).await?;
            if n == 0 {
                return if self.is_empty() { Ok(false) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            self.end += n;
        }
        Ok(true)
    }

    /// Room for `len` bytes from `start` on, and for at least one more than there are.
    fn make_room(&mut self, len: usize) {
        if self.start + len <= self.bytes.len() {
            return;
        }
        let have = self.end - self.start;
        let mut bytes = vec![0; len.max(READ_LEN_BYTES)];
        bytes[..have].copy_from_slice(&self.bytes[self.start..self.end]);
        (self.bytes, self.start, self.end) = (bytes, 0, have);
    }

    /// The length that a frame starts with. Needs four bytes.
    pub(crate) fn peek_len(&self) -> usize {
        let mut head = &self.bytes[self.start..self.start + 4];
        head.get_u32_le() as usize
    }

    /// The fifth byte. Needs five bytes.
    pub(crate) fn peek_kind(&self) -> u8 {
        self.bytes[self.start + 4]
    }

    /// Takes a frame that is here whole: `header` bytes are dropped, `len` returned.
    pub(crate) fn take(&mut self, header: usize, len: usize) -> Bytes {
        let (from, to) = (self.start + header, self.start + header + len);
        if to == self.bytes.len() && self.start == 0 && len > READ_LEN_BYTES {
            (self.start, self.end) = (0, 0);
            return Bytes::from(std::mem::take(&mut self.bytes)).slice(from..);
        }
        let body = Bytes::copy_from_slice(&self.bytes[from..to]);
        self.start = to;
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
        body
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

/// The header of a frame of a generation stream.
pub(crate) fn frame_header(len: usize) -> [u8; 4] {
    // All lengths are checked against limits far below 4 GiB before.
    u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes()
}

/// The header of a request or response: length and service or status.
pub(crate) fn call_header(len: usize, kind: u8) -> [u8; 5] {
    let [a, b, c, d] = frame_header(len);
    [a, b, c, d, kind]
}
