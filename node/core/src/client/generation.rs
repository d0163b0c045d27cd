//! An answer that outlives its servers.
//!
//! It runs on one leg, a stream at one server. When that server is lost (it left the mesh, its connection closed, its
//! stream broke or it failed), the next leg takes the prompt and all tokens so far, and the answer goes on: whoever
//! reads it sees a pause at most. When it is only silent for longer than it should be, a second leg is opened beside the
//! first; whichever brings a frame first goes on, the other is cancelled.
//!
//! A server signs for the tokens that it sampled itself, when it ends the answer. What lost servers streamed stands
//! before [`Leg::from`] of the last leg, under nobody's signature: context, not training. The generator's place in the
//! seed's stream goes along ([`Generate::drawn`]), so a continued answer is the one that the lost server would have given.

use super::Inner;
use super::leg::{Leg, LegEvent, Stopping};
use crate::watch::{self, lock};
use bytes::Bytes;
use starling_protocol::codec::encode;
use starling_protocol::rollout::{FinishReason, Receipt, TurnReceipt, receipt_body};
use starling_protocol::signed::Domain;
use starling_protocol::wire::{Generate, GenerateFrame, TokenFrame};
use starling_protocol::{ModelName, NodeId, PolicyVersion};
use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// A server that has the request to stop owes a receipt, no more: it is not waited for longer, since the agent waits.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// Pause before a server that failed this answer is asked again, and how often a server is looked for while there is
/// none: a model that a server has loaded changes its record and not the set of live nodes.
const RETRY: Duration = Duration::from_millis(250);

/// Why there is no answer, or no more of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GenerationError {
    /// Nobody announced the model. The caller's fault.
    #[error("model {0} is not on the mesh")]
    NoModel(ModelName),
    /// The request was refused and would be refused again, and why. The caller's fault.
    #[error("{0}")]
    Refused(String),
    /// No server took it, for as long as the client waits. The same request may succeed later.
    #[error("no server of model {model} took the answer on within {waited:?}: {why}")]
    NoServer {
        /// The model.
        model: ModelName,
        /// Since the last token, or the start.
        waited: Duration,
        /// What was tried last.
        why: String,
    },
    /// Servers have it and say nothing. The same request may succeed later.
    #[error("model {model}: {server} was silent for {waited:?}")]
    Silent {
        /// The model.
        model: ModelName,
        /// That has the call.
        server: NodeId,
        /// Since the last token, or the start.
        waited: Duration,
    },
}

/// What an answer brings.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerationEvent {
    /// Tokens, in order, from whichever server.
    Tokens(Vec<TokenFrame>),
    /// The answer is complete; nothing follows.
    End {
        /// Why.
        finish: FinishReason,
        /// The servers' word for it.
        receipt: Option<TurnReceipt>,
    },
}

/// See the module's text.
pub struct Generation {
    inner: Arc<Inner>,
    /// As asked for.
    request: Generate,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    versions: Vec<PolicyVersion>,
    /// The leg in use, then the one that hedges it.
    legs: Vec<Leg>,
    /// How often each server failed this answer.
    failures: BTreeMap<NodeId, u32>,
    /// What happened last to a leg, and when.
    last_loss: Option<(String, Instant)>,
    /// The last token, or the start.
    progress_at: Instant,
    stop: Option<Stop>,
    /// While there is no server.
    wait: Option<Wait>,
    members: watch::Receiver<u64>,
    connections: watch::Receiver<u64>,
    /// Came before the caller asked for it.
    ready: Option<GenerationEvent>,
    /// The caller works on an event: the time until it asks for the next one is nobody's silence.
    with_caller: bool,
    over: bool,
}

struct Stop {
    keep: usize,
    deadline: Instant,
    sending: Option<Stopping>,
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let legs: Vec<_> = self.legs.iter().map(|l| (l.server.short(), l.from)).collect();
        f.debug_struct("Generation").field("tokens", &self.tokens.len()).field("legs", &legs).finish_non_exhaustive()
    }
}

impl Generation {
    pub(super) fn new(inner: Arc<Inner>, request: Generate) -> Self {
        let (members, connections) = (inner.core.membership().watch(), inner.core.connections());
        Self {
            inner,
            request,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            versions: Vec::new(),
            legs: Vec::with_capacity(2),
            failures: BTreeMap::new(),
            last_loss: None,
            progress_at: Instant::now(),
            stop: None,
            wait: None,
            members,
            connections,
            ready: None,
            with_caller: false,
            over: false,
        }
    }

    /// Waits until some server has the request.
    pub(super) async fn opened(&mut self) -> Result<(), GenerationError> {
        while self.ready.is_none() && !self.legs.first().is_some_and(Leg::is_open) {
            self.ready = self.advance().await?;
        }
        Ok(())
    }

    /// The next event; `None` behind the end and behind an error. Cancel-safe.
    ///
    /// # Errors
    /// [`GenerationError`]; the tokens that came before are good.
    pub async fn next(&mut self) -> Option<Result<GenerationEvent, GenerationError>> {
        if self.over {
            return None;
        }
        if std::mem::take(&mut self.with_caller) {
            let now = Instant::now();
            self.progress_at = now;
            for leg in &mut self.legs {
                leg.hedge_at += now - leg.quiet_since;
                leg.quiet_since = now;
            }
        }
        let event = loop {
            if let Some(event) = self.ready.take() {
                break Ok(event);
            }
            match self.advance().await {
                Ok(event) => self.ready = event,
                Err(e) => break Err(e),
            }
        };
        self.with_caller = true;
        self.over = !matches!(event, Ok(GenerationEvent::Tokens(_)));
        if self.over {
            self.legs.clear();
            self.wait = None;
        }
        Some(event)
    }

    /// Ends the answer after its first `keep` tokens, all of which have been read. One more event comes: the end, with
    /// a receipt for exactly those tokens, or for none if their server is gone. Does nothing behind the end.
    pub fn stop(&mut self, keep: u32) {
        if self.over || self.stop.is_some() {
            return;
        }
        let keep = (keep as usize).min(self.tokens.len());
        // What was read came from the first leg or from those before it.
        self.legs.truncate(1);
        let sending = match self.legs.first_mut() {
            Some(leg) if keep > leg.from => leg.stop(u32::try_from(keep - leg.from).unwrap_or(u32::MAX)),
            _ => None,
        };
        if sending.is_none() {
            self.legs.clear();
        }
        // An end that was read ahead of the stop may cover more.
        self.ready = None;
        self.stop = Some(Stop { keep, deadline: Instant::now() + STOP_LIMIT, sending });
    }

    /// Lets one thing happen. Cancel-safe: what is awaited changes nothing before it is there.
    async fn advance(&mut self) -> Result<Option<GenerationEvent>, GenerationError> {
        if self.legs.is_empty() {
            if let Some(finish) = self.complete() {
                return Ok(Some(self.end(finish, None)));
            }
            self.seek().await?;
            return Ok(None);
        }
        let wake = self.wakes_at();
        let Self { legs, stop, members, connections, .. } = self;
        let sending = stop.as_mut().and_then(|s| s.sending.as_mut());
        let sent = async {
            match sending {
                Some(s) => s.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            (send, sent) = sent => {
                if let Some(stop) = &mut self.stop {
                    stop.sending = None;
                }
                match (sent, self.legs.first_mut()) {
                    (Ok(()), Some(leg)) => leg.set_opened(send),
                    (Ok(()), None) => {}
                    (Err(e), _) => self.lost(0, e.to_string()),
                }
            }
            (i, event) = next_event(legs) => return self.on_event(i, event),
            Ok(()) = members.changed() => self.drop_the_dead(),
            Ok(()) = connections.changed() => self.drop_the_dead(),
            () = sleep_until(wake) => self.on_silence()?,
        }
        Ok(None)
    }

    fn on_event(&mut self, i: usize, event: LegEvent) -> Result<Option<GenerationEvent>, GenerationError> {
        match event {
            LegEvent::Opened(send) => {
                self.legs[i].set_opened(send);
                // One that failed this answer before has yet to show that it takes it now.
                if !self.failures.contains_key(&self.legs[i].server) {
                    self.wait = None;
                }
            }
            LegEvent::Lost(why) => self.lost(i, why),
            LegEvent::Frame(GenerateFrame::Tokens(frames)) => return Ok(self.on_tokens(i, frames)),
            LegEvent::Frame(GenerateFrame::End { finish, tokens, receipt }) => {
                return Ok(self.on_end(i, finish, tokens, receipt));
            }
            // The first server's word counts: a hedge may meet one that cannot take what the first one can.
            LegEvent::Frame(GenerateFrame::Failed { retryable: false, reason }) if i == 0 => {
                return Err(GenerationError::Refused(reason));
            }
            LegEvent::Frame(GenerateFrame::Failed { reason, .. }) => {
                let why = format!("{}: {reason}", self.legs[i].server.short());
                self.lost(i, why);
            }
        }
        Ok(None)
    }

    fn on_tokens(&mut self, i: usize, frames: Vec<TokenFrame>) -> Option<GenerationEvent> {
        if frames.is_empty() || self.stop.is_some() {
            return None; // says nothing, or was sampled before the server heard of the stop
        }
        // No rollout with such a token could be sealed, and no server sends one that works as it should.
        let server = self.legs[i].server.short();
        if let Some(t) = frames.iter().find(|t| !t.logprob.is_finite() || t.logprob > 1e-3) {
            let why = format!("{server} gave token {} the logprob {}, expected at most 0", t.id, t.logprob);
            self.lost(i, why);
            return None;
        }
        if self.tokens.len() + frames.len() > self.request.max_tokens as usize {
            let why = format!("{server} sent more than the {} tokens asked for", self.request.max_tokens);
            self.lost(i, why);
            return None;
        }
        self.goes_on(i);
        for t in &frames {
            self.tokens.push(t.id);
            self.logprobs.push(t.logprob);
            self.versions.push(t.version);
        }
        Some(GenerationEvent::Tokens(frames))
    }

    fn on_end(&mut self, i: usize, finish: FinishReason, tokens: u32, receipt: Receipt) -> Option<GenerationEvent> {
        let (from, server) = (self.legs[i].from, self.legs[i].server);
        let upto = self.stop.as_ref().map_or(self.tokens.len(), |s| s.keep);
        let (covers, want) = (tokens as usize, upto - from);
        if self.stop.is_some() && covers > want {
            return None; // the turn had ended by itself before the server heard of the stop
        }
        if covers != want {
            self.lost(i, format!("{}'s end covers {covers} tokens, expected {want}", server.short()));
            return None;
        }
        let prompt: Vec<u32> = self.request.prompt.iter().chain(&self.tokens[..from]).copied().collect();
        let body = receipt_body(
            &self.request.model,
            &prompt,
            &self.tokens[from..upto],
            &self.logprobs[from..upto],
            &self.versions[from..upto],
        );
        let verifies = receipt.signature.signer == server
            && receipt.signature.verifies(&**self.inner.core.verifier(), Domain::Receipt, &body);
        if !verifies {
            tracing::warn!(server = %server.short(), "a server's receipt does not verify");
            self.lost(i, format!("{}'s receipt does not verify", server.short()));
            return None;
        }
        self.goes_on(i);
        let unreceipted_len = u32::try_from(from).unwrap_or(u32::MAX);
        Some(self.end(finish, Some(TurnReceipt { unreceipted_len, receipt })))
    }

    fn end(&mut self, finish: FinishReason, receipt: Option<TurnReceipt>) -> GenerationEvent {
        let len = self.stop.as_ref().map_or(self.tokens.len(), |s| s.keep);
        let unreceipted = receipt.as_ref().map_or(len as u64, |r| u64::from(r.unreceipted_len));
        self.inner.count(|c| c.unreceipted_tokens += unreceipted);
        GenerationEvent::End { finish, receipt }
    }

    /// Leg `i` brought a frame: it is the one that goes on, and the other one is cancelled.
    fn goes_on(&mut self, i: usize) {
        if self.legs.len() > 1 {
            let other = self.legs.remove(1 - i);
            if i == 1 {
                tracing::info!(from = %other.server.short(), to = %self.legs[0].server.short(), "an answer went on at another server");
                self.inner.servers.sample(other.server, !other.begun, other.quiet_since.elapsed());
                self.inner.count(|c| c.hedges_won += 1);
                *self.failures.entry(other.server).or_default() += 1;
            }
        }
        let now = Instant::now();
        let leg = &mut self.legs[0];
        self.inner.servers.sample(leg.server, !leg.begun, now - leg.quiet_since);
        leg.begun = true;
        leg.quiet_since = now;
        leg.hedge_at = now + self.inner.servers.deadline(leg.server, false);
        self.progress_at = now;
        self.wait = None;
    }

    fn lost(&mut self, i: usize, why: String) {
        let leg = self.legs.remove(i);
        tracing::info!(model = %self.request.model, server = %leg.server.short(), tokens = self.tokens.len(), %why, "an answer lost its server");
        *self.failures.entry(leg.server).or_default() += 1;
        self.last_loss = Some((why, Instant::now()));
        self.inner.count(|c| c.servers_lost += 1);
    }

    /// Gives up legs at servers that left the mesh or whose connection closed: nothing comes from there any more, and the
    /// transport itself may take its idle timeout (10 s with QUIC) to say so.
    fn drop_the_dead(&mut self) {
        let core = self.inner.core.clone();
        for i in (0..self.legs.len()).rev() {
            let (server, open) = (self.legs[i].server, self.legs[i].is_open());
            if server == core.node() {
                continue;
            }
            if !core.membership().is_live(server) {
                self.lost(i, format!("{} left the mesh", server.short()));
            } else if open && !core.transport().is_connected(server) {
                self.lost(i, format!("the connection to {} closed", server.short()));
            }
        }
    }

    /// When the next deadline passes.
    fn wakes_at(&self) -> Instant {
        match &self.stop {
            Some(stop) => stop.deadline,
            None => {
                let silent = self.progress_at + self.inner.config.silence_max;
                self.legs.iter().map(|l| l.hedge_at).min().map_or(silent, |at| at.min(silent))
            }
        }
    }

    fn on_silence(&mut self) -> Result<(), GenerationError> {
        let now = Instant::now();
        if self.stop.is_some() {
            self.lost(0, "no receipt came after the stop".into());
            return Ok(());
        }
        let waited = now - self.progress_at;
        if waited >= self.inner.config.silence_max {
            let (model, server) = (self.request.model.clone(), self.legs[0].server);
            return Err(GenerationError::Silent { model, server, waited });
        }
        let hedge_is_due = self.legs.get(1).is_some_and(|l| l.hedge_at <= now);
        // Each further look is twice as late: servers that all are busy get no more requests for it.
        for leg in self.legs.iter_mut().filter(|l| l.hedge_at <= now) {
            leg.hedge_at = now + (now - leg.quiet_since);
        }
        let busy: Vec<NodeId> = self.legs.iter().map(|l| l.server).collect();
        let others = self.inner.core.models().servers_of(&self.request.model);
        let others = others.into_iter().filter(|n| !busy.contains(n));
        let Some(server) = self.inner.servers.choose(others, &self.failures) else { return Ok(()) };
        if let Some(hedge) = self.legs.get(1) {
            // A hedge that is silent too makes room for a server that was not asked yet.
            if !hedge_is_due || self.failures.contains_key(&server) {
                return Ok(());
            }
            let why = format!("{} was silent too", hedge.server.short());
            self.lost(1, why);
        }
        tracing::info!(model = %self.request.model, silent = %busy[0].short(), also = %server.short(), ?waited, "a silent server is hedged");
        self.inner.count(|c| c.hedges += 1);
        self.open(server);
        Ok(())
    }

    fn open(&mut self, server: NodeId) {
        let leg = Leg::open(
            self.inner.core.transport().clone(),
            &self.inner.servers,
            server,
            self.continued(),
            self.tokens.len(),
        );
        self.legs.push(leg);
    }

    /// The request, continued behind the tokens so far.
    fn continued(&self) -> Bytes {
        let done = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        let prompt = self.request.prompt.iter().chain(&self.tokens).copied().collect();
        let (drawn, max_tokens) = (self.request.drawn.saturating_add(done), self.request.max_tokens - done);
        encode(&Generate { prompt, drawn, max_tokens, ..self.request.clone() }).into()
    }

    /// Why the answer is complete although no server said so: its server was lost behind the last token.
    fn complete(&self) -> Option<FinishReason> {
        let last = self.tokens.last();
        if self.stop.is_some() || last.is_some_and(|t| self.request.stop_token_ids.contains(t)) {
            Some(FinishReason::Stop)
        } else if self.tokens.len() >= self.request.max_tokens as usize {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Opens a leg at the best server as soon as there is one. One that failed this answer is asked again after a pause.
    async fn seek(&mut self) -> Result<(), GenerationError> {
        loop {
            let now = Instant::now();
            let model = &self.request.model;
            let found = self.inner.servers.choose(self.inner.core.models().servers_of(model), &self.failures);
            let again_at = self.last_loss.as_ref().map(|(_, at)| *at + RETRY);
            let paused = found.is_some_and(|s| self.failures.contains_key(&s)) && again_at.is_some_and(|at| at > now);
            if let Some(server) = found.filter(|_| !paused) {
                self.open(server);
                return Ok(());
            }
            let nobody = format!("a server of model {model}: no live one has it loaded");
            let why = match (&self.last_loss, found) {
                (Some((loss, _)), Some(_)) => format!("a server of model {model} that takes it: {loss}"),
                (Some((loss, _)), None) => format!("{nobody}; the last one was lost: {loss}"),
                (None, _) => nobody,
            };
            let waited = now - self.progress_at;
            if waited >= self.inner.config.server_wait {
                return Err(GenerationError::NoServer { model: model.clone(), waited, why });
            }
            if self.wait.as_ref().is_none_or(|w| w.why != why) {
                self.wait = Some(Wait::new(self.inner.clone(), why));
            }
            tokio::select! {
                biased;
                Ok(()) = self.members.changed() => {}
                () = sleep_until(now + RETRY) => {}
            }
        }
    }
}

/// The next event of whichever leg has one; the first leg's come first.
async fn next_event(legs: &mut [Leg]) -> (usize, LegEvent) {
    poll_fn(|cx| {
        for (i, leg) in legs.iter_mut().enumerate() {
            if let Poll::Ready(event) = leg.poll_event(cx) {
                return Poll::Ready((i, event));
            }
        }
        Poll::Pending
    })
    .await
}

/// Shows what an answer waits for, while it does.
struct Wait {
    inner: Arc<Inner>,
    why: String,
}

impl Wait {
    fn new(inner: Arc<Inner>, why: String) -> Self {
        tracing::warn!("an answer waits for {why}");
        *lock(&inner.waits).entry(why.clone()).or_default() += 1;
        Self { inner, why }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let mut waits = lock(&self.inner.waits);
        if let Some(n) = waits.get_mut(&self.why) {
            *n -= 1;
            if *n == 0 {
                waits.remove(&self.why);
            }
        }
    }
}
