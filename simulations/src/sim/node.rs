//! One node of a run: its disk and clock, which outlive it, and its process.

use super::agent;
use super::clock::SimClock;
use super::compute::{SimCompute, Slowness};
use super::disk::SimDisk;
use super::key::SimKey;
use super::member::Member;
use super::recorder::Recorder;
use super::watcher;
use crate::event::{Event, NodeIx};
use crate::scenario::{Device, Job, Mode, NodeGroup};
use starling_core::consensus::GroupConfig;
use starling_core::maintenance::MaintenanceConfig;
use starling_core::membership::{Membership, MembershipConfig, SharedRecords};
use starling_core::memory_network::MemoryNetwork;
use starling_core::runtime::NodeScope;
use starling_core::{CoreConfig, Dispatch, NodeCore};
use starling_protocol::record::{Intake, NodeRecord, Role};
use starling_protocol::{NodeId, StoreId};
use starling_storage::SharedStore;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A node of a run.
pub(crate) struct SimNode {
    pub(crate) ix: NodeIx,
    pub(crate) name: String,
    pub(crate) id: NodeId,
    pub(crate) group: NodeGroup,
    pub(crate) clock: SimClock,
    pub(crate) disk: Arc<SimDisk>,
    pub(crate) slowness: Slowness,
    /// How much longer every use of its disk takes.
    pub(crate) disk_delay: Duration,
    device: Device,
    /// Identities so far: a node's key lies on its disk and is lost with it.
    lives: u32,
    runs: u64,
    running: Option<Running>,
}

/// What a crash takes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    Nothing,
    /// The node comes back as itself, with nothing that it promised.
    Disk,
    DiskAndKey,
}

struct Running {
    scope: NodeScope,
    membership: Arc<Membership>,
    /// Not in a membership scenario.
    core: Option<Arc<NodeCore>>,
}

/// What a process needs from the run.
pub(crate) struct Around<'a> {
    pub(crate) seed: u64,
    pub(crate) network: &'a Arc<MemoryNetwork>,
    pub(crate) recorder: &'a Recorder,
    pub(crate) job: &'a Arc<Job>,
    pub(crate) mode: Mode,
    /// Records that nodes of this process share.
    pub(crate) records: &'a Arc<SharedRecords>,
    /// As the scenario has it.
    pub(crate) generation_after: Option<Duration>,
    /// Nodes to announce itself to.
    pub(crate) seeds: Vec<NodeId>,
}

impl SimNode {
    pub(crate) fn new(
        ix: NodeIx,
        name: String,
        group: NodeGroup,
        device: Device,
        start: Instant,
        recorder: &Recorder,
    ) -> Self {
        let id = SimKey::named(&name).0;
        let disk = Arc::new(SimDisk::new(ix, recorder.clone()));
        Self {
            ix,
            name,
            id,
            group,
            clock: SimClock::new(start),
            disk,
            slowness: Slowness::none(),
            disk_delay: Duration::ZERO,
            device,
            lives: 1,
            runs: 0,
            running: None,
        }
    }

    /// Its logic, while it runs.
    pub(crate) fn core(&self) -> Option<&Arc<NodeCore>> {
        self.running.as_ref().and_then(|r| r.core.as_ref())
    }
    /// Its list of nodes, while it runs.
    pub(crate) fn membership(&self) -> Option<&Arc<Membership>> {
        self.running.as_ref().map(|r| &r.membership)
    }
    pub(crate) fn is_up(&self) -> bool {
        self.running.is_some()
    }

    /// Slows every use of the disk down, in this run and the next ones.
    pub(crate) fn set_disk_delay(&mut self, delay: Duration) {
        self.disk_delay = delay;
        if let Some(r) = &self.running {
            r.scope.delay_blocking(delay);
        }
    }

    /// Starts the process; it finds on its disk what the last one left.
    pub(crate) async fn start(&mut self, around: &Around<'_>) -> Result<(), String> {
        if self.running.is_some() {
            return Ok(());
        }
        self.runs += 1;
        let seed = mix(around.seed, u64::from(self.ix.0), self.runs);
        let scope = NodeScope::new(seed);
        scope.delay_blocking(self.disk_delay);
        let key = SimKey(self.id);
        let store: SharedStore = self.disk.clone();
        let transport = around.network.transport(self.id);
        if around.mode == Mode::Membership {
            let running = self.start_member(around, scope, seed).await;
            self.running = Some(running);
            return Ok(());
        }
        let config = self.config(around, seed);
        let shutdown = CancellationToken::new();
        let slots = if self.group.role.runs_agents() { self.group.slots } else { 0 };
        let (recorder, job, ix) = (around.recorder.clone(), around.job.clone(), self.ix);
        recorder.record(Event::Started { node: ix });
        let started = scope.run(async {
            let core =
                NodeCore::start(config, transport.shared(), store, Arc::new(key), Arc::new(key), shutdown).await?;
            around.network.attach(self.id, Arc::new(Dispatch(core.clone())));
            core.set_agent_slots(slots);
            if self.group.role.serves() || core.has(Role::Witness) {
                watcher::start(&core, ix, &recorder);
            }
            if slots > 0 {
                agent::start(&core, ix, slots as usize, job, &recorder);
            }
            Ok::<_, starling_core::consensus::GroupError>(core)
        });
        let core = Box::pin(started).await.map_err(|e| format!("{} does not start: {e}", self.name))?;
        self.running = Some(Running { scope, membership: core.membership().clone(), core: Some(core) });
        Ok(())
    }

    async fn start_member(&self, around: &Around<'_>, scope: NodeScope, seed: u64) -> Running {
        around.recorder.record(Event::Started { node: self.ix });
        let key = SimKey(self.id);
        let transport = around.network.transport(self.id).shared();
        let config = self.config(around, seed);
        let started = scope.run(async {
            let now = self.clock.now();
            let verifier = Arc::new(key);
            let m = Membership::start(transport, verifier, config.membership, seed, now, CancellationToken::new());
            around.network.attach(self.id, Arc::new(Member(m.clone(), key)));
            m.publish_record(config.record, &key);
            m
        });
        let membership = started.await;
        Running { scope, membership, core: None }
    }

    fn config(&self, around: &Around<'_>, seed: u64) -> CoreConfig {
        let roles = self.group.role.roles();
        let compute = SimCompute {
            node: self.ix,
            device: self.device.clone(),
            slowness: self.slowness.clone(),
            recorder: around.recorder.clone(),
        };
        CoreConfig {
            record: NodeRecord {
                node: self.id,
                store: StoreId::default(),
                sequence: 0,
                roles: roles.clone(),
                version: env!("CARGO_PKG_VERSION").into(),
                addresses: Vec::new(),
                device: self.group.device.clone().unwrap_or_else(|| "default".into()),
                memory_bytes: self.device.memory_gib << 30,
                cores: 1,
                models: Vec::new(),
                storage_free_bytes: 1 << 40,
                agent_slots: 0,
                intake: Intake::default(),
            },
            membership: MembershipConfig {
                seeds: around.seeds.clone(),
                shared_records: Some(around.records.clone()),
                ..MembershipConfig::default()
            },
            groups: GroupConfig {
                witness: !roles.contains(&Role::Server),
                generation_after: around.generation_after.or(GroupConfig::default().generation_after),
                ..GroupConfig::default()
            },
            // Minutes of a real node's life in seconds, so that a run of two minutes sees copies restored and data deleted.
            maintenance: MaintenanceConfig {
                grace: Duration::from_secs(6),
                rollouts_kept: Duration::from_secs(20),
                orphans_kept: Duration::from_secs(30),
                ..MaintenanceConfig::default()
            },
            compute: Arc::new(compute),
            roles,
            seed,
            clock: self.clock.shared(),
        }
    }

    /// The process dies where it stands; with `power_loss` the machine too.
    pub(crate) fn crash(&mut self, network: &Arc<MemoryNetwork>, recorder: &Recorder, power_loss: bool, lost: Lost) {
        let Some(running) = self.running.take() else { return };
        network.detach(self.id);
        running.scope.crash();
        drop(running);
        if power_loss {
            self.disk.lose_power();
        }
        let disk_lost = lost != Lost::Nothing;
        recorder.record(Event::Crashed { node: self.ix, power_loss, disk_lost });
        if disk_lost {
            self.disk = Arc::new(SimDisk::new(self.ix, recorder.clone()));
        }
        if lost == Lost::DiskAndKey {
            self.lives += 1;
            self.id = SimKey::named(&format!("{}#{}", self.name, self.lives)).0;
            recorder.rename(self.ix, self.id);
        }
    }
}

/// A seed of its own for run `run` of node `node` (SplitMix64's finalizer over both).
fn mix(seed: u64, node: u64, run: u64) -> u64 {
    let mut z = seed ^ node.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ run.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
