//! `POST /v1/chat/completions`, whole or streamed.

use crate::call::{Answer, Call, Caller, Progress, refuse_closed};
use crate::gateway::Gateway;
use crate::openai::ApiError;
use crate::openai::request::ChatRequest;
use crate::openai::response::{
    Call as CallOut, Choice, Chunk, ChunkChoice, Completion, Delta, Logprobs, Message, Usage,
};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use std::convert::Infallible;
use std::sync::Arc;

pub(super) async fn complete(
    State(gateway): State<Gateway>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let caller = gateway.caller(&headers)?;
    if let Caller::Episode(episode) = &caller {
        refuse_closed(episode, &episode.state().stage)?;
        if !gateway.0.backend.still_leased(episode.id()) {
            // The node's next `reap` closes it; until then nothing more is sampled for it.
            let message = format!("the lease of episode {} was lost; it is given to another", episode.id());
            return Err(ApiError::new(StatusCode::CONFLICT, "lease_lost", message));
        }
    }
    let permit = Arc::clone(&gateway.0.in_flight).try_acquire_owned().map_err(|_full| {
        let max = gateway.0.config.in_flight_max;
        ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many_calls",
            format!("{max} calls are being answered already"),
        )
    })?;
    let body = gateway.body(body).await?;
    let request = ChatRequest::parse(&body)?;
    let mut call = Call::begin(Arc::clone(&gateway.0), caller, request, permit).await?;
    if call.options.stream {
        return Ok(stream(call));
    }
    while call.advance().await? == Progress::More {}
    Ok(Json(whole(&call)).into_response())
}

impl Call {
    fn usage(&self) -> Usage {
        let completion_tokens = self.answers.iter().map(|a| a.completion_len).sum();
        Usage { prompt_tokens: self.prompt_len, completion_tokens, total_tokens: self.prompt_len + completion_tokens }
    }

    /// Names the weights that answered, which is what OpenAI's field is for.
    fn fingerprint(&self) -> Option<String> {
        self.answers.iter().filter_map(|a| a.version).max().map(|v| format!("starling-v{v}"))
    }
}

fn whole(call: &Call) -> Completion<'_> {
    Completion {
        id: &call.id,
        object: "chat.completion",
        created: call.created,
        model: call.model.as_str(),
        system_fingerprint: call.fingerprint(),
        choices: call.answers.iter().enumerate().map(|(i, answer)| choice(i, answer, call.options.logprobs)).collect(),
        usage: call.usage(),
    }
}

fn choice(index: usize, answer: &Answer, logprobs: bool) -> Choice<'_> {
    let content = (!answer.content.is_empty() || answer.calls.is_empty()).then_some(answer.content.as_str());
    let tool_calls = answer.calls.iter().map(|(id, call)| CallOut::new(None, id, call)).collect();
    Choice {
        index,
        message: Message { role: "assistant", content, refusal: None, tool_calls },
        logprobs: logprobs.then_some(Logprobs { content: &answer.token_logprobs, refusal: None }),
        finish_reason: answer.finish().unwrap_or("stop"),
    }
}

/// Server-sent events, written as the body is read. When the reader goes away the body is dropped, the call with
/// it.
fn stream(call: Call) -> Response {
    let state = EventStream { call, out: Vec::with_capacity(512), begun: false, over: false };
    let events = futures::stream::unfold(state, |mut state| async move {
        let bytes = state.next().await?;
        Some((Ok::<_, Infallible>(bytes), state))
    });
    let mut response = Body::from_stream(events).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

struct EventStream {
    call: Call,
    out: Vec<u8>,
    begun: bool,
    over: bool,
}

impl EventStream {
    async fn next(&mut self) -> Option<Bytes> {
        if !self.begun {
            self.begun = true;
            for index in 0..self.call.answers.len() {
                let delta = Delta { role: Some("assistant"), content: Some(""), tool_calls: None };
                self.chunk(&[ChunkChoice { index, delta, logprobs: None, finish_reason: None }], None);
            }
        }
        while self.out.is_empty() && !self.over {
            match self.call.advance().await {
                Ok(progress) => {
                    self.pieces();
                    if progress == Progress::Done {
                        self.finish();
                    }
                }
                Err(e) => {
                    // The status is sent already; clients raise on an event with `error`.
                    event(&mut self.out, &e.body());
                    self.over = true;
                }
            }
        }
        (!self.out.is_empty()).then(|| Bytes::from(std::mem::replace(&mut self.out, Vec::with_capacity(512))))
    }

    /// What the answers gained since the last time.
    fn pieces(&mut self) {
        for index in 0..self.call.answers.len() {
            let answer = &mut self.call.answers[index];
            if answer.shown_content == answer.content.len() && answer.shown_calls == answer.calls.len() {
                continue;
            }
            let content = (answer.shown_content < answer.content.len())
                .then(|| answer.content[answer.shown_content..].to_owned());
            let calls = answer.calls[answer.shown_calls..].to_vec();
            let first_call = answer.shown_calls;
            let tokens = std::mem::take(&mut answer.token_logprobs);
            answer.shown_content = answer.content.len();
            answer.shown_calls = answer.calls.len();
            let mut logprobs = self.call.options.logprobs.then_some(Logprobs { content: &tokens, refusal: None });
            if let Some(content) = &content {
                let delta = Delta { content: Some(content), ..Delta::default() };
                self.chunk(&[ChunkChoice { index, delta, logprobs: logprobs.take(), finish_reason: None }], None);
            }
            for (i, (id, call)) in calls.iter().enumerate() {
                let call = CallOut::new(Some(first_call + i), id, call);
                let delta = Delta { tool_calls: Some([call]), ..Delta::default() };
                self.chunk(&[ChunkChoice { index, delta, logprobs: logprobs.take(), finish_reason: None }], None);
            }
        }
    }

    fn finish(&mut self) {
        for index in 0..self.call.answers.len() {
            let answer = &mut self.call.answers[index];
            // Tokens that showed nothing, such as those of a stop string.
            let tokens = std::mem::take(&mut answer.token_logprobs);
            let finish_reason = answer.finish();
            let logprobs = (!tokens.is_empty()).then_some(Logprobs { content: &tokens, refusal: None });
            self.chunk(&[ChunkChoice { index, delta: Delta::default(), logprobs, finish_reason }], None);
        }
        if self.call.options.include_usage {
            self.chunk(&[], Some(self.call.usage()));
        }
        self.out.extend_from_slice(b"data: [DONE]\n\n");
        self.over = true;
    }

    fn chunk(&mut self, choices: &[ChunkChoice<'_>], usage: Option<Usage>) {
        let fingerprint = self.call.fingerprint();
        let chunk = Chunk {
            id: &self.call.id,
            object: "chat.completion.chunk",
            created: self.call.created,
            model: self.call.model.as_str(),
            system_fingerprint: fingerprint.as_deref(),
            choices,
            usage: self.call.options.include_usage.then_some(usage),
        };
        event(&mut self.out, &chunk);
    }
}

fn event(out: &mut Vec<u8>, body: &impl serde::Serialize) {
    out.extend_from_slice(b"data: ");
    // Into memory, of types that have a JSON form.
    let _ = serde_json::to_writer(&mut *out, body);
    out.extend_from_slice(b"\n\n");
}
