//! Nodes on 127.0.0.1 with a logic that records what comes.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unreachable_pub, reason = "shared by several test binaries, each of which is a crate of its own")]

use async_trait::async_trait;
use bytes::Bytes;
use libp2p::Multiaddr;
use starling_bootstrap::Identity;
use starling_core::transport::{FrameStream, Inbound, InboundError, Transport, Verdict};
use starling_mesh::{Mesh, MeshConfig};
use starling_protocol::wire::{Service, Topic};
use starling_protocol::{Hash, NodeId};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub const LIMIT: Duration = Duration::from_secs(10);

/// Which transports a test runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    Both,
    Quic,
    Tcp,
}

pub const ALL: [Over; 3] = [Over::Both, Over::Quic, Over::Tcp];

impl Over {
    pub fn listen(self) -> Vec<Multiaddr> {
        let (quic, tcp) = ("/ip4/127.0.0.1/udp/0/quic-v1".parse().unwrap(), "/ip4/127.0.0.1/tcp/0".parse().unwrap());
        match self {
            Self::Both => vec![quic, tcp],
            Self::Quic => vec![quic],
            Self::Tcp => vec![tcp],
        }
    }
}

/// What came.
#[derive(Default)]
pub struct Seen {
    pub gossip: Vec<(NodeId, Topic, Vec<u8>)>,
    pub connections: Vec<(NodeId, bool)>,
    /// How generation streams ended: `Ok` in order.
    pub streams: Vec<Result<usize, String>>,
    pub refused_gossip: usize,
}

#[derive(Default)]
pub struct Logic {
    pub seen: Mutex<Seen>,
}

#[async_trait]
impl Inbound for Logic {
    async fn on_call(&self, from: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        match &body[..] {
            b"malformed" => Err(InboundError::Malformed("no such message".into())),
            b"unavailable" => Err(InboundError::Unavailable("the disk is full".into())),
            b"slow" => {
                tokio::time::sleep(Duration::from_secs(60)).await;
                Ok(body)
            }
            b"who" => Ok(Bytes::copy_from_slice(from.as_bytes())),
            b"long" => Ok(Bytes::from(vec![0; starling_protocol::wire::CALL_LEN_BYTES_MAX + 1])),
            _ => {
                let mut answer = vec![service as u8];
                answer.extend_from_slice(&body);
                Ok(answer.into())
            }
        }
    }

    async fn on_generate(&self, _from: NodeId, mut stream: FrameStream) {
        let mut frames = 0;
        let end = loop {
            match stream.recv.recv().await {
                // "last": answers and drops the stream at once.
                Ok(Some(frame)) if &frame[..] == b"last" => {
                    let _ = stream.send.send(Bytes::from_static(b"end")).await;
                    break Ok(frames);
                }
                Ok(Some(frame)) => {
                    frames += 1;
                    if stream.send.send(frame).await.is_err() {
                        break Err("cannot send".into());
                    }
                }
                Ok(None) => break Ok(frames),
                Err(e) => break Err(e.to_string()),
            }
        };
        self.seen.lock().unwrap().streams.push(end);
    }

    fn on_gossip(&self, from: NodeId, topic: &Topic, body: &[u8]) -> Verdict {
        let mut seen = self.seen.lock().unwrap();
        if body.starts_with(b"garbage") {
            seen.refused_gossip += 1;
            return Verdict::Reject;
        }
        seen.gossip.push((from, topic.clone(), body.to_vec()));
        Verdict::Accept
    }

    fn on_connection(&self, peer: NodeId, connected: bool) {
        self.seen.lock().unwrap().connections.push((peer, connected));
    }
}

pub struct Node {
    pub mesh: Arc<Mesh>,
    pub logic: Arc<Logic>,
}

impl Node {
    pub fn id(&self) -> NodeId {
        self.mesh.local()
    }
    pub fn has_gossip(&self, body: &[u8]) -> bool {
        self.logic.seen.lock().unwrap().gossip.iter().any(|(_, _, b)| b == body)
    }
}

pub fn network() -> Hash {
    Hash::of(b"test")
}

pub fn config(seed: u8, over: Over) -> MeshConfig {
    MeshConfig { listen: over.listen(), ..MeshConfig::new(Identity::from_seed([seed; 32]), network()) }
}

pub async fn start(config: MeshConfig) -> Node {
    let mesh = Mesh::start(config).await.unwrap();
    let logic = Arc::new(Logic::default());
    assert!(mesh.serve(logic.clone()));
    Node { mesh, logic }
}

/// A node that knows the address of another.
pub async fn start_with(seed: u8, over: Over, known: &Node) -> Node {
    let addresses = known.mesh.addresses().iter().map(|a| a.parse().unwrap()).collect();
    start(MeshConfig { bootstrap: vec![(known.id(), addresses)], ..config(seed, over) }).await
}

/// `n` nodes, of which all but the first know only the first.
pub async fn star(n: u8, over: Over) -> Vec<Node> {
    let mut nodes = vec![start(config(1, over)).await];
    for seed in 2..=n {
        let node = start_with(seed, over, &nodes[0]).await;
        nodes.push(node);
    }
    nodes
}

/// Waits until `done`; fails with `what` after [`LIMIT`].
pub async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "not within {LIMIT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn all_connected(nodes: &[Node]) {
    for node in nodes {
        until(&format!("{:?} is connected to all", node.mesh), || node.mesh.connected().len() == nodes.len() - 1).await;
    }
}

pub async fn stop(nodes: Vec<Node>) {
    for node in nodes {
        node.mesh.shutdown().await;
    }
}
