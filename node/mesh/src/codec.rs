//! Frames on a substream: a length (u32, little endian), for calls one byte more (service or status), then the body.

use bytes::{Buf, Bytes, BytesMut};
use futures::{AsyncRead, AsyncWrite};
use libp2p::Stream;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

/// Bodies up to this length are copied behind their header, which saves a packet; longer ones are written from where
/// they lie.
const COPY_LEN_BYTES_MAX: usize = 32 << 10;
/// Room for a read when it is not known how much will come.
const READ_LEN_BYTES: usize = 4 << 10;
/// Room for a read in the middle of a long body.
const READ_LEN_BYTES_MAX: usize = 256 << 10;
/// How long closing a stream in order may take before it is simply dropped.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A substream that one task may read while another writes. The lock is held for one poll at a time.
pub(crate) struct Duplex {
    stream: Mutex<Stream>,
    closed: AtomicBool,
}

impl Duplex {
    pub(crate) fn new(stream: Stream) -> Self {
        Self { stream: Mutex::new(stream), closed: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = poll_fn(|cx| Pin::new(&mut *self.lock()).poll_write(cx, bytes)).await?;
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
        poll_fn(|cx| Pin::new(&mut *self.lock()).poll_flush(cx)).await
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
                let close = poll_fn(|cx| Pin::new(&mut *this.lock()).poll_close(cx));
                let _ = tokio::time::timeout(CLOSE_LIMIT, close).await;
            });
        }
    }
}

/// Bytes that were read and not yet taken. Reading is cancel-safe: whatever came stays here.
#[derive(Default)]
pub(crate) struct Inbox {
    bytes: BytesMut,
}

impl Inbox {
    /// Reads until at least `len` bytes are here. `false` when the stream ended in order before the first of them.
    pub(crate) async fn fill(&mut self, from: &Duplex, len: usize) -> io::Result<bool> {
        while self.bytes.len() < len {
            let room = (len - self.bytes.len()).clamp(READ_LEN_BYTES, READ_LEN_BYTES_MAX);
            self.bytes.reserve((len - self.bytes.len()).max(room));
            let n = poll_fn(|cx| {
                let have = self.bytes.len();
                self.bytes.resize(have + room, 0);
                let polled = Pin::new(&mut *from.lock()).poll_read(cx, &mut self.bytes[have..]);
                let read = if let Poll::Ready(Ok(n)) = &polled { *n } else { 0 };
                self.bytes.truncate(have + read);
                polled
            })
            .await?;
            if n == 0 {
                return if self.bytes.is_empty() { Ok(false) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
        }
        Ok(true)
    }

    /// The length that a frame starts with. Needs four bytes.
    pub(crate) fn peek_len(&self) -> usize {
        let mut head = &self.bytes[..4];
        head.get_u32_le() as usize
    }

    /// The fifth byte. Needs five bytes.
    pub(crate) fn peek_kind(&self) -> u8 {
        self.bytes[4]
    }

    /// Takes a frame that is here whole: `header` bytes are dropped, `len` returned.
    pub(crate) fn take(&mut self, header: usize, len: usize) -> Bytes {
        self.bytes.advance(header);
        let body = self.bytes.split_to(len).freeze();
        if self.bytes.is_empty() {
            self.bytes = BytesMut::new(); // an idle stream keeps no memory
        }
        body
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
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
