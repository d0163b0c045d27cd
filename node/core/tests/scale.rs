//! How membership behaves as the mesh grows. By hand, because it takes minutes:
//! `SCALE=1000 cargo test --release -p starling-core --test scale -- --ignored --nocapture`.
#![expect(clippy::print_stdout, reason = "a measurement prints its figures")]

mod mesh;

use std::time::Duration;

use mesh::{Mesh, id};
use starling_core::memory_network::MemoryConfig;
use tokio::time::{Instant, sleep};

/// Resident memory in MiB.
fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// Processor time of this process in seconds; other processes slow the wall clock. Linux counts in hundredths.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks = stat.split_whitespace().skip(13).take(2).filter_map(|f| f.parse::<f64>().ok());
    ticks.sum::<f64>() / 100.0
}

struct Report {
    wall: std::time::Instant,
    virtual_start: Instant,
}

impl Report {
    fn say(&self, what: &str) {
        let (wall, time) = (self.wall.elapsed().as_secs_f64(), self.virtual_start.elapsed().as_secs_f64());
        println!(
            "{what:<60} virtual {time:>7.1} s, wall {wall:>6.1} s, cpu {:>6.1} s, {} MiB",
            cpu_s(),
            resident_mib()
        );
    }
}

async fn until(what: &str, limit: Duration, mut done: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        sleep(Duration::from_millis(250)).await;
    }
    start.elapsed()
}

async fn steady(mesh: &Mesh, seconds: u32) -> (f64, f64) {
    let before = mesh.traffic();
    sleep(Duration::from_secs(u64::from(seconds))).await;
    let after = mesh.traffic();
    let per = f64::from(seconds) * mesh.nodes.len() as f64;
    ((after.0 - before.0) as f64 / per, (after.1 - before.1) as f64 / per)
}

#[ignore = "a measurement; SCALE is the number of nodes"]
#[tokio::test(start_paused = true)]
async fn a_mesh_of_any_size_joins_notices_deaths_and_heals() {
    let n: u16 = std::env::var("SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1000);
    let virtual_s: u64 = std::env::var("SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(600);
    let report = Report { wall: std::time::Instant::now(), virtual_start: Instant::now() };
    let mut mesh = Mesh::new(1, MemoryConfig::default());
    for i in 1..=n {
        mesh.start(id(i), &[id(1)]).await;
        if i % 100 == 0 {
            sleep(Duration::from_millis(100)).await; // 1,000 joins a second
        }
    }
    report.say("all started");
    let all = usize::from(n);
    let limit = Duration::from_secs(600);
    until("all know all", limit, || mesh.members().all(|m| m.live_count() == all)).await;
    report.say("all know all");
    until("all have all records", limit, || mesh.members().all(|m| m.record_count() == all)).await;
    report.say("all have all records");
    sleep(Duration::from_secs(30)).await;
    let mut events: Vec<_> = mesh.members().take(10).map(|m| m.events()).collect();
    let (messages, bytes) = steady(&mesh, 30).await;
    report.say(&format!("steady: {messages:.2} messages, {bytes:.0} bytes a node and second"));

    for i in [5, 6, 7] {
        mesh.crash(id(i));
    }
    let first = until("someone knows", limit, || mesh.members().any(|m| !m.is_live(id(5)))).await;
    let rest = until("all know", limit, || mesh.members().all(|m| m.live_count() == all - 3)).await;
    report.say(&format!("three killed: first noticed after {first:?}, all know {rest:?} later"));

    let half: Vec<_> = mesh.nodes.keys().copied().step_by(2).collect();
    mesh.network.partition(&half);
    let (a, b) = (half.len(), all - 3 - half.len());
    let took = until("each half alone", limit, || mesh.members().all(|m| [a, b].contains(&m.live_count()))).await;
    report.say(&format!("partition: each half knows after {took:?}"));
    sleep(Duration::from_secs(30)).await;
    mesh.network.heal_all();
    let took = until("healed", limit, || mesh.members().all(|m| m.live_count() == all - 3)).await;
    report.say(&format!("healed after {took:?}"));
    let elapsed = report.virtual_start.elapsed();
    sleep(Duration::from_secs(virtual_s).saturating_sub(elapsed)).await;
    report.say("the rest of the time");
    for events in &mut events {
        while events.try_recv().is_ok() {}
    }
    let (messages, bytes) = steady(&mesh, 30).await;
    report.say(&format!("steady: {messages:.2} messages, {bytes:.0} bytes a node and second"));
    assert!(mesh.members().all(|m| m.live_count() == all - 3), "nobody is suspected wrongly");
    let mistakes: usize = events.iter_mut().map(|e| usize::from(e.try_recv().is_ok())).sum();
    assert_eq!(mistakes, 0, "and nothing came or went");
}
