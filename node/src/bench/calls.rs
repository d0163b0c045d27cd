//! What a call costs between two nodes of this process, over TCP and over QUIC: the loopback device has both, and a node
//! that listens on nothing else takes TCP.

use super::load::{Load, alternate};
use super::report::{Better, Row};
use anyhow::{Context, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use libp2p::Multiaddr;
use starling_bootstrap::Identity;
use starling_bootstrap::ticket::parse_address;
use starling_core::transport::{FrameStream, Inbound, InboundError, Transport, Verdict};
use starling_mesh::{Mesh, MeshConfig};
use starling_protocol::wire::{Service, Topic};
use starling_protocol::{Hash, NodeId};
use std::sync::Arc;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);
/// Bytes of a call, which come back, and calls at once.
const CALLS: [(usize, usize, &str); 3] =
    [(100, 1, "100 bytes there and back"), (100, 32, "100 bytes, 32 at once"), (1 << 20, 4, "1 MiB, 4 at once")];
const TIME: Duration = Duration::from_millis(700);
const PEER: &str = "over QUIC";

/// The rows of `calls`.
///
/// # Errors
/// When the nodes do not find each other, or a call fails.
pub(super) async fn measure(runs: usize) -> anyhow::Result<Vec<Row>> {
    let tcp = Pair::start("/ip4/127.0.0.1/tcp/0").await?;
    let quic = Pair::start("/ip4/127.0.0.1/udp/0/quic-v1").await?;
    let mut rows = Vec::new();
    for (len, at_once, what) in CALLS {
        let (ours, theirs) =
            alternate(runs, async || tcp.calls(len, at_once).await, async || quic.calls(len, at_once).await).await?;
        rows.push(Row::new(what, "calls/s", Better::More, &ours, Some((PEER, &theirs))));
    }
    for node in [tcp.from, tcp.to, quic.from, quic.to] {
        node.shutdown().await;
    }
    Ok(rows)
}

struct Pair {
    from: Arc<Mesh>,
    to: Arc<Mesh>,
}

impl Pair {
    async fn start(listen: &str) -> anyhow::Result<Self> {
        let listen: Multiaddr = listen.parse()?;
        let network = Hash(rand::random());
        let start = async |bootstrap: Vec<(NodeId, Vec<Multiaddr>)>| {
            let mut config = MeshConfig::new(Identity::generate(), network);
            config.listen = vec![listen.clone()];
            config.bootstrap = bootstrap;
            let mesh = Mesh::start(config).await?;
            mesh.serve(Arc::new(Echo));
            anyhow::Ok(mesh)
        };
        let to = start(Vec::new()).await?;
        let addresses = to.addresses().into_iter().map(|a| parse_address(to.local(), &a).map_err(anyhow::Error::msg));
        let from = start(vec![(to.local(), addresses.collect::<anyhow::Result<Vec<_>>>()?)]).await?;
        Ok(Self { from, to })
    }

    /// Calls per second.
    async fn calls(&self, len: usize, at_once: usize) -> anyhow::Result<f64> {
        let (from, to, body) = (self.from.clone(), self.to.local(), Bytes::from(vec![1; len]));
        let load = Load { at_once, time_max: TIME, count_max: u64::MAX };
        let done = load.run(move |_| {
            let (from, body) = (from.clone(), body.clone());
            async move {
                let answer = from.call(to, Service::Blobs, body, LIMIT).await.context("a call failed")?;
                ensure!(answer.len() == len, "{} of {len} bytes came back", answer.len());
                Ok(())
            }
        });
        Ok(done.await?.per_second())
    }
}

/// Answers what it is told.
struct Echo;

#[async_trait]
impl Inbound for Echo {
    async fn on_call(&self, _from: NodeId, _service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        Ok(body)
    }
    async fn on_generate(&self, _from: NodeId, _stream: FrameStream) {}
    fn on_gossip(&self, _from: NodeId, _topic: &Topic, _body: &[u8]) -> Verdict {
        Verdict::Ignore
    }
    fn on_connection(&self, _peer: NodeId, _connected: bool) {}
}
