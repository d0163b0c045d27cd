//! The task that owns foca: packets, timers and announcements in; packets and events out.

use std::collections::BTreeMap;
use std::num::{NonZeroU8, NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use foca::{AccumulatingRuntime, Foca, NoCustomBroadcast, OwnedNotification, PeriodicParams, PostcardCodec, Timer};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_protocol::NodeId;
use starling_protocol::codec::encode;
use starling_protocol::wire::Service;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::identity::Identity;
use super::{Inner, MembershipConfig, SwimFrame};
use crate::runtime::spawn;
use crate::transport::SharedTransport;

/// Packets under way: 64 × 16 KiB at most is 1 MiB, and a dead peer's calls end after [`PACKET_LIMIT`].
const PACKETS_MAX: usize = 64;
/// A packet that takes longer is of no use: foca counts the probe as failed by then.
const PACKET_LIMIT: Duration = Duration::from_millis(400);
/// Longest SWIM packet; they travel on streams, and 1,400 bytes leave a thousand simultaneous joins incomplete.
pub(super) const PACKET_LEN_BYTES_MAX: usize = 16 << 10;
/// Peers announced to at once while this node knows no member.
const ANNOUNCE_FANOUT: usize = 3;

/// What the driver reacts to, besides its timers.
#[derive(Debug)]
pub(super) enum Input {
    Packet(Bytes),
    Connected(NodeId),
}

type SwimCore = Foca<Identity, PostcardCodec, ChaCha8Rng, NoCustomBroadcast>;

pub(super) struct Driver {
    foca: SwimCore,
    effects: AccumulatingRuntime<Identity>,
    timers: BTreeMap<(Instant, u64), Timer<Identity>>,
    timers_armed: u64,
    rng: ChaCha8Rng,
    inner: Weak<Inner>,
    transport: SharedTransport,
    config: MembershipConfig,
    packets: Arc<Semaphore>,
    announced: usize,
}

fn foca_config(config: &MembershipConfig) -> foca::Config {
    // The cluster size only sets how often an update is passed on: 4·log10(65) = 7 times.
    let mut c = foca::Config::new_lan(const { NonZeroU32::new(64).expect("not zero") });
    let some = |frequency, n| Some(PeriodicParams { frequency, num_members: NonZeroUsize::new(n)? });
    c.probe_period = config.probe_period;
    c.probe_rtt = config.probe_timeout;
    c.suspect_to_down_after = config.suspicion;
    c.max_transmissions = const { NonZeroU8::new(8).expect("not zero") };
    c.max_packet_size = const { NonZeroUsize::new(PACKET_LEN_BYTES_MAX).expect("not zero") };
    c.notify_down_members = true;
    c.remove_down_after = Some(Duration::from_secs(3600));
    c.periodic_announce = some(Duration::from_secs(5), 1);
    // Finds the other side again after a partition; foca's 65 s would leave it apart for a minute.
    c.periodic_announce_to_down_members = some(Duration::from_secs(2), 2);
    c.periodic_gossip = some(Duration::from_millis(200), 3);
    c
}

impl Driver {
    pub(super) fn new(
        inner: &Arc<Inner>,
        transport: SharedTransport,
        identity: Identity,
        config: MembershipConfig,
        seed: u64,
    ) -> Self {
        let foca_rng = ChaCha8Rng::seed_from_u64(seed);
        Self {
            foca: Foca::new(identity, foca_config(&config), foca_rng, PostcardCodec),
            effects: AccumulatingRuntime::new(),
            timers: BTreeMap::new(),
            timers_armed: 0,
            rng: ChaCha8Rng::seed_from_u64(!seed),
            inner: Arc::downgrade(inner),
            transport,
            config,
            packets: Arc::new(Semaphore::new(PACKETS_MAX)),
            announced: 0,
        }
    }

    pub(super) async fn run(mut self, mut inputs: mpsc::Receiver<Input>, shutdown: CancellationToken) {
        let mut announce_at = Instant::now();
        let mut merge_at = announce_at + self.config.merge_every;
        // The first beats of nodes that start together spread over one period.
        let spread = self.rng.random_range(0.0..1.0);
        let mut beat_at = announce_at + self.config.record_beat.mul_f64(spread);
        loop {
            let timer_at = self.timers.first_key_value().map_or(beat_at, |((at, _), _)| *at);
            let wake_at = timer_at.min(announce_at).min(merge_at).min(beat_at);
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                input = inputs.recv() => match input {
                    Some(Input::Packet(packet)) => self.on_packet(&packet),
                    Some(Input::Connected(peer)) => self.greet(peer),
                    None => break,
                },
                () = sleep_until(wake_at) => {}
            }
            let now = Instant::now();
            self.fire_timers(now);
            if now >= announce_at {
                announce_at = now + self.config.announce_every;
                self.seek_members();
            }
            if now >= merge_at {
                merge_at = now + self.config.merge_every;
                self.transport.connected().into_iter().for_each(|peer| self.greet(peer));
            }
            if now >= beat_at {
                beat_at = now + self.config.record_beat;
                self.beat();
            }
        }
        self.say_goodbye().await;
    }

    fn on_packet(&mut self, packet: &[u8]) {
        if let Err(error) = self.foca.handle_data(packet, &mut self.effects) {
            tracing::debug!(%error, "SWIM packet not taken");
        }
        self.drain();
    }

    fn fire_timers(&mut self, now: Instant) {
        while let Some(entry) = self.timers.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let timer = entry.remove();
            if let Err(error) = self.foca.handle_timer(timer, &mut self.effects) {
                tracing::debug!(%error, "SWIM timer not taken");
            }
            self.drain();
        }
    }

    /// While no member is known: announces to the seeds and to whoever is connected, in turn.
    fn seek_members(&mut self) {
        if self.foca.iter_members().next().is_some() {
            return;
        }
        let mut peers = self.config.seeds.clone();
        peers.extend(self.transport.connected());
        peers.sort_unstable();
        peers.dedup();
        peers.retain(|p| *p != self.transport.local());
        for i in 0..peers.len().min(ANNOUNCE_FANOUT) {
            self.announce(peers[(self.announced + i) % peers.len()]);
        }
        self.announced += ANNOUNCE_FANOUT;
    }

    /// Announces to a connected peer that is no live member: how two meshes become one.
    fn greet(&mut self, peer: NodeId) {
        let known = self.foca.iter_members().any(|m| m.id().node == peer);
        if !known && peer != self.transport.local() {
            self.announce(peer);
        }
    }

    fn announce(&mut self, peer: NodeId) {
        if let Err(error) = self.foca.announce(Identity::any_run_of(peer), &mut self.effects) {
            tracing::debug!(%error, %peer, "announcement not sent");
        }
        self.drain();
    }

    /// Compares records with one member.
    fn beat(&mut self) {
        let Some(inner) = self.inner.upgrade() else { return };
        let members: Vec<_> = self.foca.iter_members().map(|m| m.id().node).collect();
        if !members.is_empty() {
            let peer = members[self.rng.random_range(0..members.len())];
            inner.pull_from(peer);
        }
    }

    fn drain(&mut self) {
        while let Some((to, packet)) = self.effects.to_send() {
            self.send(to.node, &packet);
        }
        while let Some((after, timer)) = self.effects.to_schedule() {
            self.timers_armed += 1;
            self.timers.insert((Instant::now() + after, self.timers_armed), timer);
        }
        let mut changed = false;
        while let Some(event) = self.effects.to_notify() {
            changed = true;
            self.on_event(event);
        }
        if changed && let Some(inner) = self.inner.upgrade() {
            inner.set_live(self.foca.iter_members().map(|m| m.id().node));
        }
    }

    fn send(&self, to: NodeId, packet: &Bytes) {
        let Ok(permit) = self.packets.clone().try_acquire_owned() else {
            tracing::debug!(%to, "SWIM packet dropped: {PACKETS_MAX} are under way");
            return;
        };
        let body = Bytes::from(encode(&SwimFrame::Packet(packet.to_vec())));
        let transport = self.transport.clone();
        drop(spawn(async move {
            let _permit = permit;
            if let Err(error) = transport.call(to, Service::Swim, body, PACKET_LIMIT).await {
                tracing::trace!(%error, "SWIM packet lost");
            }
        }));
    }

    fn on_event(&mut self, event: OwnedNotification<Identity>) {
        let Some(inner) = self.inner.upgrade() else { return };
        match event {
            OwnedNotification::MemberUp(member) => {
                tracing::info!(node = %member.node.short(), "node joined");
                inner.push_to(member.node);
                if self.foca.iter_members().count() == 1 {
                    inner.pull_from(member.node); // the first we meet: ask for all that it knows
                }
            }
            OwnedNotification::MemberDown(member) => {
                tracing::warn!(node = %member.node.short(), "node is gone");
            }
            OwnedNotification::Rename(_, after) => inner.push_to(after.node), // a restarted node forgot everything
            OwnedNotification::Idle => tracing::warn!("no other node is alive"),
            OwnedNotification::Rejoin(identity) => {
                tracing::warn!(incarnation = identity.incarnation, "declared dead by mistake, rejoining");
            }
            OwnedNotification::Active | OwnedNotification::Defunct => {}
        }
    }

    /// Tells the members that this node leaves, so that they need not find out.
    async fn say_goodbye(mut self) {
        // While effects are drained for the last time nobody listens to events any more.
        if self.foca.leave_cluster(&mut self.effects).is_ok() {
            self.drain();
            let all = u32::try_from(PACKETS_MAX).unwrap_or(u32::MAX);
            tokio::select! {
                biased;
                _ = self.packets.acquire_many(all) => {}
                () = sleep(PACKET_LIMIT) => {}
            }
        }
    }
}
