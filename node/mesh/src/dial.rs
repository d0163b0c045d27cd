//! Who is being dialled, who waits for it, and when to try again.

use libp2p::Multiaddr;
use libp2p::swarm::ConnectionId;
use starling_protocol::NodeId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Callers that may wait for one connection; as many as may have a call or a stream in flight, see `Limits`.
const WAITERS_MAX: usize = 192;
/// How long the peer may take to say who it is, once connected.
const IDENTIFY_LIMIT: Duration = Duration::from_secs(5);
/// Longest an attempt may last: looking the peer up (10 s), dialling twice (4 s each), identify.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(25);
/// First and longest pause before a bootstrap node is dialled again.
const BOOTSTRAP_BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// The same for peers of former connections.
const PEER_BACKOFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));

/// A caller that waits for a connection.
pub(crate) type Waiter = oneshot::Sender<Result<(), String>>;

/// How far an attempt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Dialling the addresses of the book.
    Dialling,
    /// Asking other peers where it is; next, what they say is dialled.
    Searching,
    /// Dialling what other peers said.
    DiallingFound,
    /// Connected; the peer has not said who it is.
    Identifying(Instant),
}

/// One attempt to connect to a peer.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) stage: Stage,
    pub(crate) started: Instant,
    /// The dial that runs; others, by Kademlia, may run too.
    pub(crate) dial: Option<ConnectionId>,
    /// What it dials.
    pub(crate) dialled: Vec<Multiaddr>,
    /// Addresses tried and why they failed, in order.
    pub(crate) failures: Vec<(String, String)>,
    waiters: Vec<Waiter>,
}

impl Attempt {
    /// All that was tried and why it failed.
    pub(crate) fn reason(&self) -> String {
        if self.failures.is_empty() {
            return "no address is known, and no connected peer could be asked for one".into();
        }
        let parts: Vec<_> = self.failures.iter().map(|(address, why)| format!("{address}: {why}")).collect();
        parts.join("; ")
    }

    /// Those of `addresses` that have not failed yet.
    pub(crate) fn untried(&self, addresses: &[Multiaddr]) -> Vec<Multiaddr> {
        let failed = |a: &Multiaddr| self.failures.iter().any(|(text, _)| *text == a.to_string());
        addresses.iter().filter(|a| !failed(a)).cloned().collect()
    }

    pub(crate) fn add_failure(&mut self, address: String, why: String) {
        if !self.failures.iter().any(|(a, w)| *a == address && *w == why) {
            self.failures.push((address, why));
        }
    }
}

/// When to try a peer again.
#[derive(Clone, Copy, Debug)]
struct Retry {
    at: Instant,
    pause: Duration,
}

/// All attempts, and the peers to try again.
#[derive(Debug, Default)]
pub(crate) struct Dials {
    attempts: BTreeMap<NodeId, Attempt>,
    retries: BTreeMap<NodeId, Retry>,
    bootstrap: BTreeSet<NodeId>,
}

impl Dials {
    pub(crate) fn new(bootstrap: impl IntoIterator<Item = NodeId>) -> Self {
        Self { bootstrap: bootstrap.into_iter().collect(), ..Self::default() }
    }

    pub(crate) fn bootstrap(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.bootstrap.iter().copied()
    }

    pub(crate) fn is_bootstrap(&self, node: NodeId) -> bool {
        self.bootstrap.contains(&node)
    }

    pub(crate) fn get_mut(&mut self, node: NodeId) -> Option<&mut Attempt> {
        self.attempts.get_mut(&node)
    }

    pub(crate) fn is_dialling(&self, node: NodeId) -> bool {
        self.attempts.contains_key(&node)
    }

    /// Adds a waiter to the attempt that runs for `node`, or begins one: then the caller must dial.
    pub(crate) fn begin(&mut self, node: NodeId, waiter: Option<Waiter>, now: Instant) -> bool {
        let fresh = !self.attempts.contains_key(&node);
        let attempt = self.attempts.entry(node).or_insert_with(|| Attempt {
            stage: Stage::Dialling,
            started: now,
            dial: None,
            dialled: Vec::new(),
            failures: Vec::new(),
            waiters: Vec::new(),
        });
        if let Some(waiter) = waiter {
            attempt.waiters.retain(|w| !w.is_closed());
            if attempt.waiters.len() < WAITERS_MAX {
                attempt.waiters.push(waiter);
            } else {
                let _ = waiter.send(Err(format!("{WAITERS_MAX} callers wait for this connection already")));
            }
        }
        fresh
    }

    /// The peer is connected and of our mesh.
    pub(crate) fn succeed(&mut self, node: NodeId) {
        self.retries.remove(&node);
        if let Some(attempt) = self.attempts.remove(&node) {
            attempt.waiters.into_iter().for_each(|w| drop(w.send(Ok(()))));
        }
    }

    /// Nothing more can be tried. Returns why, and after which pause it is tried again.
    pub(crate) fn fail(&mut self, node: NodeId, now: Instant) -> Option<(String, Duration)> {
        let attempt = self.attempts.remove(&node)?;
        let reason = attempt.reason();
        attempt.waiters.into_iter().for_each(|w| drop(w.send(Err(reason.clone()))));
        let (first, longest) = if self.is_bootstrap(node) { BOOTSTRAP_BACKOFF } else { PEER_BACKOFF };
        let pause = self.retries.get(&node).map_or(first, |r| (r.pause * 2).min(longest));
        self.retries.insert(node, Retry { at: now + pause, pause });
        Some((reason, pause))
    }

    /// Whether `node` may be dialled again without anybody asking for it.
    pub(crate) fn is_due(&self, node: NodeId, now: Instant) -> bool {
        !self.attempts.contains_key(&node) && self.retries.get(&node).is_none_or(|r| r.at <= now)
    }

    /// Attempts that take too long, with the cause to add.
    pub(crate) fn overdue(&self, now: Instant) -> Vec<(NodeId, &'static str)> {
        let cause = |a: &Attempt| match a.stage {
            Stage::Identifying(since) if now - since > IDENTIFY_LIMIT => {
                Some("connected, and the peer did not say who it is")
            }
            _ if now - a.started > ATTEMPT_LIMIT => Some("gave up after 25 s"),
            _ => None,
        };
        self.attempts.iter().filter_map(|(n, a)| Some((*n, cause(a)?))).collect()
    }

    /// Ends all attempts: the node shuts down.
    pub(crate) fn clear(&mut self) {
        self.attempts.clear();
        self.retries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId([1; 32]);

    #[test]
    fn the_reason_lists_every_address_once_and_pauses_grow_to_their_bound() {
        let (mut dials, now) = (Dials::new([NODE]), Instant::now());
        let (waiter, mut answer) = oneshot::channel();
        assert!(dials.begin(NODE, Some(waiter), now));
        assert!(!dials.begin(NODE, None, now), "runs already");
        let attempt = dials.get_mut(NODE).unwrap();
        attempt.add_failure("/ip4/1.2.3.4/tcp/1".into(), "refused".into());
        attempt.add_failure("/ip4/1.2.3.4/tcp/1".into(), "refused".into());
        attempt.add_failure("/ip4/1.2.3.4/tcp/2".into(), "timeout".into());
        let (reason, mut pause) = dials.fail(NODE, now).unwrap();
        assert_eq!(reason, "/ip4/1.2.3.4/tcp/1: refused; /ip4/1.2.3.4/tcp/2: timeout");
        assert_eq!(answer.try_recv().unwrap().unwrap_err(), reason);
        assert!(!dials.is_due(NODE, now));
        assert!(dials.is_due(NODE, now + pause));
        for _ in 0..20 {
            dials.begin(NODE, None, now);
            let next = dials.fail(NODE, now).unwrap().1;
            assert!(next >= pause);
            pause = next;
        }
        assert_eq!(pause, BOOTSTRAP_BACKOFF.1);
        dials.succeed(NODE);
        assert!(dials.is_due(NODE, now));
    }

    #[test]
    fn an_attempt_that_hangs_is_overdue_with_a_cause() {
        let (mut dials, now) = (Dials::new([]), Instant::now());
        dials.begin(NODE, None, now);
        assert!(dials.overdue(now + IDENTIFY_LIMIT * 2).is_empty());
        dials.get_mut(NODE).unwrap().stage = Stage::Identifying(now);
        assert!(dials.overdue(now + IDENTIFY_LIMIT * 2)[0].1.contains("did not say"));
    }
}
