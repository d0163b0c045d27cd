//! The timeline tree: an episode's model calls as exact token ids, without ever rendering history again.
//!
//! A chat API sends the whole conversation with every call. Rendering and tokenising it again would give
//! ids that the model never sampled (text → ids is not the inverse of ids → text), and the trainer would
//! learn from tokens with wrong probabilities. So the tree keeps, for each call, the ids that were sent
//! and the ids that were sampled, and finds by a hash chain over messages how much of a new conversation
//! it already knows:
//!
//! ```text
//! call: tools + messages ──▶ begin_call ──▶ CallPlan { known_messages, history_tokens }
//!       caller renders only messages[known_messages..] and the generation prompt, tokenises, generates
//!       new ids + sampled ids + the assistant's message ──▶ end_call ──▶ a node of the tree
//! end:  leaves ──▶ timelines, nodes ──▶ turns
//! ```
//!
//! The chain starts at the hash of the tool schema and takes in each message's role, content and tool
//! calls, so a system prompt or a tool that changed starts a new timeline, and the turn records why.

use crate::ids::{Hash, PolicyVersion};
use crate::rollout::{FinishReason, Receipt, Timeline, Turn};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A message as far as two conversations are compared by it.
///
/// Make it canonical before it comes here: one role name for one role, tool arguments in one spelling,
/// an assistant's text without the white space that clients trim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CanonicalMessage<'a> {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: Cow<'a, str>,
    /// The participant's name, where the template prints it.
    pub name: Option<Cow<'a, str>>,
    /// Content.
    pub text: Cow<'a, str>,
    /// The assistant's tool calls: name and arguments as JSON text.
    pub tool_calls: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    /// Which call a tool's message answers, where the template prints it.
    pub tool_call_id: Option<Cow<'a, str>>,
}

impl CanonicalMessage<'_> {
    /// The chain's next link: blake3 of the link before and of every field with its length.
    fn link(&self, before: &Hash) -> Hash {
        fn part(h: &mut blake3::Hasher, s: &str) {
            h.update(&(s.len() as u64).to_le_bytes());
            h.update(s.as_bytes());
        }
        fn option(h: &mut blake3::Hasher, s: Option<&str>) {
            h.update(&[u8::from(s.is_some())]);
            part(h, s.unwrap_or_default());
        }
        let mut h = blake3::Hasher::new();
        h.update(&before.0);
        part(&mut h, &self.role);
        option(&mut h, self.name.as_deref());
        part(&mut h, &self.text);
        option(&mut h, self.tool_call_id.as_deref());
        h.update(&(self.tool_calls.len() as u64).to_le_bytes());
        for (name, arguments) in &self.tool_calls {
            part(&mut h, name);
            part(&mut h, arguments);
        }
        Hash(*h.finalize().as_bytes())
    }
}

/// What the tree knows of a conversation that is about to be continued.
///
/// It stays valid while other calls end, so calls of an episode may run side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct CallPlan {
    /// The first so many messages are covered by [`CallPlan::history_tokens`].
    pub known_messages: usize,
    /// Exact ids so far; the caller appends the ids of the remaining messages and the generation prompt.
    pub history_tokens: Vec<u32>,
    /// Why no earlier timeline is continued; `None` when one is, or when this is the episode's first call.
    pub fork_cause: Option<String>,
    parent: Option<usize>,
    same_prompt: Option<usize>,
    first_is_system: bool,
    root: Hash,
    links: Vec<Hash>,
}

impl CallPlan {
    /// Whether `history_tokens` is the whole prompt, generation prompt included: nothing is left to render.
    #[must_use]
    pub fn prompt_is_complete(&self) -> bool {
        self.same_prompt.is_some()
    }

    /// Gives up on the known history, for instance because the chat template rewrites it: the caller renders
    /// all messages. Nothing happens where there is no history.
    pub fn discard_history(&mut self, cause: &str) {
        if self.known_messages > 0 {
            self.known_messages = 0;
            self.history_tokens.clear();
            self.parent = None;
            self.same_prompt = None;
            self.fork_cause = Some(cause.to_owned());
        }
    }
}

/// What was sampled in a call: three lists of one length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// Token ids, with the one that ended the turn if any.
    pub tokens: Vec<u32>,
    /// Behaviour logprobs.
    pub logprobs: Vec<f32>,
    /// Policy version of each token.
    pub versions: Vec<PolicyVersion>,
}

/// The rest of a [`Turn`].
#[derive(Clone, Debug, PartialEq)]
pub struct TurnInfo {
    /// Why it ended.
    pub finish: FinishReason,
    /// Sampling temperature.
    pub temperature: f32,
    /// Wall time in milliseconds.
    pub duration_ms: u32,
    /// The server's word over the whole prompt and the completion.
    pub receipt: Receipt,
}

/// One call: what it added to its parent's tokens.
#[derive(Clone, Debug)]
struct Node {
    parent: Option<usize>,
    /// The first call that continued this one; later ones are forks.
    first_child: Option<usize>,
    prompt: Arc<[u32]>,
    completion: Completion,
    /// Tokens of the whole path up to the end of this node's prompt.
    prompt_len: usize,
    info: TurnInfo,
    fork_cause: Option<String>,
}

impl Node {
    fn end(&self) -> usize {
        self.prompt_len + self.completion.tokens.len()
    }
}

/// The calls of one episode. See the module.
#[derive(Clone, Debug, Default)]
pub struct TimelineTree {
    nodes: Vec<Node>,
    /// Link of a conversation that ends in a sampled answer → the call that sampled it.
    after_turn: BTreeMap<Hash, usize>,
    /// Link of a conversation that was sent as a prompt → the call.
    after_prompt: BTreeMap<Hash, usize>,
    /// Every link seen: to say where a conversation departs from the known ones.
    seen: BTreeMap<Hash, ()>,
    /// Tool schemas seen, and whether a conversation under them began with a system message.
    roots: BTreeMap<Hash, bool>,
    leaves: usize,
    leaf_tokens: usize,
}

impl TimelineTree {
    /// Looks up a conversation. `tools_hash` is of the tool schema as the template prints it.
    pub fn begin_call(&self, tools_hash: Hash, messages: &[CanonicalMessage<'_>]) -> CallPlan {
        let mut links = Vec::with_capacity(messages.len());
        let mut link = tools_hash;
        for message in messages {
            link = message.link(&link);
            links.push(link);
        }
        let first_is_system = messages.first().is_some_and(|m| m.role == "system");
        let mut plan = CallPlan {
            known_messages: 0,
            history_tokens: Vec::new(),
            fork_cause: None,
            parent: None,
            same_prompt: None,
            first_is_system,
            root: tools_hash,
            links,
        };
        if let Some(&node) = plan.links.last().and_then(|last| self.after_prompt.get(last)) {
            plan.known_messages = messages.len();
            plan.parent = self.nodes[node].parent;
            plan.same_prompt = Some(node);
            plan.history_tokens = self.path(node);
            plan.history_tokens.truncate(self.nodes[node].prompt_len);
            plan.fork_cause = Some("the same prompt again".into());
            return plan;
        }
        let known = (0..plan.links.len()).rev().find_map(|i| Some((i + 1, *self.after_turn.get(&plan.links[i])?)));
        if let Some((known, node)) = known {
            plan.known_messages = known;
            plan.parent = Some(node);
            plan.history_tokens = self.path(node);
        }
        let continues = plan.parent.is_some_and(|p| self.nodes[p].first_child.is_none());
        if !continues && !self.nodes.is_empty() {
            plan.fork_cause = Some(self.why_new(&plan));
        }
        plan
    }

    /// Records a call that ended: `new_prompt` are the ids that the caller appended to the plan's history.
    /// Returns the turn's index.
    ///
    /// # Panics
    /// When the completion's lists differ in length: a bug of the caller.
    pub fn end_call(
        &mut self,
        plan: &CallPlan,
        new_prompt: &[u32],
        completion: Completion,
        assistant: &CanonicalMessage<'_>,
        info: TurnInfo,
    ) -> usize {
        let n = completion.tokens.len();
        assert!(
            completion.logprobs.len() == n && completion.versions.len() == n,
            "{n} tokens, {} logprobs, {} versions",
            completion.logprobs.len(),
            completion.versions.len()
        );
        let index = self.nodes.len();
        let history = plan.parent.map_or(0, |p| self.nodes[p].end());
        let prompt: Arc<[u32]> = match plan.same_prompt {
            Some(twin) if new_prompt.is_empty() => Arc::clone(&self.nodes[twin].prompt),
            _ => plan.history_tokens[history..].iter().chain(new_prompt).copied().collect(),
        };
        let added = prompt.len() + n;
        let forks = match plan.parent {
            Some(p) => self.nodes[p].first_child.is_some(),
            None => index > 0,
        };
        let fork_cause = plan.fork_cause.clone().or_else(|| forks.then(|| "calls in parallel".to_owned()));
        if let Some(parent) = plan.parent
            && !forks
        {
            self.nodes[parent].first_child = Some(index);
            self.leaf_tokens += added;
        } else {
            self.leaves += 1;
            self.leaf_tokens += history + added;
        }
        let last = plan.links.last().copied().unwrap_or(plan.root);
        let answer = assistant.link(&last);
        self.after_prompt.insert(last, index);
        self.after_turn.insert(answer, index);
        for link in plan.links[plan.known_messages..].iter().chain([&answer]) {
            self.seen.insert(*link, ());
        }
        *self.roots.entry(plan.root).or_default() |= plan.first_is_system;
        self.nodes.push(Node {
            parent: plan.parent,
            first_child: None,
            prompt_len: history + prompt.len(),
            prompt,
            completion,
            info,
            fork_cause,
        });
        index
    }

    /// Calls recorded.
    #[must_use]
    pub fn turns(&self) -> usize {
        self.nodes.len()
    }

    /// Timelines that the tree would seal.
    #[must_use]
    pub fn leaves(&self) -> usize {
        self.leaves
    }

    /// Tokens of all those timelines together; shared prefixes count once for each.
    #[must_use]
    pub fn leaf_tokens(&self) -> usize {
        self.leaf_tokens
    }

    /// The tree as a rollout stores it, see [`TimelineTree::into_timelines`]; the tree stays, so that a seal
    /// that failed can be tried again.
    #[must_use]
    pub fn timelines(&self) -> (Vec<Timeline>, Vec<Turn>) {
        // A child's index is above its parent's, so one pass from the end finds each call's training leaf:
        // its own, or that of the first call that continued it.
        let mut leaf_of: Vec<usize> = (0..self.nodes.len()).collect();
        for (i, node) in self.nodes.iter().enumerate().rev() {
            if let Some(child) = node.first_child {
                leaf_of[i] = leaf_of[child];
            }
        }
        let mut timeline_of = BTreeMap::new();
        let mut timelines = Vec::with_capacity(self.leaves);
        for leaf in (0..self.nodes.len()).filter(|&i| self.nodes[i].first_child.is_none()) {
            timeline_of.insert(leaf, timelines.len());
            let len = self.nodes[leaf].end();
            let mut t = Timeline {
                tokens: Vec::with_capacity(len),
                loss_mask: Vec::with_capacity(len),
                behaviour_logprobs: Vec::with_capacity(len),
                policy_versions: Vec::with_capacity(len),
            };
            for i in self.ancestry(leaf) {
                let (node, trains) = (&self.nodes[i], leaf_of[i] == leaf);
                t.tokens.extend_from_slice(&node.prompt);
                t.loss_mask.resize(t.tokens.len(), false);
                t.behaviour_logprobs.resize(t.tokens.len(), 0.0);
                t.policy_versions.resize(t.tokens.len(), PolicyVersion(0));
                t.tokens.extend_from_slice(&node.completion.tokens);
                t.loss_mask.resize(t.tokens.len(), trains);
                if trains {
                    t.behaviour_logprobs.extend_from_slice(&node.completion.logprobs);
                    t.policy_versions.extend_from_slice(&node.completion.versions);
                } else {
                    t.behaviour_logprobs.resize(t.tokens.len(), 0.0);
                    t.policy_versions.resize(t.tokens.len(), PolicyVersion(0));
                }
            }
            timelines.push(t);
        }
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let turns = self.nodes.iter().enumerate().map(|(i, node)| Turn {
            timeline: narrow(timeline_of[&leaf_of[i]]),
            prompt_len: narrow(node.prompt_len),
            completion_len: narrow(node.completion.tokens.len()),
            finish: node.info.finish,
            temperature: node.info.temperature,
            duration_ms: node.info.duration_ms,
            receipt: node.info.receipt.clone(),
            fork_cause: node.fork_cause.clone(),
        });
        (timelines, turns.collect())
    }

    /// Leaves become timelines, calls become turns in the order in which they ended. Each sampled token trains
    /// in exactly one timeline, the one that its turn points to; elsewhere it is context.
    #[must_use]
    pub fn into_timelines(self) -> (Vec<Timeline>, Vec<Turn>) {
        self.timelines()
    }

    /// From the first call to `node`.
    fn ancestry(&self, node: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(node), |&i| self.nodes[i].parent).collect();
        path.reverse();
        path
    }

    fn path(&self, node: usize) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.nodes[node].end() + 64);
        for i in self.ancestry(node) {
            tokens.extend_from_slice(&self.nodes[i].prompt);
            tokens.extend_from_slice(&self.nodes[i].completion.tokens);
        }
        tokens
    }

    /// Where a conversation that continues no leaf departs from all known ones.
    fn why_new(&self, plan: &CallPlan) -> String {
        let Some(&begins_with_system) = self.roots.get(&plan.root) else {
            return "tools changed".into();
        };
        let same = plan.links.iter().take_while(|l| self.seen.contains_key(l)).count();
        if same == plan.links.len() {
            format!("history cut after message {same}")
        } else if same == 0 && plan.first_is_system && begins_with_system {
            "system changed".into()
        } else {
            format!("history edited at message {same}")
        }
    }
}

#[cfg(test)]
mod tests;
