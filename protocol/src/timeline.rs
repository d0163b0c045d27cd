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
use crate::rollout::{FinishReason, Timeline, Turn, TurnReceipt};
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
    /// May be taken out: [`TimelineTree::end_call`] does not read it.
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
    /// The servers' word. Tokens that it does not cover are context: they stay in the timeline and do not train.
    pub receipt: Option<TurnReceipt>,
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

    /// Tokens at the start of the completion that no server vouches for.
    fn unreceipted_len(&self) -> usize {
        let len = self.completion.tokens.len();
        self.info.receipt.as_ref().map_or(len, |r| len.min(r.unreceipted_len as usize))
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
            Some(twin) => self.nodes[twin].prompt.iter().chain(new_prompt).copied().collect(),
            None => new_prompt.into(),
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
                let context = if trains { node.unreceipted_len() } else { node.completion.tokens.len() };
                let context_end = node.prompt_len + context;
                t.loss_mask.resize(context_end, false);
                t.behaviour_logprobs.resize(context_end, 0.0);
                t.policy_versions.resize(context_end, PolicyVersion(0));
                t.loss_mask.resize(t.tokens.len(), true);
                t.behaviour_logprobs.extend_from_slice(&node.completion.logprobs[context..]);
                t.policy_versions.extend_from_slice(&node.completion.versions[context..]);
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

    /// Leaves become timelines, calls become turns in the order in which they ended. Each receipted token
    /// trains in exactly one timeline, the one that its turn points to; elsewhere it is context.
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
mod tests {
    use super::*;
    use crate::assignment::{Assignment, Purpose};
    use crate::ids::{EpisodeId, GroupId, JobId, ModelName, NodeId, TaskRef, Term};
    use crate::job::Sampling;
    use crate::rollout::{Receipt, Rollout, RolloutError, open_rollouts, receipt_body, verify_rollout};
    use crate::signed::{Domain, Signature, Signer, Verifier};
    use crate::time::Timestamp;

    /// SplitMix64: enough to draw conversations.
    struct Draw(u64);

    impl Draw {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }
        fn below(&mut self, n: usize) -> usize {
            usize::try_from(self.next() % n as u64).unwrap()
        }
        fn chance(&mut self, percent: u64) -> bool {
            self.next() % 100 < percent
        }
    }

    /// A signature scheme for one node with a shared secret.
    struct Notary;

    impl Signer for Notary {
        fn node_id(&self) -> NodeId {
            NodeId([7; 32])
        }
        fn sign(&self, message: &[u8]) -> Vec<u8> {
            blake3::keyed_hash(&[9; 32], message).as_bytes().repeat(2)
        }
    }

    impl Verifier for Notary {
        fn verify(&self, _: NodeId, message: &[u8], signature: &[u8]) -> bool {
            self.sign(message) == signature
        }
    }

    type Message = CanonicalMessage<'static>;

    fn message(role: &'static str, text: impl Into<String>) -> Message {
        CanonicalMessage { role: role.into(), text: Cow::Owned(text.into()), ..CanonicalMessage::default() }
    }

    fn assignment() -> Assignment {
        Assignment {
            job: JobId::default(),
            model: ModelName::new("m").unwrap(),
            episode: EpisodeId([3; 16]),
            group: GroupId::default(),
            attempt: 0,
            task: TaskRef { set: "s".into(), index: 0, id: "t".into() },
            task_line: "{}".into(),
            purpose: Purpose::Train,
            policy_version: PolicyVersion(1),
            term: Term(1),
            seed: 0,
            sampling: Sampling::default(),
            lease_expires: Timestamp(0),
            lease_ttl_ms: 1000,
            replication: 1,
        }
    }

    /// Stands for template, tokenizer and engine. Sampled ids are a counter from one million, so each is unique.
    #[derive(Default)]
    struct World {
        tree: TimelineTree,
        sampled: u32,
        rendered: usize,
        /// Prompt and completion of every call, and how many of its tokens come from servers that were lost.
        calls: Vec<(Vec<u32>, Completion, usize)>,
    }

    impl World {
        fn render(&mut self, messages: &[Message]) -> Vec<u32> {
            let text = |m: &Message| m.text.bytes().map(u32::from).chain([1000]).collect::<Vec<_>>();
            self.rendered += messages.len();
            messages.iter().flat_map(text).chain([1001]).collect()
        }

        fn plan(&mut self, tools: u8, messages: &[Message]) -> (CallPlan, Vec<u32>) {
            let plan = self.tree.begin_call(Hash([tools; 32]), messages);
            let new = if plan.prompt_is_complete() { vec![] } else { self.render(&messages[plan.known_messages..]) };
            (plan, new)
        }

        fn finish(&mut self, plan: &CallPlan, new: &[u32], answer: &Message, len: usize, draw: &mut Draw) {
            self.finish_behind(0, plan, new, answer, len, draw);
        }

        /// The first `lost` tokens come from servers that were lost; when that is all, no server signs.
        fn finish_behind(
            &mut self,
            lost: usize,
            plan: &CallPlan,
            new: &[u32],
            answer: &Message,
            len: usize,
            draw: &mut Draw,
        ) {
            let prompt: Vec<u32> = plan.history_tokens.iter().chain(new).copied().collect();
            let mut completion = Completion::default();
            for _ in 0..len {
                completion.tokens.push(1_000_000 + self.sampled);
                completion.logprobs.push(-f32::from(u16::try_from(draw.below(900)).unwrap()) / 100.0);
                completion.versions.push(PolicyVersion(1 + draw.next() % 3));
                self.sampled += 1;
            }
            let seen: Vec<u32> = prompt.iter().chain(&completion.tokens[..lost]).copied().collect();
            let body = receipt_body(
                &assignment().model,
                &seen,
                &completion.tokens[lost..],
                &completion.logprobs[lost..],
                &completion.versions[lost..],
            );
            let receipt = TurnReceipt {
                unreceipted_len: u32::try_from(lost).unwrap(),
                receipt: Receipt { signature: Signature::new(&Notary, Domain::Receipt, &body) },
            };
            let info = TurnInfo {
                finish: FinishReason::Stop,
                temperature: 1.0,
                duration_ms: 1,
                receipt: (lost == 0 || lost < len).then_some(receipt),
            };
            self.calls.push((prompt, completion.clone(), lost));
            self.tree.end_call(plan, new, completion, answer, info);
        }

        fn call(&mut self, messages: &[Message], answer: &Message) -> CallPlan {
            let (plan, new) = self.plan(0, messages);
            self.finish(&plan, &new, answer, 3, &mut Draw(1));
            plan
        }

        fn rollout(&self) -> Rollout {
            let mut rollout = Rollout::begin(&assignment(), Notary.node_id(), "test".into(), Timestamp(0));
            (rollout.timelines, rollout.turns) = self.tree.timelines();
            rollout
        }

        /// Every property that a sealed episode must have.
        fn check(&self) {
            let (leaves, leaf_tokens) = (self.tree.leaves(), self.tree.leaf_tokens());
            let (timelines, turns) = self.tree.clone().into_timelines();
            assert_eq!(leaves, timelines.len());
            assert_eq!(leaf_tokens, timelines.iter().map(|t| t.tokens.len()).sum::<usize>());
            let mut trained = vec![0; self.sampled as usize];
            let mut expected = vec![1; self.sampled as usize];
            for (_, completion, lost) in &self.calls {
                completion.tokens[..*lost].iter().for_each(|t| expected[(t - 1_000_000) as usize] = 0);
            }
            for t in &timelines {
                for (i, &token) in t.tokens.iter().enumerate() {
                    if t.loss_mask[i] {
                        trained[(token - 1_000_000) as usize] += 1;
                    } else {
                        assert_eq!((t.behaviour_logprobs[i], t.policy_versions[i]), (0.0, PolicyVersion(0)));
                    }
                }
            }
            assert_eq!(trained, expected, "each receipted token trains once, and no other");
            assert_eq!(turns.len(), self.calls.len());
            for (turn, (prompt, completion, lost)) in turns.iter().zip(&self.calls) {
                let t = &timelines[turn.timeline as usize];
                let (from, to) = (turn.prompt_len as usize, (turn.prompt_len + turn.completion_len) as usize);
                assert_eq!(&t.tokens[..from], prompt);
                assert_eq!(&t.tokens[from..to], completion.tokens);
                let signed = from + lost;
                assert_eq!(turn.receipted(), signed..to);
                assert_eq!(t.behaviour_logprobs[signed..to], completion.logprobs[*lost..]);
                assert_eq!(t.policy_versions[signed..to], completion.versions[*lost..]);
                assert!(t.loss_mask[from..signed].iter().all(|m| !*m));
                assert!(t.loss_mask[signed..to].iter().all(|m| *m));
            }
            let sealed = self.rollout().seal(&Notary).unwrap();
            verify_rollout(sealed.id, &sealed.bytes, &Notary).unwrap();
        }
    }

    #[test]
    fn a_conversation_is_one_timeline_and_only_new_messages_are_rendered() {
        let mut world = World::default();
        let mut messages = vec![message("system", "s"), message("user", "q")];
        for i in 0..20 {
            let answer = message("assistant", format!("a{i}"));
            let plan = world.call(&messages, &answer);
            assert_eq!(plan.fork_cause, None);
            assert_eq!(plan.known_messages, if i == 0 { 0 } else { messages.len() - 1 });
            messages.extend([answer, message("tool", format!("r{i}"))]);
        }
        assert_eq!(world.rendered, 2 + 19);
        assert_eq!(world.tree.leaves(), 1);
        world.check();
    }

    #[test]
    fn each_departure_from_history_has_its_cause() {
        let mut world = World::default();
        let base = [message("system", "s"), message("user", "q"), message("assistant", "a"), message("user", "q2")];
        let mut next = base.to_vec();
        let _ = world.call(&base[..2], &base[2]);
        let _ = world.call(&base, &message("assistant", "a2"));
        let mut cause = |messages: &[Message]| world.call(messages, &message("assistant", "x")).fork_cause;

        assert_eq!(cause(&base).as_deref(), Some("the same prompt again"));
        next[3] = message("user", "other");
        assert_eq!(cause(&next).as_deref(), Some("history edited at message 3"));
        next[2] = message("assistant", "rewritten");
        assert_eq!(cause(&next).as_deref(), Some("history edited at message 2"));
        next[0] = message("system", "other");
        assert_eq!(cause(&next).as_deref(), Some("system changed"));
        assert_eq!(cause(&base[1..]).as_deref(), Some("history edited at message 0"));
        assert_eq!(cause(&base[..1]).as_deref(), Some("history cut after message 1"));
        let (plan, new) = world.plan(1, &base);
        assert_eq!(plan.fork_cause.as_deref(), Some("tools changed"));
        assert_eq!((plan.known_messages, plan.history_tokens.len()), (0, 0));
        world.finish(&plan, &new, &base[2], 1, &mut Draw(0));
        world.check();
    }

    #[test]
    fn tool_calls_and_their_arguments_are_part_of_history() {
        let mut world = World::default();
        let call = |arguments: &'static str| CanonicalMessage {
            tool_calls: vec![("calc".into(), arguments.into())],
            ..message("assistant", "")
        };
        let question = message("user", "q");
        let _ = world.call(std::slice::from_ref(&question), &call("{\"x\":1}"));
        let edited =
            world.call(&[question.clone(), call("{\"x\":2}"), message("tool", "2")], &message("assistant", "a"));
        assert_eq!(edited.fork_cause.as_deref(), Some("history edited at message 1"));
        let same = world.call(&[question, call("{\"x\":1}"), message("tool", "2")], &message("assistant", "a"));
        assert_eq!((same.known_messages, same.fork_cause), (2, None));
        world.check();
    }

    #[test]
    fn calls_side_by_side_fork_and_keep_the_first_ones_timeline() {
        let mut world = World::default();
        let prompt = [message("user", "q")];
        let (plan, new) = world.plan(0, &prompt);
        for i in 0..4 {
            world.finish(&plan, &new, &message("assistant", format!("a{i}")), 2, &mut Draw(i));
        }
        assert_eq!(world.tree.leaves(), 4);
        // The third answer is the one that goes on.
        let plan = world.call(&[prompt[0].clone(), message("assistant", "a2"), message("user", "q2")], &prompt[0]);
        assert_eq!((plan.known_messages, plan.fork_cause), (2, None));
        let (_, turns) = world.tree.timelines();
        let causes: Vec<_> = turns.iter().map(|t| t.fork_cause.as_deref()).collect();
        let parallel = Some("calls in parallel");
        assert_eq!(causes, [None, parallel, parallel, parallel, None]);
        assert_eq!(turns[2].timeline, turns[4].timeline);
        world.check();
    }

    #[test]
    fn a_discarded_history_starts_again_with_its_cause() {
        let mut world = World::default();
        let messages = [message("user", "q"), message("assistant", "a"), message("user", "q2")];
        let _ = world.call(&messages[..1], &messages[1]);
        let (mut plan, _) = world.plan(0, &messages);
        assert_eq!(plan.known_messages, 2);
        plan.discard_history("template rewrites history");
        let new = world.render(&messages);
        world.finish(&plan, &new, &messages[1], 2, &mut Draw(5));
        let (_, turns) = world.tree.timelines();
        assert_eq!(turns[1].fork_cause.as_deref(), Some("template rewrites history"));
        // The next call goes on from the new timeline.
        let mut longer = messages.to_vec();
        longer.extend([messages[1].clone(), message("user", "q3")]);
        assert_eq!(world.call(&longer, &messages[1]).known_messages, 4);
        world.check();
    }

    #[test]
    fn of_many_rollouts_only_those_that_their_gateway_did_not_sign_are_refused() {
        let mut world = World::default();
        let _plan = world.call(&[message("user", "q")], &message("assistant", "a"));
        let sealed = |reward: f32| Rollout { reward, ..world.rollout() }.seal(&Notary).unwrap().bytes;
        let mut many: Vec<Vec<u8>> = (0..6_u8).map(|i| sealed(f32::from(i))).collect();
        assert!(open_rollouts(&many, &Notary).iter().all(Result::is_ok));
        *many[2].last_mut().unwrap() ^= 1; // of the signature
        many[4].truncate(9);
        let opened = open_rollouts(&many, &Notary);
        let bad: Vec<usize> = (0..6).filter(|i| opened[*i].is_err()).collect();
        assert_eq!(bad, [2, 4]);
        assert!(matches!(opened[2], Err(RolloutError::BadSignature { .. })), "{:?}", opened[2]);
    }

    #[test]
    fn a_rollout_that_trains_on_tokens_without_a_receipt_is_refused() {
        let mut world = World::default();
        let messages = [message("user", "q"), message("assistant", "a"), message("user", "r")];
        let (plan, new) = world.plan(0, &messages[..1]);
        world.finish_behind(2, &plan, &new, &messages[1], 5, &mut Draw(1));
        let (plan, new) = world.plan(0, &messages);
        // The server was lost behind the last token: nobody signs for any of them.
        world.finish_behind(3, &plan, &new, &messages[1], 3, &mut Draw(2));
        world.check();
        let good = world.rollout();
        assert_eq!(good.turns[1].receipt, None);
        let (first, second) = (good.turns[0].prompt_len as usize, good.turns[1].prompt_len as usize);
        // Two tokens of a lost server, the prompt, and an answer without any receipt.
        for at in [first, first + 1, 0, second - 1, second, second + 2] {
            let mut bad = good.clone();
            bad.timelines[0].loss_mask[at] = true;
            match bad.seal(&Notary) {
                Err(RolloutError::Field { field, .. }) => assert_eq!(field, format!("timelines[0].loss_mask[{at}]")),
                other => panic!("token {at}: {other:?}"),
            }
        }
        // A receipt does not stretch over more tokens than its server signed for.
        let mut bad = good.clone();
        bad.turns[0].receipt.as_mut().unwrap().unreceipted_len = 0;
        bad.timelines[0].loss_mask[first] = true;
        let sealed = bad.seal(&Notary).unwrap();
        let refused = verify_rollout(sealed.id, &sealed.bytes, &Notary);
        assert!(matches!(refused, Err(RolloutError::BadReceipt { turn: 0, .. })), "{refused:?}");
        bad.turns[0].receipt.as_mut().unwrap().unreceipted_len = 6;
        assert!(bad.seal(&Notary).unwrap_err().to_string().contains("turns[0].receipt.unreceipted_len"));
    }

    /// Agents that go on, go back, edit, cut, retry, change tools, call in parallel and lose servers, for 300 seeds.
    #[test]
    fn any_episode_trains_each_receipted_token_once_and_verifies() {
        for seed in 0..300 {
            let mut draw = Draw(seed);
            let mut world = World::default();
            let mut conversations: Vec<Vec<Message>> = vec![vec![message("system", "s"), message("user", "q")]];
            for step in 0..draw.below(24) {
                let mut messages = conversations[draw.below(conversations.len())].clone();
                if draw.chance(10) {
                    let at = draw.below(messages.len());
                    messages[at] = message("user", format!("edited {seed} {step}"));
                }
                if draw.chance(10) {
                    messages.truncate(1 + draw.below(messages.len()));
                }
                let tools = u8::from(draw.chance(10));
                let (mut plan, mut new) = world.plan(tools, &messages);
                if draw.chance(5) && plan.known_messages > 0 {
                    plan.discard_history("template rewrites history");
                    new = world.render(&messages);
                }
                // What another call records meanwhile must not disturb the plan.
                let parallel = 1 + if draw.chance(25) { draw.below(4) } else { 0 };
                if draw.chance(15) {
                    let other = conversations[draw.below(conversations.len())].clone();
                    let _ = world.call(&other, &message("assistant", format!("meanwhile {step}")));
                }
                for i in 0..parallel {
                    let text = if draw.chance(20) { "same".into() } else { format!("a {step} {i}") };
                    let answer = message("assistant", text);
                    let len = draw.below(5);
                    let lost = if draw.chance(30) { draw.below(len + 1) } else { 0 };
                    world.finish_behind(lost, &plan, &new, &answer, len, &mut draw);
                    let mut longer = messages.clone();
                    longer.extend([answer, message("user", format!("q {step}"))]);
                    conversations.push(longer);
                }
            }
            world.check();
        }
    }
}
