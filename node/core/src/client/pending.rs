//! What a client has asked of others and has no answer to yet, for those who wonder why nothing goes on.

use super::Inner;
use crate::watch::lock;
use starling_protocol::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Answers that come sooner are no waits worth telling.
const TOLD_AFTER: Duration = Duration::from_secs(1);

/// Requests under way: what is waited for, and since when.
#[derive(Debug, Default)]
pub(super) struct Requests {
    next: u64,
    open: BTreeMap<u64, (String, Timestamp)>,
}

impl Requests {
    /// One line for each kind of request, with the longest wait.
    pub(super) fn told(&self, now: Timestamp) -> Vec<String> {
        let mut longest: BTreeMap<&str, Duration> = BTreeMap::new();
        for (what, since) in self.open.values() {
            let waited = now.since(*since);
            if waited >= TOLD_AFTER {
                let longest = longest.entry(what).or_default();
                *longest = waited.max(*longest);
            }
        }
        longest.into_iter().map(|(what, waited)| format!("{what}, for {} s", waited.as_secs())).collect()
    }
}

/// A request under way; over when it is dropped.
pub(super) struct Pending {
    inner: Arc<Inner>,
    number: u64,
}

impl Pending {
    /// `what` is waited for, in words.
    pub(super) fn new(inner: &Arc<Inner>, what: String) -> Self {
        let now = (inner.core.clock())();
        let mut requests = lock(&inner.requests);
        let number = requests.next;
        requests.next += 1;
        requests.open.insert(number, (what, now));
        Self { inner: inner.clone(), number }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        lock(&self.inner.requests).open.remove(&self.number);
    }
}
