//! Server-sent events, written as the body is read. When the reader goes away the body is dropped, the calls with it.

use super::ApiError;
use crate::call::{Calls, Progress};
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Writes one API's events. What the answers gained since the last time is its own to remember.
pub(crate) trait Renderer: Send + 'static {
    /// Before the first token.
    fn begin(&mut self, calls: &Calls, out: &mut Vec<u8>);
    /// Some answer may have gained something.
    fn more(&mut self, calls: &mut Calls, out: &mut Vec<u8>);
    /// All answers are complete, and recorded.
    fn finish(&mut self, calls: &mut Calls, out: &mut Vec<u8>);
    /// The calls failed; the status is sent already.
    fn fail(&mut self, calls: &Calls, error: &ApiError, out: &mut Vec<u8>);
    /// Nothing happened for a while: something that keeps proxies and clients from giving up.
    fn heartbeat(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b": waiting for the engine\n\n");
    }
}

/// Whether a stream has come to its end; goes with the response.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamEnd(Arc<AtomicBool>);

impl StreamEnd {
    /// All answers are complete and recorded, and the last event is written. Never of calls that failed.
    pub(crate) fn is_complete(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The calls as a stream of events, with a sign of life after each `heartbeat` of silence.
pub(crate) fn stream(calls: Calls, renderer: impl Renderer, heartbeat: Duration) -> Response {
    let end = StreamEnd::default();
    let out = Vec::with_capacity(512);
    let state = EventStream { calls, renderer, heartbeat, out, begun: false, over: false, end: end.clone() };
    let events = futures::stream::unfold(state, |mut state| async move {
        let bytes = state.next().await?;
        Some((Ok::<_, Infallible>(bytes), state))
    });
    let mut response = Body::from_stream(events).into_response();
    response.extensions_mut().insert(end);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

struct EventStream<R> {
    calls: Calls,
    renderer: R,
    heartbeat: Duration,
    out: Vec<u8>,
    begun: bool,
    over: bool,
    end: StreamEnd,
}

impl<R: Renderer> EventStream<R> {
    async fn next(&mut self) -> Option<Bytes> {
        if !self.begun {
            self.begun = true;
            self.renderer.begin(&self.calls, &mut self.out);
        }
        while self.out.is_empty() && !self.over {
            match tokio::time::timeout(self.heartbeat, self.calls.advance()).await {
                Err(_silent) => self.renderer.heartbeat(&mut self.out),
                Ok(Ok(progress)) => {
                    self.renderer.more(&mut self.calls, &mut self.out);
                    if progress == Progress::Done {
                        self.renderer.finish(&mut self.calls, &mut self.out);
                        self.over = true;
                        self.end.0.store(true, Ordering::Release);
                    }
                }
                Ok(Err(e)) => {
                    self.renderer.fail(&self.calls, &e, &mut self.out);
                    self.over = true;
                }
            }
        }
        (!self.out.is_empty()).then(|| Bytes::from(std::mem::replace(&mut self.out, Vec::with_capacity(512))))
    }
}

/// An event without a name.
pub(crate) fn data(out: &mut Vec<u8>, body: &impl serde::Serialize) {
    out.extend_from_slice(b"data: ");
    // Into memory, of types that have a JSON form.
    let _ = serde_json::to_writer(&mut *out, body);
    out.extend_from_slice(b"\n\n");
}

/// An event with a name.
pub(crate) fn event(out: &mut Vec<u8>, name: &str, body: &impl serde::Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    data(out, body);
}
