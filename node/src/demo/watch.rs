//! What the demo sees of its mesh, over the servers' admin routes.

use super::mesh::Demo;
use serde_json::Value;
use starling_protocol::assignment::EvalPhase;
use starling_protocol::control::{EvalScore, EvaluationCompleted};
use starling_protocol::{ModelName, NodeId, PolicyVersion, Term};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// One committed step, for the curve.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Point {
    pub(super) version: u64,
    pub(super) term: u64,
    pub(super) at_s: f64,
    pub(super) reward: BTreeMap<String, f64>,
    pub(super) metrics: Value,
}

pub(super) struct Watch {
    model: ModelName,
    steps_wanted: u64,
    started: Instant,
    points: Vec<Point>,
    evaluations: Vec<EvaluationCompleted>,
    leader: Option<(NodeId, u64)>,
    terms_led: BTreeSet<u64>,
    aborted: u64,
    leases_expired: u64,
    finished: bool,
    doing: String,
    news: Vec<String>,
    kill: Option<Kill>,
    leader_kills: u32,
}

struct Kill {
    at: Instant,
    term: u64,
    version: u64,
    election_ms: Option<u64>,
    recovery_ms: Option<u64>,
}

impl Watch {
    pub(super) fn new(model: &ModelName, steps_wanted: u64) -> Self {
        Self {
            model: model.clone(),
            steps_wanted,
            started: Instant::now(),
            points: Vec::new(),
            evaluations: Vec::new(),
            leader: None,
            terms_led: BTreeSet::new(),
            aborted: 0,
            leases_expired: 0,
            finished: false,
            doing: "nothing heard from the mesh yet".into(),
            news: Vec::new(),
            kill: None,
            leader_kills: 0,
        }
    }

    pub(super) fn steps(&self) -> u64 {
        self.points.last().map_or(0, |p| p.version)
    }
    pub(super) fn finished(&self) -> bool {
        self.finished
    }
    pub(super) fn last_doing(&self) -> &str {
        &self.doing
    }
    pub(super) fn curve(&self) -> &[Point] {
        &self.points
    }
    pub(super) fn leader_kills(&self) -> u32 {
        self.leader_kills
    }
    pub(super) fn terms(&self) -> &BTreeSet<u64> {
        &self.terms_led
    }
    pub(super) fn aborted(&self) -> (u64, u64) {
        (self.aborted, self.leases_expired)
    }
    pub(super) fn election_ms(&self) -> Option<u64> {
        self.kill.as_ref()?.election_ms
    }
    pub(super) fn recovery_ms(&self) -> Option<u64> {
        self.kill.as_ref()?.recovery_ms
    }
    pub(super) fn scores(&self, phase: EvalPhase) -> BTreeMap<String, EvalScore> {
        self.evaluations.iter().find(|e| e.phase == phase).map(|e| e.scores.clone()).unwrap_or_default()
    }

    pub(super) fn leader_index(&self, demo: &Demo) -> Option<usize> {
        demo.index_of(self.leader?.0)
    }

    pub(super) fn note_kill(&mut self) {
        self.leader_kills += 1;
        let term = self.leader.map_or(0, |(_, t)| t);
        self.kill =
            Some(Kill { at: Instant::now(), term, version: self.steps(), election_ms: None, recovery_ms: None });
        self.leader = None;
    }

    /// Lines for the terminal since the last call.
    pub(super) fn news(&mut self) -> Vec<String> {
        std::mem::take(&mut self.news)
    }

    pub(super) async fn poll(&mut self, demo: &Demo) {
        for (_, client) in demo.live_servers() {
            let Ok(status) = client.get::<Value>(&format!("/models/{}", self.model)).await else { continue };
            let ahead = steps_of(&status["version"]) > self.steps();
            self.on_status(&status);
            if ahead && let Ok(steps) = client.get::<Value>(&format!("/steps/{}", self.model)).await {
                self.on_steps(&steps);
            }
        }
    }

    fn on_status(&mut self, s: &Value) {
        let term = s["term"].as_u64().unwrap_or(0);
        if s["is_leader"] == true
            && self.leader.is_none_or(|(_, t)| term > t)
            && let Some(node) = s["leader"].as_str().and_then(|n| n.parse::<NodeId>().ok())
        {
            if let Some(k) = &mut self.kill
                && term > k.term
                && k.election_ms.is_none()
            {
                let ms = u64::try_from(k.at.elapsed().as_millis()).unwrap_or(u64::MAX);
                k.election_ms = Some(ms);
                self.news.push(format!("a new leader after {ms} ms: {} in term {}", node.short(), Term(term)));
            }
            self.leader = Some((node, term));
            self.terms_led.insert(term);
        }
        if s["is_leader"] == true {
            if let Some(d) = s["activity"]["doing"].as_str() {
                d.clone_into(&mut self.doing);
            }
            self.aborted = self.aborted.max(s["ledger"]["aborted"].as_u64().unwrap_or(0));
            self.leases_expired = self.leases_expired.max(s["ledger"]["leases_expired"].as_u64().unwrap_or(0));
        }
        let Some(job) = s["jobs"].as_array().and_then(|j| j.last()) else { return };
        let evaluations: Vec<EvaluationCompleted> =
            serde_json::from_value(job["evaluations"].clone()).unwrap_or_default();
        for e in evaluations.into_iter().skip(self.evaluations.len()) {
            for (set, s) in &e.scores {
                self.news.push(format!(
                    "{:?} evaluation of {set}: {:.3} ± {:.3} sampled, {:.3} greedy ({} episodes each)",
                    e.phase, s.mean, s.ci95, s.greedy_mean, s.samples
                ));
            }
            self.evaluations.push(e);
        }
        self.finished |= !job["end"].is_null();
    }

    fn on_steps(&mut self, v: &Value) {
        for s in v["steps"].as_array().into_iter().flatten() {
            let version = steps_of(&s["version"]);
            if version <= self.steps() {
                continue;
            }
            let reward: BTreeMap<String, f64> =
                serde_json::from_value(s["metrics"]["reward"].clone()).unwrap_or_default();
            if let Some(k) = &mut self.kill
                && version > k.version
                && k.recovery_ms.is_none()
                && s["term"].as_u64().unwrap_or(0) > k.term
            {
                k.recovery_ms = Some(u64::try_from(k.at.elapsed().as_millis()).unwrap_or(u64::MAX));
            }
            let rewards: Vec<String> = reward.iter().map(|(k, r)| format!("{k} {r:.2} {}", bar(*r))).collect();
            self.news.push(format!("step {version:>3}/{}  {}", self.steps_wanted, rewards.join("  ")));
            self.points.push(Point {
                version,
                term: s["term"].as_u64().unwrap_or(0),
                at_s: self.started.elapsed().as_secs_f64(),
                reward,
                metrics: s["metrics"].clone(),
            });
        }
    }
}

/// A reward of 0 to 1 as ten characters.
fn bar(reward: f64) -> String {
    let full = (0..10).filter(|i| f64::from(*i) + 0.5 < reward * 10.0).count();
    format!("{}{}", "█".repeat(full), "·".repeat(10 - full))
}

/// Steps that made a version.
fn steps_of(version: &Value) -> u64 {
    PolicyVersion(version.as_u64().unwrap_or(0)).steps()
}
