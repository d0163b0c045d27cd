//! The promises under SIGKILL: a mesh of five processes trains while any of them is killed again and again.

use rand::RngExt;
use starling_tests::{Job, MODEL, Role, Seed, TestMesh, until};
use std::time::{Duration, Instant};

const SERVERS: usize = 3;
const CLIENTS: usize = 2;
const SLOTS: usize = 8;
const KILLS: usize = 20;
/// A step is committed within this time of a kill, restart included.
const STEP_LIMIT: Duration = Duration::from_secs(30);
/// The killed process stays away for up to this time.
const AWAY_MS_MAX: u64 = 2000;
/// How long training goes on undisturbed before the next kill, at most.
const CALM_MS_MAX: u64 = 1500;

#[tokio::test]
async fn any_process_may_be_killed_twenty_times() -> anyhow::Result<()> {
    let started = Instant::now();
    let seed = Seed::draw();
    let mut rng = seed.rng();
    let mut mesh = TestMesh::new("kill-anything")?.seeded(seed);
    for i in 1..=SERVERS {
        mesh.add(&format!("server-{i}"), Role::Server).await?;
    }
    mesh.meet().await?;
    let job = Job {
        groups_per_step: 8,
        group_size: 4,
        lease_ttl_s: 5,
        seed: seed.0,
        sets: vec!["sums", "calculator"],
        ..Job::tiny("kill-anything", 100_000)
    };
    let job = mesh.submit(0, &job).await?;
    for i in 1..=CLIENTS {
        mesh.add(&format!("client-{i}"), Role::rust_agent(SLOTS)?).await?;
    }
    mesh.reach(1, STEP_LIMIT).await?;
    eprintln!("{:6.1} s  the first step is committed", started.elapsed().as_secs_f64());

    let mut leaders_killed = 0;
    let mut slowest = Duration::ZERO;
    for kill in 1..=KILLS {
        let victim = rng.random_range(0..SERVERS + CLIENTS);
        let calm = Duration::from_millis(rng.random_range(0..=CALM_MS_MAX));
        let away = Duration::from_millis(rng.random_range(0..=AWAY_MS_MAX));
        // The moment of the kill is drawn: this is no wait for anything.
        tokio::time::sleep(calm).await;
        mesh.ensure_all_run()?;
        let led = mesh.leader().await == Some(victim);
        mesh.kill(victim)?;
        let killed = Instant::now();
        // Whatever a survivor has now was committed before: only a later step counts.
        let before = mesh.version().await;
        tokio::time::sleep(away).await;
        // The next victim may be a server, so this one must be up again before.
        mesh.start(victim).await?;
        let version = mesh.reach(before + 1, STEP_LIMIT.saturating_sub(killed.elapsed())).await?;
        let took = killed.elapsed();
        // Else the next kill would find two of three servers missing.
        mesh.caught_up(victim, before, STEP_LIMIT).await?;
        leaders_killed += usize::from(led);
        slowest = slowest.max(took);
        let who = format!("{}{}", mesh[victim].name(), if led { ", the leader" } else { "" });
        eprintln!(
            "{:6.1} s  kill {kill:>2}: {who}, away {away:?}; version {before} -> {version} after {took:.1?}",
            started.elapsed().as_secs_f64()
        );
    }
    mesh.ensure_all_run()?;

    let last = mesh.settle(&job, STEP_LIMIT).await?;

    mesh.stop_all().await?;
    until("no process is left", Duration::from_secs(10), async || match mesh.processes() {
        left if left.is_empty() => Ok(()),
        left => Err(left.join("\n")),
    })
    .await?;
    let report = mesh.read_stores()?;
    report.ensure_clean()?;
    let audit = &report.audit;
    assert_eq!(report.steps.len() as u64, last, "the stores have every version of {MODEL} up to the last one");
    assert!(last > KILLS as u64, "a step for every kill: {last}");
    assert!(audit.consumed > 0 && audit.consumed <= audit.held, "consumed rollouts are held: {audit:?}");
    assert!(audit.acknowledged > 0, "episodes were acknowledged");
    eprintln!(
        "{KILLS} kills ({leaders_killed} of a leader), {last} steps, {} acknowledged, {} consumed, none lost, none twice; \
         slowest step after a kill {slowest:.1?}; {:.0} s",
        audit.acknowledged,
        audit.consumed,
        started.elapsed().as_secs_f64()
    );
    mesh.passed();
    Ok(())
}
