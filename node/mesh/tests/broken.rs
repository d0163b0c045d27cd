//! Connections that break without a word, and peers that come back.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use bytes::Bytes;
use common::{LIMIT, Node, Over, config, start, until};
use libp2p::Multiaddr;
use starling_core::transport::Transport;
use starling_mesh::MeshConfig;
use starling_protocol::NodeId;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A node on a thread of its own, which can be stopped in the middle of whatever it does, as a killed process is.
struct Aside {
    id: NodeId,
    addresses: Vec<Multiaddr>,
    /// Freezes the thread when something comes, until the other half is dropped.
    freeze: mpsc::Sender<mpsc::Receiver<()>>,
    end: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Aside {
    fn start(config: MeshConfig) -> Self {
        let (freeze, asked) = mpsc::channel::<mpsc::Receiver<()>>();
        let (end, mut ended) = tokio::sync::oneshot::channel::<()>();
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let node = start(config).await;
                let addresses = node.mesh.addresses().iter().map(|a| a.parse().unwrap()).collect();
                tell.send((node.id(), addresses)).unwrap();
                while ended.try_recv() == Err(tokio::sync::oneshot::error::TryRecvError::Empty) {
                    if let Ok(until) = asked.try_recv() {
                        let _ = until.recv();
                    }
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                // Not dropped in order: its sockets close with the runtime, before it can say goodbye.
                std::mem::forget(node);
            });
            runtime.shutdown_background();
        });
        let (id, addresses) = told.recv_timeout(LIMIT).unwrap();
        Self { id, addresses, freeze, end: Some(end), thread: Some(thread) }
    }

    /// Answers nothing until what is returned is dropped.
    fn frozen(&self) -> mpsc::Sender<()> {
        let (thaw, until) = mpsc::channel();
        self.freeze.send(until).unwrap();
        // Longer than it sleeps between two looks.
        std::thread::sleep(Duration::from_millis(50));
        thaw
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        drop(self.end.take());
        drop(self.thread.take().map(std::thread::JoinHandle::join));
    }
}

async fn connected_to(aside: &Aside, over: Over) -> Node {
    let a = start(MeshConfig { bootstrap: vec![(aside.id, aside.addresses.clone())], ..config(1, over) }).await;
    until("connected", || a.mesh.connected() == [aside.id]).await;
    a
}

/// Whatever is asked of a stream after its connection broke is an error, also when the peer had not even confirmed the
/// protocol: libp2p's own stream panics then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_whose_connection_breaks_before_the_first_answer_fails_and_does_not_panic() {
    for over in [Over::Quic, Over::Tcp] {
        let b = Aside::start(config(2, over));
        let a = connected_to(&b, over).await;
        let thaw = b.frozen();
        let mut stream = a.mesh.open_generate(b.id, LIMIT).await.unwrap();
        stream.send.send(Bytes::from_static(b"x")).await.unwrap();
        a.mesh.disconnect(b.id, "the test says so").await;
        let broke = tokio::time::timeout(LIMIT, stream.recv.recv()).await.expect("at once");
        assert!(broke.is_err(), "{over:?}: {broke:?}");
        assert!(stream.send.send(Bytes::from_static(b"y")).await.is_err(), "{over:?}");
        assert!(stream.recv.recv().await.is_err(), "{over:?}");
        drop(thaw);
        until("connected again, for it lives", || a.mesh.connected() == [b.id]).await;
        a.mesh.shutdown().await;
    }
}

/// A killed process that is back says that it is another run of the same node, so that what waits on streams of its former
/// life fails then, and not after the silence of 10 s that a connection survives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_to_a_former_life_of_a_peer_end_soon_after_it_is_back() {
    for over in [Over::Quic, Over::Tcp] {
        let b = Aside::start(config(2, over));
        let a = connected_to(&b, over).await;
        let known: Vec<Multiaddr> = a.mesh.addresses().iter().map(|x| x.parse().unwrap()).collect();
        let mut stream = a.mesh.open_generate(b.id, LIMIT).await.unwrap();
        stream.send.send(Bytes::from_static(b"x")).await.unwrap();
        assert!(stream.recv.recv().await.unwrap().is_some());
        let listen = b.addresses.iter().map(|x| x.iter().filter(|p| p.tag() != "p2p").collect()).collect();
        drop(b);
        let begun = Instant::now();
        let bootstrap = vec![(a.id(), known)];
        let back = Aside::start(MeshConfig { listen, bootstrap, ..config(2, over) });
        let broke = tokio::time::timeout(LIMIT, stream.recv.recv()).await.expect("it breaks");
        let took = begun.elapsed();
        assert!(!matches!(broke, Ok(Some(_))), "{over:?}: {broke:?}");
        assert!(took < Duration::from_secs(6), "{over:?}: {took:?}");
        let mut stream = a.mesh.open_generate(back.id, LIMIT).await.unwrap();
        stream.send.send(Bytes::from_static(b"x")).await.unwrap();
        assert!(stream.recv.recv().await.unwrap().is_some(), "{over:?}");
        a.mesh.shutdown().await;
    }
}
