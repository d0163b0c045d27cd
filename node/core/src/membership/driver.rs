//! The task that keeps time: probes, gossip, suspicions, comparisons, knocking.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::join_all;
use rand::RngExt;
use starling_protocol::NodeId;
use starling_protocol::codec::encode;
use starling_protocol::wire::{Gossip, Topic};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::state::Version;
use super::wire::{Frame, News, Relayed};
use super::{Inner, MembershipConfig};
use crate::runtime::spawn;
use crate::watch::lock;

/// Changes are told this often while there are any.
const GOSSIP_PERIOD: Duration = Duration::from_millis(200);
/// To this many members each time.
const GOSSIP_FANOUT: usize = 3;
/// Changes in one gossip call: 256 × 40 bytes is 10 KiB. With period and fanout a node sends 3,840 claims a second at
/// most, so 5,000 changes, told 13 times each, are through in 17 s.
const GOSSIP_CLAIMS: usize = 256;
/// Changes that travel with a probe and with every answer: 1.2 KiB.
pub(super) const PIGGYBACK_CLAIMS: usize = 30;
/// Calls of the driver's under way, besides probes: a dead peer's end after [`CALL_LIMIT`].
const CALLS_MAX: usize = 64;
/// How long such a call may take.
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// Members asked to probe one that did not answer (SWIM's k).
const RELAYS: usize = 3;
/// Doubted members probed at once, besides the one whose turn it is.
const DOUBTED_PROBES: usize = 3;
/// Peers announced to at once while this node knows no member.
const ANNOUNCE_FANOUT: usize = 3;
/// Connected strangers that are greeted at once; others follow the next time.
const GREETINGS_MAX: usize = 4;
/// While the last comparison found a difference, tables are compared again after this time for each
/// [`SYNC_AGAIN_NODES`] nodes, at most at every beat. What a large mesh is just being told it must not be sent as well.
const SYNC_AGAIN: Duration = Duration::from_secs(1);
const SYNC_AGAIN_NODES: usize = 1000;
/// The first publication of a record waits up to this long for each member, so that a crowd that joins at once does
/// not publish at once: 1,000 nodes spread over 5 s.
const FIRST_RECORD_SPREAD: Duration = Duration::from_millis(5);
/// Members that are told goodbye, and how long that may take.
const GOODBYES: usize = 8;
const GOODBYE_LIMIT: Duration = Duration::from_millis(400);

pub(super) struct Driver {
    inner: Weak<Inner>,
    config: MembershipConfig,
    calls: Arc<Semaphore>,
    announced: usize,
    probe_at: Instant,
    gossip_at: Instant,
    seek_at: Instant,
    merge_at: Instant,
    sync_at: Instant,
    synced_at: Instant,
    /// When the own record is published to a mesh that this node just joined.
    introduce_at: Option<Instant>,
    alone: bool,
}

impl Driver {
    pub(super) fn new(inner: &Arc<Inner>, config: MembershipConfig) -> Self {
        let now = Instant::now();
        // The first turns of nodes that start together spread over a period.
        let (probe, sync) = {
            let mut swim = lock(&inner.swim);
            (swim.rng().random_range(0.0..1.0), swim.rng().random_range(0.0..1.0))
        };
        Self {
            inner: Arc::downgrade(inner),
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
            announced: 0,
            probe_at: now + config.probe_period.mul_f64(probe),
            gossip_at: now,
            seek_at: now,
            merge_at: now + config.merge_every,
            sync_at: now + config.record_beat.mul_f64(sync),
            synced_at: now,
            introduce_at: None,
            alone: true,
            config,
        }
    }

    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        loop {
            let Some((wake_at, inner)) = self.next_wake() else { return };
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                () = inner.nudge.notified() => {}
                () = sleep_until(wake_at) => {}
            }
            self.turn(&inner);
        }
        self.say_goodbye().await;
    }

    fn next_wake(&self) -> Option<(Instant, Arc<Inner>)> {
        let inner = self.inner.upgrade()?;
        let mut wake_at = self.probe_at.min(self.merge_at).min(self.sync_at);
        {
            let swim = lock(&inner.swim);
            if swim.table.live() == 1 {
                wake_at = wake_at.min(self.seek_at);
            } else if swim.has_news() {
                wake_at = wake_at.min(self.gossip_at);
            } else {
                inner.gossip_sleeps.store(true, Ordering::Release);
            }
            wake_at = swim.next_deadline().map_or(wake_at, |d| wake_at.min(d));
        }
        wake_at = self.introduce_at.map_or(wake_at, |at| wake_at.min(at));
        Some((wake_at, inner))
    }

    /// Does what is due.
    fn turn(&mut self, inner: &Arc<Inner>) {
        let now = Instant::now();
        let (live, unrecorded) = {
            let mut swim = lock(&inner.swim);
            swim.expire(now);
            inner.tell(&mut swim);
            (swim.table.live(), swim.table.unrecorded())
        };
        if std::mem::replace(&mut self.alone, live == 1) && live > 1 {
            self.on_company(inner, now, live);
        }
        if now >= self.probe_at {
            self.probe(inner, now);
        }
        if now >= self.gossip_at && live > 1 {
            self.gossip(inner, now);
        }
        if now >= self.seek_at && live == 1 {
            self.seek_at = now + self.config.announce_every;
            self.seek_members(inner);
        }
        if now >= self.merge_at {
            self.merge_at = now + self.config.merge_every;
            self.merge(inner);
        }
        if inner.differs.swap(false, Ordering::AcqRel) || unrecorded > 0 {
            let thousands = u32::try_from(live.div_ceil(SYNC_AGAIN_NODES)).unwrap_or(u32::MAX);
            self.sync_at = self.sync_at.min(self.synced_at + SYNC_AGAIN * thousands).max(now);
        }
        if now >= self.sync_at {
            (self.sync_at, self.synced_at) = (now + self.config.record_beat, now);
            self.sync(inner);
        }
        if self.introduce_at.is_some_and(|at| now >= at) {
            self.introduce_at = None;
            let own = lock(&inner.swim).table.get(inner.node).and_then(|r| r.known.clone());
            // Of others nobody decides anything by their record: a crowd of clients that told everyone at once would
            // be n² records, each six times. Whom they join has theirs, and tables are compared.
            if let Some(own) = own.filter(|k| k.record.holds_rollouts()) {
                inner.transport.0.publish(Topic::Nodes, encode(&Gossip::Node(own.signed.clone())));
            }
        }
    }

    /// The first member is met: the tables are compared soon, and the mesh learns of a new holder.
    fn on_company(&mut self, inner: &Inner, now: Instant, live: usize) {
        let (soon, spread) = {
            let mut swim = lock(&inner.swim);
            (swim.rng().random_range(0.0..1.0), swim.rng().random_range(0.0..1.0))
        };
        let members = u32::try_from(live).unwrap_or(u32::MAX);
        self.sync_at = self.sync_at.min(now + SYNC_AGAIN.mul_f64(soon));
        self.introduce_at = Some(now + GOSSIP_PERIOD + (FIRST_RECORD_SPREAD * members).mul_f64(spread));
    }

    /// Spawns a call, unless too many are under way.
    fn spawn_call(&self, call: impl Future<Output = ()> + Send + 'static) {
        let Ok(permit) = self.calls.clone().try_acquire_owned() else {
            tracing::debug!("not sent: {CALLS_MAX} calls of the membership are under way");
            return;
        };
        drop(spawn(async move {
            call.await;
            drop(permit);
        }));
    }

    fn probe(&mut self, inner: &Arc<Inner>, now: Instant) {
        let (targets, multiplier) = {
            let mut swim = lock(&inner.swim);
            let late = now.duration_since(self.probe_at) > self.config.probe_period;
            if late {
                swim.health.worse(1); // this process is starved: what it did not hear says nothing about others
            }
            let mut targets: Vec<_> = swim.next_target().into_iter().collect();
            while swim.has_doubts() && targets.len() <= DOUBTED_PROBES {
                targets.extend(swim.next_target());
            }
            (targets, swim.health.multiplier())
        };
        let (limit, period) = (self.config.probe_timeout * multiplier, self.config.probe_period * multiplier);
        self.probe_at = now + period;
        for (target, version) in targets {
            drop(spawn(probe(inner.clone(), target, version, limit, period)));
        }
    }

    fn gossip(&mut self, inner: &Arc<Inner>, now: Instant) {
        let mut swim = lock(&inner.swim);
        if !swim.has_news() {
            return;
        }
        self.gossip_at = now + GOSSIP_PERIOD;
        for peer in swim.some_live(GOSSIP_FANOUT, inner.node) {
            let news = swim.news_for(peer, GOSSIP_CLAIMS);
            if news.claims.len() == 0 {
                break;
            }
            let inner = inner.clone();
            self.spawn_call(async move { inner.exchange_news(peer, &Frame::Gossip(news), CALL_LIMIT).await });
        }
    }

    /// While no member is known: announces to the seeds, to whoever is connected and to whom others named, in turn.
    fn seek_members(&mut self, inner: &Arc<Inner>) {
        let mut peers = self.config.seeds.clone();
        peers.extend(inner.transport.0.connected());
        peers.extend(std::mem::take(&mut *lock(&inner.named)));
        peers.sort_unstable();
        peers.dedup();
        peers.retain(|p| *p != inner.node);
        for i in 0..peers.len().min(ANNOUNCE_FANOUT) {
            self.join(inner, peers[(self.announced + i) % peers.len()]);
        }
        self.announced += ANNOUNCE_FANOUT;
    }

    fn join(&self, inner: &Arc<Inner>, peer: NodeId) {
        let inner = inner.clone();
        self.spawn_call(async move { inner.join(peer, CALL_LIMIT).await });
    }

    /// How two meshes become one: greets connected nodes that are no members, and knocks on one that was declared
    /// dead. A node's share is bounded, and in a mesh cut in halves of n nodes each 2·n knocks go out every
    /// `merge_every`.
    fn merge(&self, inner: &Arc<Inner>) {
        let (strangers, dead) = {
            let mut swim = lock(&inner.swim);
            let mut strangers = lock(&inner.strangers);
            strangers.retain(|p| !swim.table.is_live(*p) && inner.transport.0.is_connected(*p));
            (strangers.iter().take(GREETINGS_MAX).copied().collect::<Vec<_>>(), swim.some_dead())
        };
        for peer in strangers {
            self.join(inner, peer);
        }
        if let Some(peer) = dead {
            let inner = inner.clone();
            self.spawn_call(async move {
                let news = lock(&inner.swim).news_for(peer, PIGGYBACK_CLAIMS);
                inner.exchange_news(peer, &Frame::Ping(news), CALL_LIMIT).await;
            });
        }
    }

    fn sync(&self, inner: &Arc<Inner>) {
        let peer = lock(&inner.swim).some_live(1, inner.node).pop();
        if let Some(peer) = peer {
            let inner = inner.clone();
            self.spawn_call(async move { inner.compare(peer, CALL_LIMIT).await });
        }
    }

    /// Tells some members that this node leaves, so that they need not find out.
    async fn say_goodbye(self) {
        let Some(inner) = self.inner.upgrade() else { return };
        let frames = {
            let mut swim = lock(&inner.swim);
            swim.leave(Instant::now());
            let peers = swim.some_live(GOODBYES, inner.node);
            let of = |peer| (peer, Frame::Gossip(swim.news_for(peer, PIGGYBACK_CLAIMS)));
            peers.into_iter().map(of).collect::<Vec<_>>()
        };
        let calls = frames.iter().map(|(peer, frame)| inner.exchange_news(*peer, frame, GOODBYE_LIMIT));
        join_all(calls).await;
    }
}

/// Probes a member: directly, then through others.
async fn probe(inner: Arc<Inner>, target: NodeId, version: Version, limit: Duration, period: Duration) {
    let started = Instant::now();
    let mut answered = inner.ping(target, limit).await;
    let mut silent = 0;
    if !answered {
        if started.elapsed() > limit + limit / 2 {
            lock(&inner.swim).health.worse(1); // not even this node's own timer came in time
            return;
        }
        (answered, silent) = ask_others(&inner, target, started + period).await;
    }
    let mut swim = lock(&inner.swim);
    swim.probed(Instant::now(), target, version, answered, silent);
    inner.tell(&mut swim);
}

/// Returns whether `target` answered anyone, and how many of those asked said nothing at all.
async fn ask_others(inner: &Arc<Inner>, target: NodeId, until: Instant) -> (bool, u32) {
    let relays = {
        let mut swim = lock(&inner.swim);
        let relays = swim.some_live(RELAYS, target);
        let with_news = |relay| (relay, swim.news_for(relay, PIGGYBACK_CLAIMS));
        relays.into_iter().map(with_news).collect::<Vec<_>>()
    };
    if relays.is_empty() {
        return (false, 1);
    }
    let left = until.saturating_duration_since(Instant::now());
    let calls = relays.iter().map(|(relay, news)| async move {
        let frame = Frame::PingFor { target, news: news.clone() };
        inner.request::<Relayed>(*relay, &frame, left).await.map(|answer| (*relay, answer))
    });
    let Ok(answers) = timeout_at(until, join_all(calls)).await else { return (false, 0) };
    let (mut answered, mut silent) = (false, 0);
    for answer in answers {
        match answer {
            Some((relay, Relayed::Answered(news))) => {
                answered = true;
                inner.hear(relay, &news);
            }
            Some((relay, Relayed::Silent(news))) => inner.hear(relay, &news),
            None => silent += 1,
        }
    }
    (answered, silent)
}

impl Inner {
    pub(super) async fn ping(&self, target: NodeId, limit: Duration) -> bool {
        let news = lock(&self.swim).news_for(target, PIGGYBACK_CLAIMS);
        let answer = self.request::<News>(target, &Frame::Ping(news), limit).await;
        answer.is_some_and(|news| {
            self.hear(target, &news);
            true
        })
    }
    async fn exchange_news(&self, peer: NodeId, frame: &Frame, limit: Duration) {
        if let Some(news) = self.request::<News>(peer, frame, limit).await {
            self.hear(peer, &news);
        }
    }
}
