//! A running node: store, identity, mesh, core, gateway, agents, HTTP; started in this order, ended in reverse.

use crate::BadInput;
use crate::admin;
use crate::backend::NodeBackend;
use crate::commands::checkpoint::{self, read_model};
use crate::data_dir::{DataDir, MeshFile, Running};
use crate::host::GatewayHost;
use crate::listening;
use crate::settings::RunSettings;
use anyhow::{Context, anyhow};
use libp2p::Multiaddr;
use starling_agents::Runner;
use starling_bootstrap::identity::{Ed25519Verifier, Identity};
use starling_bootstrap::ticket::{Ticket, parse_address};
use starling_core::client::{Client, ClientConfig};
use starling_core::compute::{LocalCompute, TrainerOptions};
use starling_core::consensus::GroupConfig;
use starling_core::maintenance::MaintenanceConfig;
use starling_core::membership::{MemberEvent, MembershipConfig};
use starling_core::transport::Transport;
use starling_core::{CoreConfig, Dispatch, NodeCore};
use starling_engine::{Device, InferenceOptions};
use starling_gateway::{Gateway, GatewayConfig};
use starling_mesh::{Mesh, MeshConfig};
use starling_protocol::record::{Intake, NodeRecord, Role};
use starling_protocol::{Hash, ModelName, NodeId, StoreId, Timestamp};
use starling_storage::{RocksOptions, RocksStore, SharedStore};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio_util::sync::CancellationToken;

/// Niceness of compute threads: heartbeats and HTTP come first.
const COMPUTE_NICE: i32 = 10;
/// How often episodes without a sign of life are looked for.
const REAP_BEAT: Duration = Duration::from_secs(5);
/// How often the nodes seen are written down, if there is news. The first node of a mesh has no ticket: killed before
/// this, it knows nobody when it is back.
const REMEMBER_BEAT: Duration = Duration::from_millis(250);

/// Milliseconds since the epoch.
#[must_use]
pub fn wall_clock() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// What HTTP handlers work with.
#[derive(Clone)]
pub struct Node {
    /// Above the wire.
    pub core: Arc<NodeCore>,
    /// The wire.
    pub mesh: Arc<Mesh>,
    /// Agents' side.
    pub gateway: Gateway,
    /// Behind the gateway.
    pub backend: Arc<NodeBackend>,
    /// The agent runner, with the client role.
    pub runner: Option<Runner>,
    /// The mesh's id.
    pub network: Hash,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("node", &self.core.node()).finish_non_exhaustive()
    }
}

/// Runs a node until SIGINT, SIGTERM or `shutdown`.
///
/// # Errors
/// When it cannot start: each with the address, file or setting at fault.
pub async fn run(data: DataDir, settings: RunSettings, ticket: Option<Ticket>) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    let identity = Identity::load_or_create(data.path())?;
    let mesh_file = mesh_of(&data, ticket)?;
    let options = RocksOptions { quota_bytes: settings.store_quota_bytes, ..RocksOptions::default() };
    let store: SharedStore = Arc::new(RocksStore::open(data.store(), &options).context("cannot open the store")?);
    let token = data.admin_token()?;

    let mut config = MeshConfig::new(identity.clone(), mesh_file.network);
    config.mdns = settings.mdns;
    config.bootstrap = bootstrap_list(&mesh_file.nodes)?;
    let mesh = listening::start(&data, &settings.listen, config).await?;

    let signer: Arc<Identity> = Arc::new(identity);
    let verifier = Arc::new(Ed25519Verifier);
    let core = NodeCore::start(core_config(&settings, &mesh), mesh.clone(), store, signer, verifier, shutdown.clone())
        .await
        .context("cannot start the node")?;
    mesh.serve(Arc::new(Dispatch(core.clone())));

    let listener =
        TcpListener::bind(settings.http).await.with_context(|| format!("--http {}: cannot listen", settings.http))?;
    let http = listener.local_addr()?;
    let backend = NodeBackend::new(Client::new(core.clone(), ClientConfig::default()));
    let gateway = Gateway::new(
        backend.clone(),
        GatewayConfig {
            base_url: format!("http://{http}/v1"),
            open_inference: settings.http_token.is_none(),
            admin_token: settings.http_token.clone(),
            ..GatewayConfig::default()
        },
    );
    let runner = settings.agent.clone().map(Runner::new).transpose()?;
    let node = Node {
        core: core.clone(),
        mesh: mesh.clone(),
        gateway: gateway.clone(),
        backend: backend.clone(),
        runner: runner.clone(),
        network: mesh_file.network,
    };
    let app = gateway.router().merge(admin::router(node.clone(), token));
    let running = Running {
        pid: std::process::id(),
        node: core.node(),
        http: format!("http://{http}"),
        addresses: mesh.addresses(),
    };
    data.write_running(&running)?;
    tracing::info!(node = %core.node(), http = %running.http, addresses = ?running.addresses, roles = ?settings.roles, "the node runs");

    let served = {
        let stop = shutdown.clone();
        tokio::spawn(async move {
            axum::serve(listener, app).with_graceful_shutdown(async move { stop.cancelled().await }).await
        })
    };
    tokio::spawn(keep_episodes(node.clone(), shutdown.clone()));
    tokio::spawn(drop_the_gone(core.membership().events(), node.clone(), shutdown.clone()));
    let data_for_peers = data.clone();
    tokio::spawn(remember_peers(data_for_peers, mesh_file, node.clone(), shutdown.clone()));
    let agents = runner.map(|runner| {
        core.set_agent_slots(u32::try_from(settings.slots).unwrap_or(u32::MAX));
        let host = Arc::new(GatewayHost {
            gateway: gateway.clone(),
            backend: backend.clone(),
            models: settings.models.clone(),
            agent: settings.agent_name.clone(),
        });
        let stop = shutdown.clone();
        tokio::spawn(async move { runner.run(host, async move { stop.cancelled().await }).await })
    });

    let bringing = async {
        bring(&core, &settings.bring).await?;
        std::future::pending().await
    };
    let outcome = tokio::select! {
        signal = wait_for_signal() => signal,
        failed = bringing => failed,
    };
    tracing::info!("ending");
    shutdown.cancel();
    if let Some(agents) = agents {
        let _ = tokio::time::timeout(Duration::from_secs(8), agents).await;
    }
    let _ = tokio::time::timeout(Duration::from_secs(2), served).await;
    core.groups().stop().await;
    mesh.shutdown().await;
    data.clear_running();
    outcome
}

/// Creates the models of `--model` that neither this node's store nor the mesh has.
async fn bring(core: &Arc<NodeCore>, models: &[(ModelName, PathBuf)]) -> anyhow::Result<()> {
    for (model, path) in models {
        let from = path.clone();
        let files = tokio::task::spawn_blocking(move || read_model(&from)).await?;
        let files = files.context("--model").map_err(BadInput::wrap)?;
        // Asked after the reading, which gives gossip a moment to tell of the mesh's models.
        if core.models().get(model).is_some() || core.groups().state(model).is_some() {
            tracing::info!(%model, "the mesh has this model already");
            continue;
        }
        checkpoint::create(core, model, files).await.map_err(|e| anyhow!("--model {}: {e}", path.display()))?;
        tracing::info!(%model, path = %path.display(), "the model is on the mesh");
    }
    Ok(())
}

fn mesh_of(data: &DataDir, ticket: Option<Ticket>) -> anyhow::Result<MeshFile> {
    let known = data.mesh()?;
    let file = match (ticket, known) {
        (Some(t), known) => {
            if t.is_expired(wall_clock().0) {
                return Err(BadInput::wrap(anyhow!(
                    "ticket: it is no longer valid; ask for a new one with `starling ticket`"
                )));
            }
            if let Some(k) = &known
                && k.network != t.network
            {
                return Err(BadInput::wrap(anyhow!(
                    "ticket: it is for mesh {}, this folder belongs to mesh {}: use another --data",
                    t.network.short(),
                    k.network.short()
                )));
            }
            let mut nodes: Vec<(NodeId, Vec<String>)> = Vec::new();
            for (node, addresses) in t.nodes.into_iter().chain(known.map(|k| k.nodes).unwrap_or_default()) {
                match nodes.iter_mut().find(|(n, _)| *n == node) {
                    // A ticket may be older than what was seen of its nodes since: both are tried.
                    Some((_, have)) => {
                        let new: Vec<_> = addresses.into_iter().filter(|a| !have.contains(a)).collect();
                        have.extend(new);
                    }
                    None => nodes.push((node, addresses)),
                }
            }
            MeshFile { network: t.network, nodes }
        }
        (None, Some(known)) => known,
        (None, None) => MeshFile { network: Hash(rand::random()), nodes: Vec::new() },
    };
    data.write_mesh(&file)?;
    Ok(file)
}

/// Nodes to knock at, with their addresses parsed.
fn bootstrap_list(nodes: &[(NodeId, Vec<String>)]) -> anyhow::Result<Vec<(NodeId, Vec<Multiaddr>)>> {
    let parse = |(node, addresses): &(NodeId, Vec<String>)| {
        let parsed = addresses.iter().map(|a| parse_address(*node, a).map_err(anyhow::Error::msg));
        Ok((*node, parsed.collect::<anyhow::Result<Vec<_>>>()?))
    };
    nodes.iter().map(parse).collect()
}

fn core_config(settings: &RunSettings, mesh: &Mesh) -> CoreConfig {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    CoreConfig {
        roles: settings.roles.clone(),
        record: NodeRecord {
            node: mesh.local(),
            store: StoreId::default(),
            sequence: 0,
            roles: settings.roles.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            addresses: Vec::new(),
            device: "cpu".into(),
            memory_bytes: system.total_memory(),
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            models: Vec::new(),
            storage_free_bytes: 0,
            agent_slots: 0,
            intake: Intake::Open,
        },
        membership: MembershipConfig::default(),
        maintenance: MaintenanceConfig { rollouts_kept: settings.rollouts_kept, ..MaintenanceConfig::default() },
        groups: GroupConfig {
            witness: !settings.roles.contains(&Role::Server),
            generation_after: settings.generation_after,
            ..GroupConfig::with_times(settings.heartbeat, settings.election_timeout)
        },
        compute: Arc::new(LocalCompute {
            device: Device::Cpu,
            inference: InferenceOptions {
                max_batch: 128,
                max_batch_tokens: 8192,
                threads: settings.threads,
                nice: COMPUTE_NICE,
                weight_format: settings.weight_format,
            },
            trainer: TrainerOptions { threads: settings.threads, nice: COMPUTE_NICE, micro_batch_tokens: 8192 },
            memory_free_bytes: Some(system.available_memory()),
        }),
        seed: rand::random(),
        clock: Arc::new(wall_clock),
    }
}

/// Renews the leases of every open episode and gives idle ones back.
async fn keep_episodes(node: Node, shutdown: CancellationToken) {
    let client = node.backend.client();
    let mut beat = tokio::time::interval(REAP_BEAT);
    loop {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            () = client.renewal_due() => {
                let running = node.gateway.running();
                for lost in client.claim(&[], 0, &running).await.revoked {
                    let _ = node.gateway.abort(lost, "its lease was given to another node").await;
                }
            }
            _ = beat.tick() => {
                node.gateway.reap().await;
            }
        }
    }
}

/// Keeps `mesh.json` up to date with the nodes seen, so that a node finds its mesh again without its first ticket.
async fn remember_peers(data: DataDir, mut mesh: MeshFile, node: Node, shutdown: CancellationToken) {
    let mut beat = tokio::time::interval(REMEMBER_BEAT);
    loop {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            _ = beat.tick() => {}
        }
        let mut changed = false;
        for peer in node.core.membership().live() {
            let Some(record) = node.core.membership().record(peer) else { continue };
            if peer == node.core.node() || record.addresses.is_empty() {
                continue;
            }
            node.core.transport().add_addresses(peer, &record.addresses);
            match mesh.nodes.iter_mut().find(|(n, _)| *n == peer) {
                Some((_, known)) if *known == record.addresses => {}
                Some((_, known)) => {
                    *known = record.addresses;
                    changed = true;
                }
                None => {
                    mesh.nodes.push((peer, record.addresses));
                    changed = true;
                }
            }
        }
        mesh.nodes.truncate(64);
        if changed && let Err(e) = data.write_mesh(&mesh) {
            tracing::warn!(error = %e, "cannot remember peers");
        }
    }
}

/// Closes the connections to nodes that membership gave up: what waits on their streams fails after the 3 s in which a
/// killed node is missed, not after the silence of 10 s that a connection survives.
async fn drop_the_gone(mut events: broadcast::Receiver<MemberEvent>, node: Node, shutdown: CancellationToken) {
    loop {
        let event = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            event = events.recv() => event,
        };
        match event {
            // It may be back by now.
            Ok(MemberEvent::Left(peer)) if !node.core.membership().is_live(peer) => {
                node.mesh.disconnect(peer, "membership has given it up").await;
            }
            // Of those missed, the silence will tell.
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}

async fn wait_for_signal() -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}
