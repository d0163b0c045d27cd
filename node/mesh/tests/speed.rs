//! What calls and streams cost. Run by hand: `cargo test --release -p starling-mesh --test speed -- --ignored --nocapture`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement for people")]

mod common;

use bytes::Bytes;
use common::{LIMIT, Over, all_connected, star, stop};
use starling_core::transport::Transport;
use starling_protocol::wire::Service;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// CPU time of this process: both nodes together.
fn cpu() -> Duration {
    // SAFETY: getrusage fills the struct that it is given.
    let usage = unsafe {
        let mut usage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage
    };
    let time = |t: libc::timeval| {
        Duration::from_secs(u64::try_from(t.tv_sec).unwrap()) + Duration::from_micros(u64::try_from(t.tv_usec).unwrap())
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

async fn measure<F: Future<Output = ()> + Send>(what: &str, tasks: usize, job: impl Fn() -> F + Send + Sync + 'static) {
    const TIME: Duration = Duration::from_secs(2);
    let (job, count) = (Arc::new(job), Arc::new(AtomicU64::new(0)));
    job().await;
    let (begin, before) = (Instant::now(), cpu());
    let running: Vec<_> = (0..tasks)
        .map(|_| {
            let (job, count) = (Arc::clone(&job), Arc::clone(&count));
            // Each task is polled here, so the job need not be 'static.
            async move {
                while begin.elapsed() < TIME {
                    job().await;
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        })
        .collect();
    futures::future::join_all(running).await;
    let (n, wall, cpu) = (count.load(Ordering::Relaxed), begin.elapsed(), cpu() - before);
    let n = f64::from(u32::try_from(n).unwrap());
    println!(
        "{what:44} {tasks:3} at once: {:7.0}/s, {:6.1} us CPU each (both nodes), {:7.0}/s per core",
        n / wall.as_secs_f64(),
        cpu.as_secs_f64() * 1e6 / n,
        n / cpu.as_secs_f64()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn calls_and_streams() {
    for over in [Over::Quic, Over::Tcp] {
        let nodes = star(2, over).await;
        all_connected(&nodes).await;
        let to = nodes[0].id();
        for (len, tasks) in [(100, 1), (100, 32), (10_000, 8), (1 << 20, 4), (4 << 20, 2)] {
            let (mesh, body) = (Arc::clone(&nodes[1].mesh), Bytes::from(vec![1; len]));
            measure(&format!("{over:?} call of {len} bytes, echoed"), tasks, move || {
                let (mesh, body) = (Arc::clone(&mesh), body.clone());
                async move {
                    mesh.call(to, Service::Raft, body, LIMIT).await.unwrap();
                }
            })
            .await;
        }
        for tasks in [1, 16] {
            let mesh = Arc::clone(&nodes[1].mesh);
            measure(&format!("{over:?} open stream, one frame each way, close"), tasks, move || {
                let mesh = Arc::clone(&mesh);
                async move {
                    let mut stream = mesh.open_generate(to, LIMIT).await.unwrap();
                    stream.send.send(Bytes::from_static(b"x")).await.unwrap();
                    stream.recv.recv().await.unwrap().unwrap();
                }
            })
            .await;
        }
        let stream = Arc::new(tokio::sync::Mutex::new(nodes[1].mesh.open_generate(to, LIMIT).await.unwrap()));
        measure(&format!("{over:?} frame of 40 bytes, there and back"), 1, move || {
            let stream = Arc::clone(&stream);
            async move {
                let mut stream = stream.lock().await;
                stream.send.send(Bytes::from(vec![1; 40])).await.unwrap();
                stream.recv.recv().await.unwrap().unwrap();
            }
        })
        .await;
        stop(nodes).await;
    }
}
