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
        back_in_the_mesh(&mesh, victim, before).await?;
        leaders_killed += usize::from(led);
        slowest = slowest.max(took);
        let who = format!("{}{}", mesh[victim].name(), if led { ", the leader" } else { "" });
        eprintln!(
            "{:6.1} s  kill {kill:>2}: {who}, away {away:?}; version {before} -> {version} after {took:.1?}",
            started.elapsed().as_secs_f64()
        );
    }
    mesh.ensure_all_run()?;

    // All servers agree on the last version once nothing more is committed.
    let stopped = until("the job is stopped", STEP_LIMIT, async || {
        let output = mesh[0].cli(&["job", "stop", &job]).await.map_err(|e| format!("{e:#}"))?;
        if output.code == Some(0) { Ok(()) } else { Err(output.stderr) }
    });
    stopped.await?;
    until("all servers have the same version and the job's end", STEP_LIMIT, async || {
        let views = mesh.model_views().await;
        let facts = |v: &serde_json::Value| (v["version"].clone(), v["jobs"][0]["end"].clone());
        let same = views.iter().all(|(_, v)| facts(v) == facts(&views[0].1) && !v["jobs"][0]["end"].is_null());
        if views.len() == SERVERS && same {
            Ok(())
        } else {
            Err(format!("{:?}", views.iter().map(|(i, v)| (i, facts(v))).collect::<Vec<_>>()))
        }
    })
    .await?;
    let last = mesh.version().await;

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

/// Node `i` knows all others, and as a server it has caught up with `version`.
async fn back_in_the_mesh(mesh: &TestMesh, i: usize, version: u64) -> anyhow::Result<()> {
    let node = &mesh[i];
    until(&format!("{} is back in the mesh", node.name()), STEP_LIMIT, async || {
        let status = node.admin("/status").await.map_err(|e| format!("{e:#}"))?;
        let members = status["members"].as_array().map_or(0, Vec::len);
        let has = status["models"][0]["version"].as_u64();
        let caught_up = !node.is_server() || has >= Some(version);
        if members == SERVERS + CLIENTS && caught_up {
            Ok(())
        } else {
            Err(format!("{members} members, version {has:?} of {version}; {}", status["doing"]))
        }
    })
    .await
}
