//! Nodes find each other, call each other, stream and gossip.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use bytes::Bytes;
use common::{ALL, LIMIT, Over, all_connected, config, star, start, start_with, stop, until};
use starling_core::transport::{CallError, Transport};
use starling_mesh::{Mesh, MeshConfig};
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, FRAME_LEN_BYTES_MAX, Service, Topic};
use starling_protocol::{Hash, ModelName, NodeId};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_nodes_find_each_other_from_one_address_over_each_transport() {
    for over in ALL {
        let nodes = star(5, over).await;
        all_connected(&nodes).await;
        for a in &nodes {
            for b in &nodes {
                let answer = a.mesh.call(b.id(), Service::Raft, Bytes::from_static(b"hi"), LIMIT).await.unwrap();
                assert_eq!(&answer[..], b"\x01hi", "{over:?}");
            }
            until("the logic was told of all", || a.logic.seen.lock().unwrap().connections.len() >= 4).await;
        }
        stop(nodes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_go_both_ways_and_say_who_calls() {
    for over in ALL {
        let nodes = star(2, over).await;
        let (a, b) = (&nodes[0], &nodes[1]);
        for (from, to) in [(a, b), (b, a), (a, a)] {
            let answer = from.mesh.call(to.id(), Service::Swim, Bytes::from_static(b"who"), LIMIT).await;
            // The first call of `a` may come before `b` has dialled it; then `a` knows no address.
            if let Err(CallError::NotConnected { .. }) = answer {
                all_connected(&nodes).await;
                continue;
            }
            assert_eq!(&answer.unwrap()[..], from.id().as_bytes());
        }
        // Long bodies, and many calls at once.
        for len in [0, 1, 5000, 100_000, CALL_LEN_BYTES_MAX - 1] {
            let body = Bytes::from(vec![7; len]);
            let answer = a.mesh.call(b.id(), Service::Blobs, body.clone(), LIMIT).await.unwrap();
            assert_eq!(answer.len(), len + 1);
            assert_eq!(&answer[1..], &body[..]);
        }
        let many = (0..500_u32).map(|i| {
            let (mesh, to) = (Arc::clone(&a.mesh), b.id());
            tokio::spawn(async move {
                let body = Bytes::copy_from_slice(&i.to_le_bytes());
                let answer = mesh.call(to, Service::Leader, body.clone(), LIMIT).await.unwrap();
                assert_eq!(&answer[1..], &body[..]);
            })
        });
        for task in many.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        stop(nodes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_timeouts_and_excess_are_told_apart() {
    let nodes = star(2, Over::Both).await;
    let (a, b) = (&nodes[0], &nodes[1]);
    all_connected(&nodes).await;
    let call = |body: &'static [u8], limit| b.mesh.call(a.id(), Service::Rollouts, Bytes::from_static(body), limit);
    let peer = a.id();
    let reason = |r: Result<Bytes, CallError>| match r {
        Err(CallError::Failed { peer: p, reason }) if p == peer => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(call(b"malformed", LIMIT).await), "malformed request: no such message");
    assert_eq!(reason(call(b"unavailable", LIMIT).await), "the disk is full");
    assert!(reason(call(b"long", LIMIT).await).contains("at most"));
    let start = Instant::now();
    let after = Duration::from_millis(200);
    assert_eq!(call(b"slow", after).await, Err(CallError::Timeout { peer, after }));
    assert!(start.elapsed() < Duration::from_secs(2));
    let (got, max) = (CALL_LEN_BYTES_MAX + 1, CALL_LEN_BYTES_MAX);
    let long = Bytes::from(vec![0; got]);
    assert_eq!(b.mesh.call(a.id(), Service::Blobs, long, LIMIT).await, Err(CallError::TooLong { got, max }));
    // The connection has survived all of that.
    assert!(call(b"still here", LIMIT).await.is_ok());
    // The malformed request cost points.
    let end = Instant::now() + LIMIT;
    while a.mesh.score(b.id()).await.is_none_or(|s| s >= 0.0) {
        assert!(Instant::now() < end, "the score did not fall");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stop(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_serves_nothing_yet_says_so() {
    let a = Mesh::start(config(1, Over::Both)).await.unwrap();
    let addresses = a.addresses().iter().map(|x| x.parse().unwrap()).collect();
    let b = start(MeshConfig { bootstrap: vec![(a.local(), addresses)], ..config(2, Over::Both) }).await;
    let err = b.mesh.call(a.local(), Service::Swim, Bytes::new(), LIMIT).await.unwrap_err();
    assert!(err.to_string().contains("the node is starting"), "{err}");
    let logic = Arc::new(common::Logic::default());
    assert!(a.serve(logic.clone()));
    assert!(!a.serve(logic.clone()), "only once");
    until("the logic learns of the connection made before", || !logic.seen.lock().unwrap().connections.is_empty())
        .await;
    assert!(b.mesh.call(a.local(), Service::Swim, Bytes::new(), LIMIT).await.is_ok());
    a.shutdown().await;
    assert_eq!(a.call(b.id(), Service::Swim, Bytes::new(), LIMIT).await, Err(CallError::Closed));
    until("the other side notices", || b.mesh.connected().is_empty()).await;
    b.mesh.shutdown().await;
    assert_eq!(Arc::strong_count(&b.logic), 1, "the mesh has let go of the logic");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_carry_frames_both_ways_and_end_in_order() {
    for over in ALL {
        let nodes = star(2, over).await;
        let (a, b) = (&nodes[0], &nodes[1]);
        for to in [a.id(), b.id()] {
            let mut stream = b.mesh.open_generate(to, LIMIT).await.unwrap();
            for len in [0, 1, 3, 5000, FRAME_LEN_BYTES_MAX] {
                stream.send.send(Bytes::from(vec![1; len])).await.unwrap();
                assert_eq!(stream.recv.recv().await.unwrap().unwrap().len(), len, "{over:?}");
            }
            let long = Bytes::from(vec![1; FRAME_LEN_BYTES_MAX + 1]);
            assert!(matches!(stream.send.send(long).await, Err(CallError::TooLong { .. })));
            // The server sends its last frame and drops: it arrives, and then the end.
            stream.send.send(Bytes::from_static(b"last")).await.unwrap();
            assert_eq!(&stream.recv.recv().await.unwrap().unwrap()[..], b"end", "{over:?}");
            assert_eq!(stream.recv.recv().await.unwrap(), None, "{over:?}");
        }
        stop(nodes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_dropped_midway_ends_for_the_other_side() {
    for over in ALL {
        let nodes = star(2, over).await;
        let (a, b) = (&nodes[0], &nodes[1]);
        let ended = |n| move |seen: &common::Node| seen.logic.seen.lock().unwrap().streams.len() == n;
        // Both halves.
        let mut stream = b.mesh.open_generate(a.id(), LIMIT).await.unwrap();
        stream.send.send(Bytes::from_static(b"x")).await.unwrap();
        stream.recv.recv().await.unwrap().unwrap();
        drop(stream);
        until("the server sees the end", || ended(1)(a)).await;
        // Only the sending half, only the receiving half.
        let mut stream = b.mesh.open_generate(a.id(), LIMIT).await.unwrap();
        stream.send.send(Bytes::from_static(b"x")).await.unwrap();
        drop(stream.send);
        until("the server sees the end of the sender", || ended(2)(a)).await;
        let mut stream = b.mesh.open_generate(a.id(), LIMIT).await.unwrap();
        stream.send.send(Bytes::from_static(b"x")).await.unwrap();
        drop(stream.recv);
        until("the server sees the end of the receiver", || ended(3)(a)).await;
        drop(stream.send);
        // The whole node goes.
        let mut stream = b.mesh.open_generate(a.id(), LIMIT).await.unwrap();
        stream.send.send(Bytes::from_static(b"x")).await.unwrap();
        stream.recv.recv().await.unwrap().unwrap();
        b.mesh.shutdown().await;
        until("the server sees the node go", || ended(4)(a)).await;
        assert!(stream.send.send(Bytes::from_static(b"x")).await.is_err() || stream.recv.recv().await.is_err());
        stop(nodes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_streams_is_served_whole() {
    for over in ALL {
        let nodes = star(2, over).await;
        let (to, mesh) = (nodes[0].id(), &nodes[1].mesh);
        // As many as may be open; the next one waits.
        let opened = futures::future::join_all((0..128).map(|_| async {
            let mut stream = mesh.open_generate(to, LIMIT).await.unwrap();
            stream.send.send(Bytes::from_static(b"x")).await.unwrap();
            stream.recv.recv().await.unwrap().unwrap();
            stream
        }))
        .await;
        let after = Duration::from_millis(200);
        assert!(matches!(mesh.open_generate(to, after).await, Err(CallError::Timeout { .. })), "{over:?}");
        drop(opened);
        assert!(mesh.open_generate(to, LIMIT).await.is_ok());
        stop(nodes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gossip_reaches_all_over_each_transport() {
    for over in ALL {
        let nodes = star(5, over).await;
        let topic = Topic::Weights(ModelName::new("demo").unwrap());
        for node in &nodes {
            node.mesh.subscribe(topic.clone());
            node.mesh.subscribe(topic.clone());
        }
        all_connected(&nodes).await;
        for (i, author) in nodes.iter().enumerate() {
            let others = || nodes.iter().filter(|n| n.id() != author.id());
            let end = Instant::now() + LIMIT;
            let mut round = 0;
            // The first messages may come before the peers have told what they subscribe to.
            while !others().all(|n| n.has_gossip(format!("{i} {}", round - 1).as_bytes())) {
                assert!(Instant::now() < end, "{over:?}: gossip of node {i} does not reach all");
                author.mesh.publish(topic.clone(), format!("{i} {round}").into_bytes());
                round += 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            for node in others() {
                let seen = node.logic.seen.lock().unwrap();
                assert!(
                    seen.gossip
                        .iter()
                        .filter(|g| g.2.starts_with(format!("{i} ").as_bytes()))
                        .all(|g| g.0 == author.id() && g.1 == topic)
                );
            }
        }
        stop(nodes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_gossip_is_not_passed_on_and_gets_its_sender_banned() {
    let nodes = star(3, Over::Tcp).await;
    for node in &nodes {
        node.mesh.subscribe(Topic::Nodes);
    }
    all_connected(&nodes).await;
    let (bad, good) = (&nodes[2], &nodes[..2]);
    let refused = |n: &common::Node| n.logic.seen.lock().unwrap().refused_gossip;
    let end = Instant::now() + LIMIT;
    while good.iter().any(|n| refused(n) == 0) {
        assert!(Instant::now() < end);
        bad.mesh.publish(Topic::Nodes, b"garbage".to_vec());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for node in good {
        let score = node.mesh.score(bad.id()).await;
        assert!(score.is_none_or(|s| s <= -10.0), "{score:?}");
        assert!(!node.has_gossip(b"garbage"));
    }
    // Graylisted by gossip after a few; the logic's own penalties ban it.
    for node in good {
        node.mesh.penalise(bad.id(), 100.0, "rollouts that do not verify");
        until("the bad node is cut off", || !node.mesh.connected().contains(&bad.id())).await;
        let err = node.mesh.call(bad.id(), Service::Swim, Bytes::new(), LIMIT).await.unwrap_err();
        assert!(err.to_string().contains("banned"), "{err}");
    }
    until("the bad node is alone", || bad.mesh.connected().is_empty()).await;
    assert!(good[0].mesh.call(good[1].id(), Service::Swim, Bytes::new(), LIMIT).await.is_ok());
    stop(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_peer_is_told_with_every_address_and_cause() {
    // A port on which certainly nothing listens any more, and one where another node answers.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (a, other) = (start(config(1, Over::Tcp)).await, start(config(2, Over::Tcp)).await);
    let nobody = starling_bootstrap::Identity::from_seed([9; 32]).node_id();
    let taken = other.mesh.addresses()[0].split("/p2p").next().unwrap().to_owned();
    let silent = format!("/ip4/127.0.0.1/udp/{closed}/quic-v1");
    let addresses = [format!("/ip4/127.0.0.1/tcp/{closed}"), taken.clone(), silent.clone(), "rubbish".into()];
    a.mesh.add_addresses(nobody, &addresses);
    let start = Instant::now();
    let err = a.mesh.call(nobody, Service::Swim, Bytes::new(), Duration::from_secs(30)).await.unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let CallError::NotConnected { peer, reason } = err else { panic!("{err}") };
    assert_eq!(peer, nobody);
    assert!(reason.contains(&format!("{}: connection refused", addresses[0])), "{reason}");
    assert!(reason.contains(&format!("{silent}: timeout")), "{reason}");
    assert!(reason.contains(&format!("{taken}: wrong peer id: node {}", other.id())), "{reason}");
    let reports = a.mesh.reachability();
    assert!(reports.iter().any(|r| r.peer == nobody && r.address == addresses[0] && r.error.contains("refused")));
    // With a shorter limit, what is known until then.
    let limit = Duration::from_millis(500);
    let err = a.mesh.call(nobody, Service::Swim, Bytes::new(), limit).await.unwrap_err();
    assert!(err.to_string().contains(&addresses[0]) && err.to_string().contains(&silent), "{err}");
    // Nobody knows this one.
    let unknown = starling_bootstrap::Identity::from_seed([8; 32]).node_id();
    let err = a.mesh.call(unknown, Service::Swim, Bytes::new(), LIMIT).await.unwrap_err();
    assert!(err.to_string().contains("no address is known"), "{err}");
    let err = a.mesh.call(NodeId([2; 32]), Service::Swim, Bytes::new(), LIMIT).await.unwrap_err();
    assert!(err.to_string().contains("not an ed25519 public key"), "{err}");
    stop(vec![a, other]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bootstrap_node_that_is_down_is_reported_and_found_when_it_comes() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address: libp2p::Multiaddr = format!("/ip4/127.0.0.1/tcp/{port}").parse().unwrap();
    let late = config(1, Over::Tcp);
    let (id, bootstrap) = (late.identity.node_id(), vec![(late.identity.node_id(), vec![address.clone()])]);
    let begin = Instant::now();
    let a = start(MeshConfig { bootstrap, ..config(2, Over::Tcp) }).await;
    until("the failure is reported", || !a.mesh.reachability().is_empty()).await;
    assert!(begin.elapsed() < Duration::from_secs(5));
    let report = &a.mesh.reachability()[0];
    assert_eq!((report.peer, report.address.clone()), (id, address.to_string()));
    assert!(report.error.contains("connection refused"), "{}", report.error);
    let b = start(MeshConfig { listen: vec![address], ..late }).await;
    until("it is found", || a.mesh.connected() == [id]).await;
    until("the report is gone", || a.mesh.reachability().is_empty()).await;
    // And again after a restart of the other side.
    b.mesh.shutdown().await;
    until("the loss is noticed", || a.mesh.connected().is_empty()).await;
    let seen = a.logic.seen.lock().unwrap().connections.clone();
    assert_eq!(seen, [(id, true), (id, false)]);
    // The cache of the last run is enough to come back.
    let cached = a.mesh.peers();
    a.mesh.shutdown().await;
    let b = start(MeshConfig { listen: b_listen(&report.address), ..config(1, Over::Tcp) }).await;
    let c = start(MeshConfig { cached, ..config(2, Over::Tcp) }).await;
    until("the cached peer is dialled", || c.mesh.connected() == [id]).await;
    stop(vec![b, c]).await;
}

fn b_listen(address: &str) -> Vec<libp2p::Multiaddr> {
    vec![address.parse().unwrap()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_mesh_is_refused_by_name() {
    for over in ALL {
        let a = start(config(1, over)).await;
        let stranger = MeshConfig { network: Hash::of(b"another"), ..config(2, over) };
        let addresses = a.mesh.addresses().iter().map(|x| x.parse().unwrap()).collect();
        let b = start(MeshConfig { bootstrap: vec![(a.id(), addresses)], ..stranger }).await;
        let err = b.mesh.call(a.id(), Service::Swim, Bytes::from_static(b"hi"), LIMIT).await.unwrap_err();
        assert!(matches!(&err, CallError::NotConnected { reason, .. } if reason.contains("other mesh")), "{err}");
        assert!(b.mesh.reachability().iter().any(|r| r.error.contains("other mesh")));
        assert!(a.mesh.connected().is_empty() && b.mesh.connected().is_empty());
        assert!(a.logic.seen.lock().unwrap().connections.is_empty());
        stop(vec![a, b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_in_use_is_named_at_start() {
    let a = start(config(1, Over::Tcp)).await;
    let taken: libp2p::Multiaddr = a.mesh.addresses()[0].split("/p2p").next().unwrap().parse().unwrap();
    let err = Mesh::start(MeshConfig { listen: vec![taken.clone()], ..config(2, Over::Tcp) }).await.unwrap_err();
    let text = err.to_string();
    assert!(text.contains(&taken.to_string()) && text.contains("in use"), "{text}");
    stop(vec![a]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_known_only_to_others_is_found_through_kademlia() {
    // c knows b only; b knows a. A call to a finds it.
    let a = start(config(1, Over::Both)).await;
    let b = start_with(2, Over::Both, &a).await;
    until("b and a are connected", || b.mesh.connected().len() == 1).await;
    let c = start_with(3, Over::Both, &b).await;
    until("c and b are connected", || c.mesh.connected().contains(&b.id())).await;
    let answer = c.mesh.call(a.id(), Service::Raft, Bytes::from_static(b"x"), LIMIT).await.unwrap();
    assert_eq!(&answer[..], b"\x01x");
    stop(vec![a, b, c]).await;
}
