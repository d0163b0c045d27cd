//! A scripted node, a notary for signatures, and a few ways to call the service.

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use futures::StreamExt;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use starling_gateway::null::{NullBackend, byte_format};
use starling_gateway::text::{ChatFormat, byte_model};
use starling_gateway::{
    AnswerEvent, Backend, BackendError, ClaimError, ClaimRequest, Gateway, GatewayConfig, GenerateStream, ModelInfo,
    SealError,
};
use starling_protocol::assignment::{Assignment, Purpose};
use starling_protocol::job::Sampling;
use starling_protocol::rollout::{Rollout, TurnReceipt, VerifiedRollout, verify_rollout};
use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::wire::{Generate, TokenFrame};
use starling_protocol::{EpisodeId, Hash, ModelName, NodeId, PolicyVersion, RolloutId, Timestamp};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tower::ServiceExt;

pub(crate) const MODEL: &str = "test/bytes";
pub(crate) const END: u32 = byte_model::END;

/// Signs with a shared secret.
pub(crate) struct Notary;

impl Signer for Notary {
    fn node_id(&self) -> NodeId {
        NodeId([7; 32])
    }
    fn sign(&self, message: &[u8]) -> Vec<u8> {
        let mut keyed = b"secret".to_vec();
        keyed.extend_from_slice(message);
        Hash::of(&keyed).0.repeat(2)
    }
}

impl Verifier for Notary {
    fn verify(&self, _: NodeId, message: &[u8], signature: &[u8]) -> bool {
        self.sign(message) == signature
    }
}

/// What the next generation does.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// Samples these tokens, and signs them.
    Say(Vec<u32>),
    /// Samples these tokens, then nothing.
    Hang(Vec<u32>),
    /// Samples these tokens, then fails.
    Fail(Vec<u32>, bool),
    /// Samples the first tokens, loses that server, and samples the others at the next one.
    Continued(Vec<u32>, Vec<u32>),
}

pub(crate) struct Node {
    null: NullBackend,
    answers: Arc<Mutex<VecDeque<Vec<u32>>>>,
    scripts: Mutex<VecDeque<Script>>,
    pub(crate) requests: Mutex<Vec<Generate>>,
    pub(crate) aborted: Mutex<Vec<String>>,
    /// Generations whose stream was dropped while they hung.
    pub(crate) cancelled: Arc<AtomicUsize>,
    pub(crate) leased: AtomicBool,
    pub(crate) seal_failures: AtomicUsize,
    pub(crate) wait: Mutex<Option<String>>,
    /// Tokens of the newest scripted answer.
    said: AtomicUsize,
}

/// The bytes of `text`, special tokens as in the byte model, and the end token.
pub(crate) fn say(text: &str) -> Script {
    let mut ids = byte_format(64).unwrap().encode(text).unwrap();
    ids.push(END);
    Script::Say(ids)
}

pub(crate) fn bytes(text: &str) -> Vec<u32> {
    byte_format(64).unwrap().encode(text).unwrap()
}

#[async_trait]
impl Backend for Node {
    fn node(&self) -> NodeId {
        self.null.node()
    }
    fn now(&self) -> Timestamp {
        self.null.now()
    }
    async fn claim(&self, filter: ClaimRequest) -> Result<Assignment, ClaimError> {
        if let Some(reason) = self.wait.lock().unwrap().clone() {
            return Err(ClaimError::Wait(reason));
        }
        self.null.claim(filter).await
    }
    async fn generate(&self, request: Generate) -> Result<GenerateStream, BackendError> {
        self.requests.lock().unwrap().push(request.clone());
        let script = self.scripts.lock().unwrap().pop_front().expect("a script for each generation");
        let frame = |id: &u32| {
            let token = TokenFrame { id: *id, logprob: -0.5, version: PolicyVersion(1), top: vec![] };
            Ok(AnswerEvent::Tokens(vec![token]))
        };
        match script {
            Script::Say(tokens) => {
                self.said.store(tokens.len(), Ordering::SeqCst);
                self.answers.lock().unwrap().push_back(tokens);
                self.null.generate(request).await
            }
            Script::Hang(tokens) => {
                struct Guard(Arc<AtomicUsize>);
                impl Drop for Guard {
                    fn drop(&mut self) {
                        self.0.fetch_add(1, Ordering::SeqCst);
                    }
                }
                let guard = Guard(Arc::clone(&self.cancelled));
                let frames: Vec<_> = tokens.iter().map(frame).collect();
                let hang = futures::stream::poll_fn(move |_| {
                    let _ = &guard;
                    std::task::Poll::Pending
                });
                Ok(GenerateStream::new(futures::stream::iter(frames).chain(hang), |_| {}))
            }
            Script::Continued(lost, rest) => {
                self.answers.lock().unwrap().push_back(rest);
                let prompt = request.prompt.iter().chain(&lost).copied().collect();
                let continued = self.null.generate(Generate { prompt, ..request }).await?;
                let frames: Vec<_> = lost.iter().map(frame).collect();
                let unreceipted_len = u32::try_from(lost.len()).unwrap();
                let continued = continued.map(move |event| match event? {
                    AnswerEvent::End { finish, receipt } => {
                        let receipt = receipt.map(|r| TurnReceipt { unreceipted_len, ..r });
                        Ok(AnswerEvent::End { finish, receipt })
                    }
                    tokens @ AnswerEvent::Tokens(_) => Ok(tokens),
                });
                Ok(GenerateStream::new(futures::stream::iter(frames).chain(continued), |_| {}))
            }
            Script::Fail(tokens, retryable) => {
                let mut frames: Vec<_> = tokens.iter().map(frame).collect();
                let reason = "the server went away".to_owned();
                frames.push(Err(if retryable {
                    BackendError::Unavailable(reason)
                } else {
                    BackendError::Failed(reason)
                }));
                Ok(GenerateStream::new(futures::stream::iter(frames), |_| {}))
            }
        }
    }
    async fn seal(&self, rollout: Rollout) -> Result<RolloutId, SealError> {
        let failures = self.seal_failures.load(Ordering::SeqCst);
        if failures > 0 {
            self.seal_failures.store(failures - 1, Ordering::SeqCst);
            return Err(SealError::Storage("only 1 of 2 holders answered".into()));
        }
        self.null.seal(rollout).await
    }
    async fn abort(&self, _: &Assignment, cause: String) {
        self.aborted.lock().unwrap().push(cause);
    }
    fn still_leased(&self, _: EpisodeId) -> bool {
        self.leased.load(Ordering::SeqCst)
    }
    fn models(&self) -> Vec<ModelInfo> {
        self.null.models()
    }
    async fn chat_format(&self, model: &ModelName) -> Result<Arc<ChatFormat>, BackendError> {
        self.null.chat_format(model).await
    }
}

pub(crate) struct World {
    pub(crate) node: Arc<Node>,
    pub(crate) gateway: Gateway,
    pub(crate) router: Router,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(GatewayConfig::default(), Purpose::Train, Sampling::default())
    }

    pub(crate) fn with(config: GatewayConfig, purpose: Purpose, sampling: Sampling) -> Self {
        let answers: Arc<Mutex<VecDeque<Vec<u32>>>> = Arc::default();
        let format = Arc::new(byte_format(1024).unwrap());
        let queue = Arc::clone(&answers);
        let null = NullBackend::new(Arc::new(Notary), ModelName::new(MODEL).unwrap(), format, vec![])
            .answering(move |_| queue.lock().unwrap().pop_front().unwrap())
            .assigning(purpose, sampling);
        let node = Arc::new(Node {
            null,
            answers,
            scripts: Mutex::default(),
            requests: Mutex::default(),
            aborted: Mutex::default(),
            cancelled: Arc::default(),
            leased: AtomicBool::new(true),
            seal_failures: AtomicUsize::new(0),
            wait: Mutex::default(),
            said: AtomicUsize::new(0),
        });
        let gateway = Gateway::new(Arc::clone(&node) as Arc<dyn Backend>, config);
        let router = gateway.router();
        Self { node, gateway, router }
    }

    pub(crate) fn script(&self, scripts: impl IntoIterator<Item = Script>) {
        self.node.scripts.lock().unwrap().extend(scripts);
    }

    pub(crate) fn last_request(&self) -> Generate {
        self.node.requests.lock().unwrap().last().unwrap().clone()
    }

    /// Tokens of the newest scripted answer, its end included.
    pub(crate) fn node_answer_len(&self) -> usize {
        self.node.said.load(Ordering::SeqCst)
    }

    pub(crate) async fn send(&self, method: &str, path: &str, key: Option<&str>, body: &str) -> (StatusCode, Value) {
        let mut request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or_else(|_| json!(String::from_utf8_lossy(&body))))
    }

    /// Sends with any headers; the answer's status, headers and text.
    pub(crate) async fn post(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> (StatusCode, HeaderMap, String) {
        let mut request = Request::post(path).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_string())).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (parts.status, parts.headers, String::from_utf8(body.to_vec()).unwrap())
    }

    /// A whole stream's events: their names, empty where they have none, and their data.
    pub(crate) async fn events(&self, path: &str, key: Option<&str>, body: &Value) -> Vec<(String, Value)> {
        let bearer = key.map(|key| format!("Bearer {key}"));
        let headers: Vec<_> = bearer.iter().map(|b| ("authorization", b.as_str())).collect();
        let (status, headers, text) = self.post(path, &headers, body).await;
        assert_eq!(status, 200, "{text}");
        assert_eq!(headers["content-type"], "text/event-stream");
        events(&text)
    }

    pub(crate) async fn begin(&self) -> Agent<'_> {
        let (status, episode) = self.send("POST", "/v1/episodes", None, r#"{"agent": "tester"}"#).await;
        assert_eq!(status, 200, "{episode}");
        Agent {
            world: self,
            id: episode["episode"].as_str().unwrap().into(),
            key: episode["api_key"].as_str().unwrap().into(),
            episode,
        }
    }

    /// The last sealed rollout, verified.
    pub(crate) fn rollout(&self) -> VerifiedRollout {
        let sealed = self.node.null.sealed().pop().unwrap();
        verify_rollout(sealed.id, &sealed.bytes, &Notary).unwrap()
    }

    /// Serves on a real socket, for as long as the test runs.
    pub(crate) async fn listen(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = self.router.clone();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        format!("http://{address}")
    }
}

/// Waits for a condition, five seconds at most.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not within 5 s: {what}");
}

/// An agent within its episode.
pub(crate) struct Agent<'w> {
    world: &'w World,
    pub(crate) id: String,
    pub(crate) key: String,
    pub(crate) episode: Value,
}

impl Agent<'_> {
    pub(crate) async fn chat(&self, body: Value) -> (StatusCode, Value) {
        self.world.send("POST", "/v1/chat/completions", Some(&self.key), &body.to_string()).await
    }

    /// One answer to `messages`, with whatever else the request says.
    pub(crate) async fn ask(&self, messages: Value, more: Value) -> Value {
        let (status, answer) = self.chat(request(messages, more)).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    pub(crate) async fn end(&self, body: &str) -> (StatusCode, Value) {
        self.world.send("POST", &format!("/v1/episodes/{}/end", self.id), Some(&self.key), body).await
    }

    pub(crate) async fn done(&self) -> VerifiedRollout {
        let (status, answer) = self.end(r#"{"reward": 1}"#).await;
        assert_eq!(status, 200, "{answer}");
        self.world.rollout()
    }
}

pub(crate) fn request(messages: Value, more: Value) -> Value {
    let mut body = json!({ "model": MODEL, "messages": messages });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub(crate) fn user(text: &str) -> Value {
    json!({ "role": "user", "content": text })
}

pub(crate) fn calc() -> Value {
    json!([{ "type": "function", "function": {
        "name": "calc", "description": "Calculates.",
        "parameters": { "type": "object", "properties": { "x": { "type": "string" } }, "required": ["x"] },
    } }])
}

pub(crate) fn code(answer: &Value) -> &str {
    answer["error"]["code"].as_str().unwrap_or("none")
}

/// The events of a stream; `[DONE]` as a text.
pub(crate) fn events(text: &str) -> Vec<(String, Value)> {
    let mut events = Vec::new();
    for block in text.split("\n\n").filter(|b| !b.is_empty() && !b.starts_with(':')) {
        let (name, data) = match block.strip_prefix("event: ") {
            Some(rest) => rest.split_once('\n').unwrap(),
            None => ("", block),
        };
        let data = data.strip_prefix("data: ").unwrap();
        let data = if data == "[DONE]" { json!(data) } else { serde_json::from_str(data).unwrap() };
        events.push((name.to_owned(), data));
    }
    events
}
