//! Requests that are sent again: an episode's call is answered once, and recorded once.
//!
//! With an `Idempotency-Key`, a repetition gets the first answer, after draft-ietf-httpapi-idempotency-key-header-07: another
//! request with a key that was used is refused by 422; where the draft refuses one that comes while the first is under way
//! (409), this waits for it.
//!
//! The providers' SDKs send no key but count their attempts in `x-stainless-retry-count`. A further attempt gets the answer
//! to the same request that nobody has read: its connection broke after it had been recorded. One that was read is
//! somebody's, and the same request again is another sample.
//!
//! Only complete answers are kept. A call that failed, or whose connection went away before its end, is cancelled, leaves
//! nothing, and may be tried again.

use crate::api::{ApiError, anthropic, place, sse};
use crate::call::Caller;
use crate::episode::{Episode, Stage};
use crate::gateway::Gateway;
use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use starling_protocol::Hash;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Says that an answer was given before, as other services do.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// How often an SDK has tried a request before.
const RETRY_COUNT: HeaderName = HeaderName::from_static("x-stainless-retry-count");
const KEY_LEN_MAX: usize = 255;
/// Answers kept in an episode: an SDK tries again within seconds, so the last ones are enough.
const REPLIES_MAX: usize = 64;
/// Bytes of these answers together, in each episode.
const REPLIES_BYTES_MAX: usize = 4 << 20;
/// Unread answers kept in an episode: as many as there are broken connections at a time.
const UNREAD_MAX: usize = 8;
/// For so long; an SDK waits at most 8 s before it tries again.
const UNREAD_FOR: Duration = Duration::from_secs(60);

/// What became of the requests with a key.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    by_key: HashMap<String, Entry>,
    /// Keys of complete answers, oldest first.
    order: VecDeque<String>,
    bytes: usize,
    /// Complete answers that nobody has read, oldest first, each with its request and when it came to be.
    unread: VecDeque<(Hash, Instant, Reply)>,
}

#[derive(Debug)]
struct Entry {
    /// Of the path and the body.
    request: Hash,
    outcome: Outcome,
}

#[derive(Debug)]
enum Outcome {
    /// Under way; the channel closes when it is over.
    Running(watch::Receiver<()>),
    Complete(Reply),
}

/// A complete answer.
#[derive(Clone, Debug)]
struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// What to do with a request.
enum Turn {
    EpisodeOver,
    First(watch::Sender<()>),
    Wait(watch::Receiver<()>),
    Again(Reply),
    AnotherRequest,
}

impl Replies {
    fn take_turn(&mut self, key: &str, request: Hash) -> Turn {
        match self.by_key.get(key) {
            Some(entry) if entry.request != request => Turn::AnotherRequest,
            Some(Entry { outcome: Outcome::Running(over), .. }) => Turn::Wait(over.clone()),
            Some(Entry { outcome: Outcome::Complete(reply), .. }) => Turn::Again(reply.clone()),
            None => {
                let (running, over) = watch::channel(());
                self.by_key.insert(key.to_owned(), Entry { request, outcome: Outcome::Running(over) });
                Turn::First(running)
            }
        }
    }

    fn complete(&mut self, key: String, reply: Reply) {
        let Some(entry) = self.by_key.get_mut(&key) else { return };
        self.bytes += reply.body.len();
        entry.outcome = Outcome::Complete(reply);
        self.order.push_back(key);
        while self.order.len() > REPLIES_MAX || self.bytes > REPLIES_BYTES_MAX {
            let Some(oldest) = self.order.pop_front() else { break };
            self.forget(&oldest);
        }
    }

    fn keep_unread(&mut self, request: Hash, reply: Reply) {
        self.unread.retain(|(_, since, _)| since.elapsed() < UNREAD_FOR);
        self.unread.push_back((request, Instant::now(), reply));
        let bytes =
            |unread: &VecDeque<(Hash, Instant, Reply)>| unread.iter().map(|(_, _, r)| r.body.len()).sum::<usize>();
        while self.unread.len() > UNREAD_MAX || bytes(&self.unread) > REPLIES_BYTES_MAX {
            self.unread.pop_front();
        }
    }

    fn take_unread(&mut self, request: Hash) -> Option<Reply> {
        let at = self.unread.iter().position(|(r, since, _)| *r == request && since.elapsed() < UNREAD_FOR)?;
        self.unread.remove(at).map(|(_, _, reply)| reply)
    }

    fn forget(&mut self, key: &str) {
        if let Some(Entry { outcome: Outcome::Complete(reply), .. }) = self.by_key.remove(key) {
            self.bytes -= reply.body.len();
        }
    }
}

impl Episode {
    fn take_unread(&self, request: Hash) -> Option<Reply> {
        let mut state = self.state();
        if state.stage == Stage::Open { state.replies.take_unread(request) } else { None }
    }

    fn take_turn(&self, key: &str, request: Hash) -> Turn {
        let mut state = self.state();
        if state.stage == Stage::Open { state.replies.take_turn(key, request) } else { Turn::EpisodeOver }
    }
}

/// The first request with a key, under way. Whoever waits for it goes on when this is dropped.
struct Running {
    episode: Arc<Episode>,
    key: Option<String>,
    _over: watch::Sender<()>,
}

impl Running {
    fn complete(mut self, reply: Reply) {
        if let Some(key) = self.key.take() {
            self.episode.state().replies.complete(key, reply);
        }
    }
}

// An episode that is over remembers nothing: `complete` finds no entry then.
impl Drop for Running {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            self.episode.state().replies.forget(&key);
        }
    }
}

/// An answer on its way. Dropped with a reply, nobody has read it.
struct Unread {
    episode: Arc<Episode>,
    request: Hash,
    reply: Option<Reply>,
}

impl Drop for Unread {
    fn drop(&mut self) {
        let mut state = self.episode.state();
        if let Some(reply) = self.reply.take().filter(|_| state.stage == Stage::Open) {
            state.replies.keep_unread(self.request, reply);
        }
    }
}

/// How an answer is kept, once it is complete.
enum Keep {
    ForKey(Running),
    UntilRead(Unread),
}

/// Answers a call that is repeated with what was answered before. See the module's text.
pub(super) async fn once(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let may_repeat = request.headers().contains_key(KEY) || request.headers().contains_key(RETRY_COUNT);
    let episode = match gateway.caller(request.headers()) {
        Ok(Caller::Episode(episode)) if may_repeat => episode,
        // What is wrong with the caller, the route says.
        _ => return next.run(request).await,
    };
    let (path, headers) = (request.uri().path().to_owned(), request.headers().clone());
    match once_in(&gateway, episode, request, next).await {
        Ok(response) => response,
        Err(e) if path.starts_with("/v1/messages") => anthropic::refuse(e, &headers),
        Err(e) => e.into_response(),
    }
}

async fn once_in(gateway: &Gateway, episode: Arc<Episode>, request: Request, next: Next) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let key = key_of(&parts.headers)?;
    // The route counts only what it answers; this reads before it, and may wait.
    let place = place(gateway, &gateway.0.arriving)?;
    let body = gateway.body(body).await?;
    let request = Hash::of(&[parts.uri.path().as_bytes(), b"\n", &body].concat());
    let run = |parts, body| next.run(Request::from_parts(parts, Body::from(body)));
    let Some(key) = key else {
        drop(place);
        let again = parts.headers.get(RETRY_COUNT).is_some_and(|count| count != "0");
        let unread = if again { episode.take_unread(request) } else { None };
        let keep = |reply| Unread { episode: episode.clone(), request, reply };
        return Ok(match unread {
            Some(reply) => replay_until_read(keep(Some(reply))),
            None => kept(Keep::UntilRead(keep(None)), run(parts, body).await).await,
        });
    };
    loop {
        match episode.take_turn(&key, request) {
            // The route says what became of the episode.
            Turn::EpisodeOver => {
                drop(place);
                return Ok(run(parts, body).await);
            }
            Turn::First(over) => {
                drop(place);
                let running = Running { episode, key: Some(key), _over: over };
                return Ok(kept(Keep::ForKey(running), run(parts, body).await).await);
            }
            // It never changes; it closes.
            Turn::Wait(mut over) => drop(over.changed().await),
            Turn::Again(reply) => return Ok(reply.into_replay()),
            Turn::AnotherRequest => {
                let message = format!("`idempotency-key`: {key:?} was used with another request of this episode");
                let error = ApiError::field("idempotency_key_reused", "idempotency-key", message);
                return Err(ApiError { status: StatusCode::UNPROCESSABLE_ENTITY, ..error });
            }
        }
    }
}

fn key_of(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(key) = headers.get(KEY) else { return Ok(None) };
    let key = key.to_str().map(str::trim).unwrap_or_default();
    if key.is_empty() || key.len() > KEY_LEN_MAX {
        return Err(ApiError::invalid("idempotency-key", "1 to 255 visible ASCII characters in this header"));
    }
    Ok(Some(key.to_owned()))
}

/// The response, which is kept as `keep` says once it is complete.
async fn kept(keep: Keep, response: Response) -> Response {
    let (parts, body) = response.into_parts();
    if !parts.status.is_success() {
        return Response::from_parts(parts, body);
    }
    let mut headers = parts.headers.clone();
    headers.remove(header::CONTENT_LENGTH);
    let reply = Reply { status: parts.status, headers, body: Bytes::new() };
    if let Some(end) = parts.extensions.get::<sse::StreamEnd>().cloned() {
        let events = Events { from: body.into_data_stream(), keep: Some(keep), reply, end, bytes: Vec::new() };
        let events = futures::stream::unfold(events, |mut events| async move { Some((events.next().await?, events)) });
        return Response::from_parts(parts, Body::from_stream(events));
    }
    // Whole and here already.
    let Ok(whole) = axum::body::to_bytes(body, usize::MAX).await else {
        let why = "the answer could not be written";
        return ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "answer_lost", why).into_response();
    };
    let reply = Reply { body: whole.clone(), ..reply };
    match keep {
        Keep::ForKey(running) => {
            running.complete(reply);
            Response::from_parts(parts, Body::from(whole))
        }
        Keep::UntilRead(mut unread) => {
            unread.reply = Some(reply);
            let mut response = until_read(unread);
            response.extensions_mut().extend(parts.extensions);
            response
        }
    }
}

/// A reply that counts as read when its body was taken.
fn until_read(mut unread: Unread) -> Response {
    let Some(Reply { status, headers, body }) = unread.reply.clone() else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let len = body.len();
    let body = futures::stream::once(async move {
        drop(unread.reply.take());
        Ok::<_, Infallible>(body)
    });
    let mut response = (status, headers, Body::from_stream(body)).into_response();
    response.headers_mut().insert(header::CONTENT_LENGTH, len.into());
    response
}

fn replay_until_read(unread: Unread) -> Response {
    let mut response = until_read(unread);
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    response
}

impl Reply {
    fn into_replay(self) -> Response {
        let mut response = (self.status, self.headers, self.body).into_response();
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        response
    }
}

/// A stream, and its events so far. The calls are recorded with the last one, so from then on the answer counts, whether or
/// not anybody reads its end.
struct Events {
    from: BodyDataStream,
    keep: Option<Keep>,
    reply: Reply,
    end: sse::StreamEnd,
    bytes: Vec<u8>,
}

impl Events {
    async fn next(&mut self) -> Option<Result<Bytes, axum::Error>> {
        let Some(chunk) = self.from.next().await else {
            if let Some(Keep::UntilRead(unread)) = &mut self.keep {
                unread.reply = None;
            }
            return None;
        };
        if let Ok(bytes) = &chunk {
            self.bytes.extend_from_slice(bytes);
        }
        if self.end.is_complete() {
            let reply = Reply { body: std::mem::take(&mut self.bytes).into(), ..self.reply.clone() };
            if let Some(Keep::UntilRead(unread)) = &mut self.keep {
                unread.reply = Some(reply);
            } else if let Some(Keep::ForKey(running)) = self.keep.take() {
                running.complete(reply);
            }
        }
        Some(chunk)
    }
}
