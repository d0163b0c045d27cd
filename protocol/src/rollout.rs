//! The rollout: the sealed, immutable record of an episode, and its verification.
//!
//! `Rollout` ─seal▶ `SealedRollout` (bytes, id) ─verify▶ [`VerifiedRollout`]. Only the last one is trained on.

use crate::assignment::{Assignment, Purpose};
use crate::codec::{DecodeError, decode, encode};
use crate::ids::{EpisodeId, GroupId, JobId, ModelName, NodeId, PolicyVersion, RolloutId, TaskRef, Term};
use crate::planted::{self, Bug};
use crate::signed::{Domain, Signature, Signer, Verifier};
use crate::time::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// First bytes of every envelope.
pub const ENVELOPE_MAGIC: [u8; 4] = *b"STRL";
/// Format of the envelope and its body. 2: a turn may have tokens that no receipt covers.
pub const ENVELOPE_VERSION: u16 = 2;
/// Longest envelope: 4 timelines × 128 Ki tokens × 8 bytes = 4 MiB.
pub const ROLLOUT_LEN_BYTES_MAX: usize = 4 << 20;
/// Most timelines in an episode.
pub const TIMELINES_MAX: usize = 256;

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or a stop text.
    Stop,
    /// The token limit of the turn or of the context.
    Length,
    /// A complete tool call.
    ToolCalls,
}

/// One model's token sequence in an episode: what trains.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Token ids, prompt and answers in order.
    pub tokens: Vec<u32>,
    /// Same length; true where the token was sampled in this episode, a receipt covers it, and it trains. A token that
    /// several timelines share is true in one of them only.
    pub loss_mask: Vec<bool>,
    /// Same length; natural logarithm of the probability under the weights that sampled the token, at
    /// temperature 1 and without truncation; 0 where the mask is false.
    pub behaviour_logprobs: Vec<f32>,
    /// Same length; the version that sampled the token, 0 where the mask is false.
    pub policy_versions: Vec<PolicyVersion>,
}

/// The serving node's word for one turn: these tokens were sampled here, by this version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// Of [`receipt_body`].
    pub signature: Signature,
}

/// How far servers vouch for a completion. The server that ends a turn signs for the tokens that it sampled itself;
/// what servers streamed that were lost before their end comes first, and stands under nobody's signature.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnReceipt {
    /// The first so many tokens of the completion are not covered: to the signing server they were part of its prompt.
    pub unreceipted_len: u32,
    /// Over everything before as the prompt, and the rest of the completion.
    pub receipt: Receipt,
}

/// What a receipt signs: model, prompt, tokens, logprobs and versions of one turn.
#[must_use]
pub fn receipt_body(
    model: &ModelName,
    prompt: &[u32],
    tokens: &[u32],
    logprobs: &[f32],
    versions: &[PolicyVersion],
) -> Vec<u8> {
    encode(&(model, prompt, tokens, logprobs, versions))
}

/// One model call of the episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Timeline in which the call's tokens lie.
    pub timeline: u32,
    /// Prompt length in tokens: the call saw `tokens[..prompt_len]` of that timeline.
    pub prompt_len: u32,
    /// Sampled tokens, which follow the prompt; those without a receipt are among them.
    pub completion_len: u32,
    /// Why it ended.
    pub finish: FinishReason,
    /// Sampling temperature of the call.
    pub temperature: f32,
    /// Wall time of the call in milliseconds.
    pub duration_ms: u32,
    /// The servers' word; `None` when the last server was lost before it signed: then none of the turn's tokens train.
    pub receipt: Option<TurnReceipt>,
    /// Why this call did not continue an earlier timeline; `None` when it did, or was the first.
    pub fork_cause: Option<String>,
}

impl Turn {
    /// The tokens of its timeline that a server vouches for; empty when none does. Does not check that they fit.
    #[must_use]
    pub fn receipted(&self) -> Range<usize> {
        let end = self.prompt_len as usize + self.completion_len as usize;
        let unreceipted = self.receipt.as_ref().map_or(self.completion_len, |r| r.unreceipted_len);
        self.prompt_len as usize + unreceipted as usize..end
    }
}

/// The record of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// The job.
    pub job: JobId,
    /// The model.
    pub model: ModelName,
    /// The run.
    pub episode: EpisodeId,
    /// Its group.
    pub group: GroupId,
    /// Its task.
    pub task: TaskRef,
    /// Training or evaluation.
    pub purpose: Purpose,
    /// Term of the leader that gave the lease.
    pub lease_term: Term,
    /// The gateway that recorded it.
    pub gateway: NodeId,
    /// Who ran the agent, in words: the program's name or the caller's.
    pub agent: String,
    /// At least one, unless the agent made no call.
    pub timelines: Vec<Timeline>,
    /// Calls in the order in which they ended.
    pub turns: Vec<Turn>,
    /// The episode's reward; finite.
    pub reward: f32,
    /// Whatever else the agent reported; finite.
    pub metrics: BTreeMap<String, f32>,
    /// On the gateway's clock.
    pub started: Timestamp,
    /// On the gateway's clock.
    pub ended: Timestamp,
}

/// Why bytes are not a rollout that may be trained on. Permanent; whoever sealed it is at fault.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RolloutError {
    /// Not an envelope, or not its body.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Not this kind of file.
    #[error("rollout: expected magic {ENVELOPE_MAGIC:?} and version {ENVELOPE_VERSION}, got {magic:?} and {version}")]
    Format {
        /// First bytes.
        magic: [u8; 4],
        /// Version.
        version: u16,
    },
    /// The hash is not the one asked for.
    #[error("rollout {expected}: the bytes have hash {got}")]
    WrongHash {
        /// Asked for.
        expected: RolloutId,
        /// What came.
        got: RolloutId,
    },
    /// The gateway's signature does not verify.
    #[error("rollout of episode {episode}: signature by {signer} does not verify for gateway {gateway}")]
    BadSignature {
        /// The episode.
        episode: EpisodeId,
        /// Who sealed it.
        gateway: NodeId,
        /// Who signed.
        signer: NodeId,
    },
    /// A server's receipt does not verify.
    #[error("rollout of episode {episode}: turn {turn}: receipt by {signer} does not verify")]
    BadReceipt {
        /// The episode.
        episode: EpisodeId,
        /// Which turn.
        turn: usize,
        /// Who signed.
        signer: NodeId,
    },
    /// A field is out of range.
    #[error("rollout of episode {episode}: field `{field}`: expected {expected}, got {got}")]
    Field {
        /// The episode.
        episode: EpisodeId,
        /// Path of the field.
        field: String,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        got: String,
    },
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    magic: [u8; 4],
    version: u16,
    #[serde(with = "serde_bytes")]
    body: Vec<u8>,
    signature: Signature,
}

/// A rollout's immutable bytes and their address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedRollout {
    /// blake3 of `bytes`.
    pub id: RolloutId,
    /// The envelope.
    pub bytes: Vec<u8>,
}

/// A rollout that passed [`verify_rollout`].
#[derive(Clone, Debug, PartialEq)]
pub struct VerifiedRollout {
    /// Its address.
    pub id: RolloutId,
    /// What it says.
    pub rollout: Rollout,
}

impl VerifiedRollout {
    /// The oldest version that sampled a trained token; `None` when no token trains.
    #[must_use]
    pub fn oldest_version(&self) -> Option<PolicyVersion> {
        let sampled =
            |t: &Timeline| t.loss_mask.iter().zip(&t.policy_versions).filter(|(m, _)| **m).map(|(_, v)| *v).min();
        self.rollout.timelines.iter().filter_map(sampled).min()
    }
}

impl Rollout {
    /// An empty record for `assignment`, to be filled by the gateway.
    #[must_use]
    pub fn begin(assignment: &Assignment, gateway: NodeId, agent: String, now: Timestamp) -> Self {
        Self {
            job: assignment.job,
            model: assignment.model.clone(),
            episode: assignment.episode,
            group: assignment.group,
            task: assignment.task.clone(),
            purpose: assignment.purpose,
            lease_term: assignment.term,
            gateway,
            agent,
            timelines: Vec::new(),
            turns: Vec::new(),
            reward: 0.0,
            metrics: BTreeMap::new(),
            started: now,
            ended: now,
        }
    }

    /// Seals the record as `signer`, which must be [`Rollout::gateway`].
    ///
    /// # Errors
    /// [`RolloutError::Field`] when a field is out of range, so that nothing invalid is ever sealed.
    pub fn seal(&self, signer: &dyn Signer) -> Result<SealedRollout, RolloutError> {
        self.check()?;
        let body = encode(self);
        let signature = Signature::new(signer, Domain::Rollout, &body);
        let bytes = encode(&Envelope { magic: ENVELOPE_MAGIC, version: ENVELOPE_VERSION, body, signature });
        if bytes.len() > ROLLOUT_LEN_BYTES_MAX {
            return Err(self.field("timelines", "an envelope of at most 4 MiB", bytes.len()));
        }
        Ok(SealedRollout { id: RolloutId::of(&bytes), bytes })
    }

    fn field(&self, field: impl Into<String>, expected: &'static str, got: impl ToString) -> RolloutError {
        RolloutError::Field { episode: self.episode, field: field.into(), expected, got: got.to_string() }
    }

    fn check(&self) -> Result<(), RolloutError> {
        if !self.reward.is_finite() {
            return Err(self.field("reward", "a finite number", self.reward));
        }
        if let Some((k, v)) = self.metrics.iter().find(|(_, v)| !v.is_finite()) {
            return Err(self.field(format!("metrics.{k}"), "a finite number", v));
        }
        if self.timelines.len() > TIMELINES_MAX {
            return Err(self.field("timelines", "at most 256", self.timelines.len()));
        }
        for (i, t) in self.timelines.iter().enumerate() {
            let n = t.tokens.len();
            if t.loss_mask.len() != n || t.behaviour_logprobs.len() != n || t.policy_versions.len() != n {
                let got = format!(
                    "{n} tokens, {} mask, {} logprobs, {} versions",
                    t.loss_mask.len(),
                    t.behaviour_logprobs.len(),
                    t.policy_versions.len()
                );
                return Err(self.field(format!("timelines[{i}]"), "four lists of one length", got));
            }
            if let Some(j) = t.behaviour_logprobs.iter().position(|l| !l.is_finite() || *l > 1e-3) {
                let got = t.behaviour_logprobs[j];
                return Err(self.field(format!("timelines[{i}].behaviour_logprobs[{j}]"), "finite, at most 0", got));
            }
        }
        for (i, turn) in self.turns.iter().enumerate() {
            let fits = self
                .timelines
                .get(turn.timeline as usize)
                .is_some_and(|t| u64::from(turn.prompt_len) + u64::from(turn.completion_len) <= t.tokens.len() as u64);
            if !fits {
                return Err(self.field(format!("turns[{i}]"), "a span inside its timeline", turn.timeline));
            }
            if let Some(r) = turn.receipt.as_ref().filter(|r| r.unreceipted_len > turn.completion_len) {
                let expected = "at most the turn's completion_len";
                return Err(self.field(format!("turns[{i}].receipt.unreceipted_len"), expected, r.unreceipted_len));
            }
        }
        self.check_mask()
    }

    /// A token trains only where a receipt covers it. One pass over turns and tokens, however the turns overlap.
    fn check_mask(&self) -> Result<(), RolloutError> {
        // Receipted spans that begin, less those that end, before each token.
        let mut steps: Vec<Vec<i64>> = self.timelines.iter().map(|t| vec![0; t.tokens.len() + 1]).collect();
        for turn in &self.turns {
            let span = turn.receipted();
            let steps = &mut steps[turn.timeline as usize];
            steps[span.start] += 1;
            steps[span.end] -= 1;
        }
        for (i, (t, steps)) in self.timelines.iter().zip(&steps).enumerate() {
            let mut covered = 0;
            for (j, (trains, step)) in t.loss_mask.iter().zip(steps).enumerate() {
                covered += step;
                if *trains && covered == 0 {
                    let expected = "false: no receipt covers the token";
                    return Err(self.field(format!("timelines[{i}].loss_mask[{j}]"), expected, true));
                }
            }
        }
        Ok(())
    }

    fn check_receipts(&self, verifier: &dyn Verifier) -> Result<(), RolloutError> {
        for (i, turn) in self.turns.iter().enumerate() {
            let t = &self.timelines[turn.timeline as usize];
            let Some(r) = &turn.receipt else { continue };
            let Range { start: from, end: to } = turn.receipted();
            // A fork's shared tokens are masked out in all timelines but one; a receipt covers the turn in the
            // timeline that trains on it, where logprobs and versions stand.
            let body = receipt_body(
                &self.model,
                &t.tokens[..from],
                &t.tokens[from..to],
                &t.behaviour_logprobs[from..to],
                &t.policy_versions[from..to],
            );
            if !r.receipt.signature.verifies(verifier, Domain::Receipt, &body) {
                return Err(RolloutError::BadReceipt {
                    episode: self.episode,
                    turn: i,
                    signer: r.receipt.signature.signer,
                });
            }
        }
        Ok(())
    }
}

/// Checks hash, format, signature, receipts and every field of `bytes`, which should be rollout `id`.
///
/// # Errors
/// [`RolloutError`]; nothing that fails here may be stored as a rollout, counted or trained on.
pub fn verify_rollout(id: RolloutId, bytes: &[u8], verifier: &dyn Verifier) -> Result<VerifiedRollout, RolloutError> {
    let got = RolloutId::of(bytes);
    if got != id {
        return Err(RolloutError::WrongHash { expected: id, got });
    }
    let rollout = open_rollout(bytes, verifier)?;
    rollout.check()?;
    if !planted::has(Bug::SkipReceipts) {
        rollout.check_receipts(verifier)?;
    }
    Ok(VerifiedRollout { id, rollout })
}

/// Checks format and signature only, as a holder does that stores a rollout for others.
///
/// # Errors
/// [`RolloutError`] when it is not an envelope signed by its gateway.
fn open_rollout(bytes: &[u8], verifier: &dyn Verifier) -> Result<Rollout, RolloutError> {
    let (env, rollout) = open_envelope(bytes)?;
    check_signature(&env, &rollout, verifier)?;
    Ok(rollout)
}

/// Checks format and signature only, as a holder does that stores rollouts for others: one result for each, in order. The
/// signatures are verified together.
pub fn open_rollouts<B: AsRef<[u8]>>(many: &[B], verifier: &dyn Verifier) -> Vec<Result<Rollout, RolloutError>> {
    let opened: Vec<_> = many.iter().map(|bytes| open_envelope(bytes.as_ref())).collect();
    let signed: Vec<_> = opened.iter().flatten().map(|(env, _)| env.signature.of(Domain::Rollout, &env.body)).collect();
    let all_good = verifier.verify_all(&signed);
    let check = |(env, rollout): (Envelope, Rollout)| {
        if !all_good || env.signature.signer != rollout.gateway {
            check_signature(&env, &rollout, verifier)?;
        }
        Ok(rollout)
    };
    opened.into_iter().map(|opened| opened.and_then(check)).collect()
}

fn open_envelope(bytes: &[u8]) -> Result<(Envelope, Rollout), RolloutError> {
    let env: Envelope = decode("rollout envelope", bytes, ROLLOUT_LEN_BYTES_MAX)?;
    if env.magic != ENVELOPE_MAGIC || env.version != ENVELOPE_VERSION {
        return Err(RolloutError::Format { magic: env.magic, version: env.version });
    }
    let rollout: Rollout = decode("rollout", &env.body, ROLLOUT_LEN_BYTES_MAX)?;
    Ok((env, rollout))
}

fn check_signature(env: &Envelope, rollout: &Rollout, verifier: &dyn Verifier) -> Result<(), RolloutError> {
    if env.signature.signer != rollout.gateway || !env.signature.verifies(verifier, Domain::Rollout, &env.body) {
        return Err(RolloutError::BadSignature {
            episode: rollout.episode,
            gateway: rollout.gateway,
            signer: env.signature.signer,
        });
    }
    Ok(())
}

/// Reads a rollout from a store that verified it on the way in.
///
/// # Errors
/// [`RolloutError`] when the bytes are not an envelope.
pub fn read_rollout(bytes: &[u8]) -> Result<Rollout, RolloutError> {
    let env: Envelope = decode("rollout envelope", bytes, ROLLOUT_LEN_BYTES_MAX)?;
    Ok(decode("rollout", &env.body, ROLLOUT_LEN_BYTES_MAX)?)
}
