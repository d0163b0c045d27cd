//! A mesh of three nodes in this process: a gateway, and two servers that hold its rollouts on disk.

use crate::run::wall_clock;
use anyhow::{Context, bail, ensure};
use libp2p::Multiaddr;
use starling_bootstrap::identity::{Ed25519Verifier, Identity};
use starling_bootstrap::ticket::parse_address;
use starling_core::compute::{LocalCompute, TrainerOptions};
use starling_core::consensus::GroupConfig;
use starling_core::maintenance::MaintenanceConfig;
use starling_core::membership::MembershipConfig;
use starling_core::transport::Transport;
use starling_core::{CoreConfig, Dispatch, NodeCore};
use starling_engine::{Device, InferenceOptions};
use starling_mesh::{Mesh, MeshConfig};
use starling_protocol::record::{Intake, NodeRecord, Role};
use starling_protocol::{Hash, JobId, NodeId, StoreId};
use starling_storage::{RocksOptions, RocksStore, SharedStore, rollouts};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

/// Holders of a rollout, the default of a job.
pub(super) const REPLICATION: u8 = 2;
/// How long the nodes may take to find each other.
const MEET_LIMIT: Duration = Duration::from_secs(20);

/// One node.
pub(super) struct Member {
    pub(super) core: Arc<NodeCore>,
    pub(super) identity: Arc<Identity>,
    pub(super) store: SharedStore,
    mesh: Arc<Mesh>,
}

/// See the module.
pub(super) struct Trio {
    pub(super) gateway: Member,
    pub(super) holders: [Member; 2],
    shutdown: CancellationToken,
    /// Removed last.
    dir: TempDir,
}

impl Trio {
    /// Starts the nodes and returns once the gateway knows both holders.
    ///
    /// # Errors
    /// When a node does not start, or they do not find each other.
    pub(super) async fn start() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir().context("cannot make a folder for the stores")?;
        let shutdown = CancellationToken::new();
        let network = Hash(rand::random());
        let start = async |name: &str, role: Role, known: Vec<(NodeId, Vec<Multiaddr>)>| {
            let node = start_member(&dir.path().join(name), role, network, known, shutdown.clone()).await;
            node.with_context(|| format!("cannot start the {name}"))
        };
        let one = start("first holder", Role::Server, Vec::new()).await?;
        let two = start("second holder", Role::Server, vec![one.address()?]).await?;
        let gateway = start("gateway", Role::Client, vec![one.address()?, two.address()?]).await?;
        let trio = Self { gateway, holders: [one, two], shutdown, dir };
        let begin = Instant::now();
        while trio.gateway.core.membership().live_holders().len() < trio.holders.len() {
            if begin.elapsed() > MEET_LIMIT {
                let reports = trio.gateway.mesh.reachability();
                bail!("the nodes did not find each other within {MEET_LIMIT:?}: {reports:?}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(trio)
    }

    /// Checks that each holder has the `acknowledged` rollouts of `job`.
    ///
    /// # Errors
    /// When one has fewer: what was measured was not durable.
    pub(super) async fn check_held(&self, job: JobId, acknowledged: u64) -> anyhow::Result<()> {
        for holder in &self.holders {
            let store = holder.store.clone();
            let held = tokio::task::spawn_blocking(move || rollouts::count(&*store, job)).await?? as u64;
            ensure!(held >= acknowledged, "a holder has {held} rollouts, {acknowledged} were acknowledged");
        }
        Ok(())
    }

    /// A folder that goes with the mesh.
    pub(super) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Ends the nodes in order and removes their stores.
    pub(super) async fn stop(self) {
        self.shutdown.cancel();
        for node in self.holders.iter().chain([&self.gateway]) {
            node.stop().await;
        }
    }
}

impl Member {
    /// Ends the node in order.
    pub(super) async fn stop(&self) {
        self.core.groups().stop().await;
        self.mesh.shutdown().await;
    }

    pub(super) fn address(&self) -> anyhow::Result<(NodeId, Vec<Multiaddr>)> {
        let node = self.mesh.local();
        let parsed = self.mesh.addresses().into_iter().map(|a| parse_address(node, &a).map_err(anyhow::Error::msg));
        Ok((node, parsed.collect::<anyhow::Result<Vec<_>>>()?))
    }
}

/// As `run` starts a node, without HTTP.
pub(super) async fn start_member(
    path: &Path,
    role: Role,
    network: Hash,
    known: Vec<(NodeId, Vec<Multiaddr>)>,
    shutdown: CancellationToken,
) -> anyhow::Result<Member> {
    let identity = Identity::generate();
    let store: SharedStore = Arc::new(RocksStore::open(path, &RocksOptions::default())?);
    let mut config = MeshConfig::new(identity.clone(), network);
    config.bootstrap = known;
    let mesh = Mesh::start(config).await?;
    let identity = Arc::new(identity);
    let config = core_config(mesh.local(), role);
    let verifier = Arc::new(Ed25519Verifier);
    let core = NodeCore::start(config, mesh.clone(), store.clone(), identity.clone(), verifier, shutdown).await?;
    mesh.serve(Arc::new(Dispatch(core.clone())));
    Ok(Member { core, identity, store, mesh })
}

fn core_config(node: NodeId, role: Role) -> CoreConfig {
    CoreConfig {
        roles: vec![role],
        record: NodeRecord {
            node,
            store: StoreId::default(),
            sequence: 0,
            roles: vec![role],
            version: env!("CARGO_PKG_VERSION").into(),
            addresses: Vec::new(),
            device: "cpu".into(),
            memory_bytes: 0,
            cores: 1,
            models: Vec::new(),
            storage_free_bytes: 0,
            agent_slots: 0,
            intake: Intake::Open,
        },
        membership: MembershipConfig::default(),
        maintenance: MaintenanceConfig::default(),
        groups: GroupConfig::default(),
        compute: Arc::new(LocalCompute {
            device: Device::Cpu,
            inference: InferenceOptions::default(),
            trainer: TrainerOptions { threads: 1, nice: 0, micro_batch_tokens: 1024 },
            memory_free_bytes: None,
        }),
        seed: rand::random(),
        clock: Arc::new(wall_clock),
    }
}
