//! The promises under cuts: five processes in network namespaces train while links fail in every way that packet
//! filters, traffic shaping and pulled cables can make them fail.

use anyhow::{Context, ensure};
use serde_json::Value;
use starling_tests::{Job, MODEL, Network, Role, TestMesh, patience, until};
use std::collections::BTreeMap;
use std::io::Write;
use std::time::{Duration, Instant};

const SERVERS: usize = 3;
const CLIENTS: usize = 2;
const SLOTS: usize = 8;
/// A step is committed within this time of a cut or a heal: missed after 3 s, elected in 2, trained in a few, and as
/// much again, for two cores are shared by five nodes and their agents.
const STEP_LIMIT: Duration = Duration::from_secs(30);
/// All servers have the newest version within this time of a heal: former peers are dialled again after pauses that
/// grow with the cut, at most 16 s after one of 15 s; then the weights are fetched.
const CONVERGE_LIMIT: Duration = Duration::from_secs(40);
/// Promise 5: no wait without a reason for longer than this.
const SILENCE_LIMIT: Duration = Duration::from_secs(5);
/// What was on its way when the cut came may still arrive: an append that was answered before, a snapshot of the store.
const IN_FLIGHT: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The scenario: a mesh, what was seen of it, and what is asked of it.
struct Cuts {
    mesh: TestMesh,
    started: Instant,
    /// Of each node: its version and since when it neither moved nor named a reason.
    silent: BTreeMap<usize, (u64, Instant)>,
}

#[tokio::test]
async fn training_survives_every_kind_of_cut() -> anyhow::Result<()> {
    if let Some(why) = Network::why_not() {
        // Not by a macro, whose output the test harness would hide.
        let told = format!("\nskipped: partition.rs has tested NOTHING here: {why}\n");
        std::io::stderr().write_all(told.as_bytes())?;
        return Ok(());
    }
    let nodes = u8::try_from(SERVERS + CLIENTS)?;
    let mut mesh = TestMesh::new("partition")?.within(Network::new(nodes)?);
    for i in 1..=SERVERS {
        mesh.add(&format!("server-{i}"), Role::Server).await?;
    }
    mesh.meet().await?;
    let job = Job { groups_per_step: 4, group_size: 4, lease_ttl_s: 5, ..Job::tiny("partition", 100_000) };
    let job = mesh.submit(0, &job).await?;
    for i in 1..=CLIENTS {
        mesh.add(&format!("client-{i}"), Role::rust_agent(SLOTS)?).await?;
    }
    mesh.meet().await?;
    mesh.reach(1, STEP_LIMIT).await?;
    let mut cuts = Cuts { mesh, started: Instant::now(), silent: BTreeMap::new() };

    cuts.a_leader_that_is_cut_off_is_replaced_and_follows_after_the_heal().await?;
    cuts.a_leader_that_only_hears_or_only_speaks_is_replaced().await?;
    cuts.a_pulled_cable_and_its_return().await?;
    cuts.two_halves_that_only_one_node_reaches().await?;
    cuts.a_split_through_the_middle().await?;
    cuts.lost_packets_and_a_slow_line().await?;
    cuts.nothing_was_lost_or_done_twice(&job).await
}

impl Cuts {
    fn say(&self, what: &str) {
        eprintln!("{:6.1} s  {what}", self.started.elapsed().as_secs_f64());
    }

    async fn leader(&self) -> anyhow::Result<usize> {
        until("a server leads", STEP_LIMIT, async || self.mesh.leader().await.ok_or_else(|| "none".into())).await
    }

    /// Minority server, the leader at that: cut off from everyone for 15 s.
    async fn a_leader_that_is_cut_off_is_replaced_and_follows_after_the_heal(&mut self) -> anyhow::Result<()> {
        let old = self.leader().await?;
        let term = self.term(old).await?;
        let others = self.all_but(old);
        self.mesh.network()?.separate(&[&[old], &others])?;
        let cut = Instant::now();
        self.hold(IN_FLIGHT).await?;
        let (stale, before) = (self.mesh.version_of(old).await?, self.newest(&others).await?);
        let now = self.beyond(before, &others).await?;
        let new = self.leader_among(&others, term).await?;
        self.say(&format!(
            "cut off: {} led term {term}, {} leads now; version {before} -> {now} after {:.1?}",
            self.name(old),
            self.name(new),
            cut.elapsed()
        ));
        self.hold(Duration::from_secs(15).saturating_sub(cut.elapsed())).await?;
        let still = self.mesh.version_of(old).await?;
        ensure!(still == stale, "{}, cut off, went from version {stale} to {still}", self.name(old));
        self.mesh.network()?.heal()?;
        self.converge("cut off").await
    }

    /// One direction only. A leader whose heartbeats reach nobody is replaced. One that hears nobody has no quorum, so
    /// that the others must either get a new leader or, if its heartbeats hold them back, the cut must end first: what
    /// is asked for is that nothing is committed by it, and that training goes on after the heal.
    async fn a_leader_that_only_hears_or_only_speaks_is_replaced(&mut self) -> anyhow::Result<()> {
        for speaks in [false, true] {
            let old = self.leader().await?;
            let term = self.term(old).await?;
            let others = self.all_but(old);
            let network = self.mesh.network()?;
            if speaks {
                network.cut(old, &others, &[])?
            } else {
                network.cut(old, &[], &others)?
            }
            let cut = Instant::now();
            self.hold(IN_FLIGHT).await?;
            let (stale, before) = (self.mesh.version_of(old).await?, self.newest(&others).await?);
            let now = self.beyond(before, &others).await?;
            let new = self.leader_among(&others, term).await?;
            let how = if speaks { "only speaks" } else { "only hears" };
            self.say(&format!(
                "{how}: {} led term {term}, {} leads now; version {before} -> {now} after {:.1?}",
                self.name(old),
                self.name(new),
                cut.elapsed()
            ));
            let still = self.mesh.version_of(old).await?;
            ensure!(still == stale, "{}, which {how}, went from version {stale} to {still}", self.name(old));
            self.mesh.network()?.heal()?;
            self.converge(how).await?;
        }
        Ok(())
    }

    async fn a_pulled_cable_and_its_return(&mut self) -> anyhow::Result<()> {
        let leader = self.leader().await?;
        let follower = (0..SERVERS).find(|i| *i != leader).context("another server")?;
        // First a follower and a client, whose absence changes nothing; then the leader itself.
        for pulled in [vec![follower, SERVERS], vec![leader]] {
            let rest: Vec<usize> = (0..SERVERS + CLIENTS).filter(|i| !pulled.contains(i)).collect();
            pulled.iter().try_for_each(|i| self.mesh.network()?.plug(*i, false))?;
            let cut = Instant::now();
            self.hold(IN_FLIGHT).await?;
            let before = self.newest(&rest).await?;
            let now = self.beyond(before, &rest).await?;
            let names: Vec<_> = pulled.iter().map(|i| self.name(*i)).collect();
            self.say(&format!("without {}: version {before} -> {now} after {:.1?}", names.join(", "), cut.elapsed()));
            pulled.iter().try_for_each(|i| self.mesh.network()?.plug(*i, true))?;
            self.converge("the cable").await?;
        }
        Ok(())
    }

    /// One server is the only one that both halves reach.
    async fn two_halves_that_only_one_node_reaches(&mut self) -> anyhow::Result<()> {
        let leader = self.leader().await?;
        let middle = (0..SERVERS).find(|i| *i != leader).context("another server")?;
        let other = (0..SERVERS).find(|i| *i != leader && *i != middle).context("a third server")?;
        self.mesh.network()?.separate(&[&[leader, SERVERS, middle], &[other, SERVERS + 1, middle]])?;
        let cut = Instant::now();
        self.hold(IN_FLIGHT).await?;
        let before = self.mesh.version().await;
        let now = self.beyond(before, &[leader, middle, other]).await?;
        self.say(&format!("{} between: version {before} -> {now} after {:.1?}", self.name(middle), cut.elapsed()));
        self.hold(Duration::from_secs(5)).await?;
        self.mesh.network()?.heal()?;
        self.converge("two halves").await
    }

    /// {1 server, 1 client} and {2 servers, 1 client}; the leader is on the side that cannot commit.
    async fn a_split_through_the_middle(&mut self) -> anyhow::Result<()> {
        let old = self.leader().await?;
        let small = [old, SERVERS];
        let large: Vec<usize> = (0..SERVERS + CLIENTS).filter(|i| !small.contains(i)).collect();
        self.mesh.network()?.separate(&[&small, &large])?;
        let cut = Instant::now();
        self.hold(IN_FLIGHT).await?;
        let (stale, before) = (self.mesh.version_of(old).await?, self.newest(&large).await?);
        let now = self.beyond(before, &large).await?;
        self.say(&format!("split: version {before} -> {now} after {:.1?}", cut.elapsed()));
        self.hold(Duration::from_secs(8).saturating_sub(cut.elapsed())).await?;
        let still = self.mesh.version_of(old).await?;
        ensure!(still == stale, "{}, in the minority, went from version {stale} to {still}", self.name(old));
        self.mesh.network()?.heal()?;
        self.converge("the split").await
    }

    /// A fifth of all packets is lost; then one server has a line of 1 Mbit/s, over which new weights take half a minute.
    async fn lost_packets_and_a_slow_line(&mut self) -> anyhow::Result<()> {
        (0..SERVERS + CLIENTS).try_for_each(|i| self.mesh.network()?.lose(i, 20))?;
        let all: Vec<usize> = (0..SERVERS + CLIENTS).collect();
        let (begun, before) = (Instant::now(), self.mesh.version().await);
        let now = self.beyond(before, &all).await?;
        self.say(&format!("a fifth lost: version {before} -> {now} after {:.1?}", begun.elapsed()));
        self.mesh.network()?.heal()?;
        self.converge("lost packets").await?;

        let leader = self.leader().await?;
        let slow = (0..SERVERS).find(|i| *i != leader).context("another server")?;
        self.mesh.network()?.throttle(slow, Some("1mbit"))?;
        let (begun, before) = (Instant::now(), self.mesh.version().await);
        let now = self.beyond(before + 1, &all).await?;
        self.say(&format!("{} is slow: version {before} -> {now} after {:.1?}", self.name(slow), begun.elapsed()));
        self.mesh.network()?.throttle(slow, None)?;
        self.converge("the slow line").await
    }

    /// The end: all servers agree, and the stores of all nodes prove the promises.
    async fn nothing_was_lost_or_done_twice(mut self, job: &str) -> anyhow::Result<()> {
        self.mesh.ensure_all_run()?;
        let last = self.mesh.settle(job, STEP_LIMIT).await?;
        self.mesh.stop_all().await?;
        let report = self.mesh.read_stores()?;
        report.ensure_clean()?;
        let audit = &report.audit;
        ensure!(report.steps.len() as u64 == last, "the stores have every version of {MODEL} up to {last}: {audit:?}");
        ensure!(audit.acknowledged > 0 && audit.consumed > 0, "it was training: {audit:?}");
        self.say(&format!(
            "{last} steps, {} acknowledged, {} consumed, none lost, none twice",
            audit.acknowledged, audit.consumed
        ));
        self.mesh.passed();
        Ok(())
    }

    // What is asked of the mesh.

    fn name(&self, i: usize) -> String {
        self.mesh[i].name().to_owned()
    }

    fn all_but(&self, i: usize) -> Vec<usize> {
        (0..SERVERS + CLIENTS).filter(|j| *j != i).collect()
    }

    async fn view(&self, i: usize) -> anyhow::Result<Value> {
        self.mesh[i].admin(&format!("/models/{MODEL}")).await
    }

    async fn term(&self, i: usize) -> anyhow::Result<u64> {
        self.view(i).await?["term"].as_u64().context("a term")
    }

    /// The newest version of the servers among `nodes`.
    async fn newest(&self, nodes: &[usize]) -> anyhow::Result<u64> {
        let mut newest = 0;
        for i in nodes.iter().filter(|i| **i < SERVERS) {
            newest = newest.max(self.mesh.version_of(*i).await?);
        }
        Ok(newest)
    }

    /// Waits until a server among `nodes` has a later version than `version`.
    async fn beyond(&mut self, version: u64, nodes: &[usize]) -> anyhow::Result<u64> {
        let end = Instant::now() + patience(STEP_LIMIT);
        loop {
            let seen = self.look().await?;
            let newest = self.newest(nodes).await?;
            if newest > version {
                return Ok(newest);
            }
            ensure!(Instant::now() < end, "no version after {version} within {STEP_LIMIT:?}: {seen}");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// The server among `nodes` that leads in a later term than `term`.
    async fn leader_among(&self, nodes: &[usize], term: u64) -> anyhow::Result<usize> {
        until("a new leader", STEP_LIMIT, async || {
            let mut seen = String::new();
            for i in nodes.iter().filter(|i| **i < SERVERS) {
                let view = self.view(*i).await.map_err(|e| format!("{e:#}"))?;
                if view["is_leader"] == true && view["term"].as_u64() > Some(term) {
                    return Ok(*i);
                }
                seen = format!("{seen} {}: {view}", self.name(*i));
            }
            Err(seen)
        })
        .await
    }

    /// All servers have what the newest one had at the heal, and one version more is committed.
    async fn converge(&mut self, after: &str) -> anyhow::Result<()> {
        let (healed, end) = (Instant::now(), Instant::now() + patience(CONVERGE_LIMIT));
        let target = self.mesh.version().await + 1;
        loop {
            let seen = self.look().await?;
            let mut oldest = u64::MAX;
            for i in 0..SERVERS {
                oldest = oldest.min(self.mesh.version_of(i).await?);
            }
            if oldest >= target {
                break;
            }
            ensure!(
                Instant::now() < end,
                "{after} is over, and not all servers have version {target} within {CONVERGE_LIMIT:?}: {seen}"
            );
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.say(&format!("        healed: all servers have version {target} after {:.1?}", healed.elapsed()));
        Ok(())
    }

    /// Looks at the mesh for `time`.
    async fn hold(&mut self, time: Duration) -> anyhow::Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.look().await?;
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Looks at every node once; fails when one neither moves nor says why for [`SILENCE_LIMIT`]. Returns what they say.
    async fn look(&mut self) -> anyhow::Result<String> {
        let mut seen = String::new();
        for i in 0..SERVERS + CLIENTS {
            let status = self.mesh[i].admin("/status").await?;
            let version = status["models"][0]["version"].as_u64().unwrap_or(0);
            let says = status["doing"].as_array().is_some_and(|d| !d.is_empty());
            let (before, since) = self.silent.entry(i).or_insert((version, Instant::now()));
            if says || *before != version {
                (*before, *since) = (version, Instant::now());
            }
            let silence = since.elapsed();
            ensure!(silence < patience(SILENCE_LIMIT), "{} gave no reason for {silence:?}: {status}", self.name(i));
            seen = format!("{seen}\n  {}: version {version}, {}", self.name(i), status["doing"]);
        }
        Ok(seen)
    }
}
