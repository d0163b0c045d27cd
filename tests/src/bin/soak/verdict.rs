//! What a run's files prove: one line for each promise, and the figures.

use crate::read::{Event, Run, Sample};
use crate::silence::{self, Waits};
use crate::slope::{median, theil_sen};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A process is judged for leaks after this time: models are loaded, caches and pools filled, and the files of the store,
/// which keep weights for an hour, have grown for a while.
const WARM_UP_S: f64 = 20.0 * 60.0;
/// And over at least this time.
const JUDGED_S_MIN: f64 = 30.0 * 60.0;
/// Growth of resident memory that counts as a leak. Some 8,000 episodes an hour pass through the mesh, so this is 2 KiB for
/// each of them or 64 KiB for each step, less than any of the buffers that one of them needs; and far more than what the
/// lists of versions grow by (some bytes an episode).
const RSS_MIB_PER_H_MAX: f64 = 16.0;
/// Growth of open files that counts as a leak: the run has some 40 faults an hour, most of them with new connections to
/// everyone, and RocksDB's tables come and go.
const FILES_PER_H_MAX: f64 = 12.0;
/// What a store may take up beyond its quota: the quota is looked at once a second, logs and the node's other files.
const DISK_SLACK_BYTES: f64 = GIB / 4.0;
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// What came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Held,
    Broken,
    /// The run was too short, or has not ended.
    NotJudged,
}

/// One promise.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    pub(crate) promise: &'static str,
    pub(crate) outcome: Outcome,
    /// Figures, or what broke it.
    pub(crate) found: String,
}

pub(crate) struct Verdict {
    pub(crate) checks: Vec<Check>,
    pub(crate) lives: Vec<Life>,
    pub(crate) figures: Value,
}

/// A process from one start to its end.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) node: String,
    pub(crate) life: u32,
    pub(crate) length_s: f64,
    /// After the warm-up.
    pub(crate) rss_mib: f64,
    /// By hour; `None` if it was too short.
    pub(crate) rss_mib_per_h: Option<f64>,
    pub(crate) open_files: f64,
    pub(crate) files_per_h: Option<f64>,
}

impl Verdict {
    pub(crate) fn of(run: &Run) -> Self {
        let waits = silence::look(run);
        let lives = lives(run);
        let violations: Vec<&Event> = run.named("violation").collect();
        let checks = vec![
            nothing_lost(run),
            healed(run, &violations),
            no_leak(&lives),
            no_silent_wait(&waits),
            disk_bounded(run),
            deletion_happened(run),
        ];
        let figures = figures(run, &waits, &lives, &checks);
        Self { checks, lives, figures }
    }

    pub(crate) fn held(&self) -> bool {
        self.checks.iter().all(|c| c.outcome != Outcome::Broken)
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // A text cannot fail to be written to.
        for check in &self.checks {
            let _ = writeln!(text, "{:10}  {}: {}", check.outcome.word(), check.promise, check.found);
        }
        let _ = writeln!(
            text,
            "\n{:14} {:>4} {:>8} {:>9} {:>11} {:>6} {:>8}",
            "process", "life", "minutes", "RSS MiB", "MiB/h", "files", "files/h"
        );
        let slope = |s: Option<f64>| s.map_or("-".to_owned(), |s| format!("{s:+.1}"));
        for l in &self.lives {
            let _ = writeln!(
                text,
                "{:14} {:>4} {:>8.1} {:>9.0} {:>11} {:>6.0} {:>8}",
                l.node,
                l.life,
                l.length_s / 60.0,
                l.rss_mib,
                slope(l.rss_mib_per_h),
                l.open_files,
                slope(l.files_per_h)
            );
        }
        let _ = writeln!(text, "\n{}", if self.held() { "every promise held" } else { "BROKEN" });
        text
    }
}

impl Outcome {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Broken => "BROKEN",
            Self::NotJudged => "not judged",
        }
    }
}

fn check(promise: &'static str, broken: bool, found: String) -> Check {
    Check { promise, outcome: if broken { Outcome::Broken } else { Outcome::Held }, found }
}

/// From the audits of all stores: at moments at which all processes stood still, and after the end.
fn nothing_lost(run: &Run) -> Check {
    let promise = "nothing lost, nothing consumed twice, no fork";
    let audits: Vec<&Event> = run.events.iter().filter(|e| e.event == "audit" || e.event == "snapshot").collect();
    let Some(last) = run.named("audit").last() else {
        let found = format!("the run has not ended; {} audits so far", audits.len());
        return Check { promise, outcome: Outcome::NotJudged, found };
    };
    let count = |e: &Event, key: &str| e.number(key).unwrap_or(f64::NAN);
    let lost = |e: &Event| e.facts.get("lost").and_then(Value::as_array).map_or(usize::MAX, Vec::len);
    let broken =
        |e: &Event| lost(e) > 0 || ["consumed_twice", "forked_versions", "corrupt"].iter().any(|k| count(e, k) != 0.0);
    let bad: Vec<String> = audits.iter().filter(|e| broken(e)).map(|e| format!("{:.0} s {:?}", e.t, e.facts)).collect();
    let found = format!(
        "{} acknowledged (of them {} to the soak itself), {} consumed, {} of these deleted since, {} steps; {} audits{}",
        count(last, "acknowledged"),
        count(last, "to_the_soak"),
        count(last, "consumed"),
        count(last, "consumed_and_deleted"),
        count(last, "steps"),
        audits.len(),
        bad.iter().fold(String::new(), |all, b| all + "\n            " + b)
    );
    check(promise, !bad.is_empty(), found)
}

/// What the run itself found wrong: a step that did not come, a mesh that did not become whole, a process that ended.
fn healed(run: &Run, violations: &[&Event]) -> Check {
    let after = |what: &'static str| {
        let mut times: Vec<f64> = run.named(what).filter_map(|e| e.number("after_s")).collect();
        let worst = times.iter().copied().fold(0.0, f64::max);
        format!("{:.1} s in the median, {worst:.1} s at worst", median(&mut times).unwrap_or(0.0))
    };
    let told = violations
        .iter()
        .fold(String::new(), |all, v| format!("{all}\n            {:.0} s {}: {}", v.t, v.text("what"), v.text("why")));
    let found = format!(
        "{} faults; a step after each {}, whole again {}{told}",
        run.named("fault").count(),
        after("step"),
        after("whole")
    );
    check("it heals by itself", !violations.is_empty(), found)
}

fn no_leak(lives: &[Life]) -> Check {
    let judged: Vec<&Life> = lives.iter().filter(|l| l.rss_mib_per_h.is_some()).collect();
    if judged.is_empty() {
        let found = format!("no process lived {:.0} minutes", (WARM_UP_S + JUDGED_S_MIN) / 60.0);
        return Check { promise: "no leak", outcome: Outcome::NotJudged, found };
    }
    let leaks = |l: &&&Life| {
        l.rss_mib_per_h.is_some_and(|s| s > RSS_MIB_PER_H_MAX) || l.files_per_h.is_some_and(|s| s > FILES_PER_H_MAX)
    };
    let bad: Vec<String> = judged.iter().filter(leaks).map(|l| format!("{} (life {})", l.node, l.life)).collect();
    let worst = |f: fn(&Life) -> Option<f64>| judged.iter().filter_map(|l| f(l)).fold(f64::MIN, f64::max);
    let found = format!(
        "{} lives were long enough; worst {:+.1} MiB/h (at most {RSS_MIB_PER_H_MAX}), {:+.1} open files/h (at most {FILES_PER_H_MAX}){}{}",
        judged.len(),
        worst(|l| l.rss_mib_per_h),
        worst(|l| l.files_per_h),
        if bad.is_empty() { "" } else { "; growing: " },
        bad.join(", ")
    );
    check("no leak", !bad.is_empty(), found)
}

fn lives(run: &Run) -> Vec<Life> {
    let mut by_life: BTreeMap<(&str, u32), Vec<&Sample>> = BTreeMap::new();
    run.samples.iter().for_each(|s| by_life.entry((&s.node, s.life)).or_default().push(s));
    by_life.into_iter().map(|((node, life), samples)| judge(node, life, &samples)).collect()
}

fn judge(node: &str, life: u32, samples: &[&Sample]) -> Life {
    let begun = samples.first().map_or(0.0, |s| s.t);
    let length_s = samples.last().map_or(0.0, |s| s.t) - begun;
    let long = length_s >= WARM_UP_S + JUDGED_S_MIN;
    let warm: Vec<&&Sample> = samples.iter().filter(|s| !long || s.t >= begun + WARM_UP_S).collect();
    let points = |f: fn(&Sample) -> f64| -> Vec<(f64, f64)> { warm.iter().map(|s| (s.t / 3600.0, f(s))).collect() };
    let (rss, files) = (points(|s| s.rss_kib / 1024.0), points(|s| s.open_files));
    let middle = |points: &[(f64, f64)]| median(&mut points.iter().map(|p| p.1).collect::<Vec<_>>()).unwrap_or(0.0);
    Life {
        node: node.to_owned(),
        life,
        length_s,
        rss_mib: middle(&rss),
        rss_mib_per_h: if long { theil_sen(&rss) } else { None },
        open_files: middle(&files),
        files_per_h: if long { theil_sen(&files) } else { None },
    }
}

fn no_silent_wait(waits: &Waits) -> Check {
    let longest = |times: &[silence::Still]| times.iter().map(|t| t.to_s - t.from_s).fold(0.0, f64::max);
    let told = waits.silences.iter().fold(String::new(), |all, s| {
        let said: Vec<&str> = s.said.iter().take(4).map(String::as_str).collect();
        format!("{all}\n            {:.0} s to {:.0} s: {}: {said:?}", s.from_s, s.to_s, s.who)
    });
    let found = format!(
        "{} of {} statuses came; {} times no step for over {:.0} s (longest {:.0} s), {} times no episode (longest {:.0} s), {} without a reason{told}",
        waits.answered,
        waits.asked,
        waits.without_step.len(),
        silence::STILL_S_MAX,
        longest(&waits.without_step),
        waits.without_episode.len(),
        longest(&waits.without_episode),
        waits.silences.len(),
    );
    check("no silent wait", !waits.silences.is_empty(), found)
}

fn disk_bounded(run: &Run) -> Check {
    let quota = run.named("begin").next().and_then(|e| amount(e.text("store_quota"), "GiB")).unwrap_or(0.0) * GIB;
    let mut most: BTreeMap<&str, f64> = BTreeMap::new();
    for s in &run.samples {
        let most = most.entry(&s.node).or_default();
        *most = most.max(s.data_bytes);
    }
    let mib = |bytes: f64| bytes / 1024.0 / 1024.0;
    let (node, worst) = most.iter().max_by(|a, b| a.1.total_cmp(b.1)).map_or(("nobody", 0.0), |(n, w)| (*n, *w));
    let found = format!("at most {:.0} MiB in one folder ({node}), quota {:.0} MiB", mib(worst), mib(quota));
    check("the disk is bounded", worst > quota + DISK_SLACK_BYTES, found)
}

/// The number before a unit: what the run writes of its own settings.
fn amount(text: &str, unit: &str) -> Option<f64> {
    text.strip_suffix(unit)?.parse().ok()
}

/// A run in which nothing was deleted says nothing about deleting.
fn deletion_happened(run: &Run) -> Check {
    let mut deleted: BTreeMap<(&str, u32), [f64; 2]> = BTreeMap::new();
    for s in &run.statuses {
        let count = |key: &str| s.store["maintenance"][key].as_f64().unwrap_or(0.0);
        if s.unanswered.is_none() {
            deleted.insert((&s.node, s.life), [count("rollouts_deleted"), count("blobs_deleted")]);
        }
    }
    let [rollouts, blobs] = deleted.values().fold([0.0; 2], |all, d| [all[0] + d[0], all[1] + d[1]]);
    let found = format!("{rollouts} copies of rollouts and {blobs} chunks were deleted on all nodes together");
    let kept_s = run.named("begin").next().and_then(|e| amount(e.text("rollouts_kept"), "m")).unwrap_or(0.0) * 60.0;
    let outcome = match rollouts > 0.0 {
        true => Outcome::Held,
        // Twice: what was consumed at the beginning, and a few beats.
        false if run.length_s() > 2.0 * kept_s => Outcome::Broken,
        false => Outcome::NotJudged,
    };
    Check { promise: "deleting was soaked too", outcome, found }
}

fn figures(run: &Run, waits: &Waits, lives: &[Life], checks: &[Check]) -> Value {
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for e in run.named("fault") {
        let kind = e.text("fault").split([' ', '{']).next().unwrap_or_default().to_owned();
        *kinds.entry(kind).or_default() += 1;
    }
    let last = run.named("audit").last().map(|e| Value::Object(e.facts.clone()));
    let lives: Vec<Value> = lives
        .iter()
        .map(|l| {
            json!({
                "node": l.node, "life": l.life, "length_s": l.length_s, "rss_mib": l.rss_mib,
                "rss_mib_per_h": l.rss_mib_per_h, "open_files": l.open_files, "files_per_h": l.files_per_h,
            })
        })
        .collect();
    let silences: Vec<Value> = waits
        .silences
        .iter()
        .map(|s| json!({ "who": s.who, "from_s": s.from_s, "to_s": s.to_s, "said": s.said }))
        .collect();
    let checks: Vec<Value> =
        checks.iter().map(|c| json!({ "promise": c.promise, "outcome": c.outcome.word(), "found": c.found })).collect();
    json!({
        "held": checks.iter().all(|c| c["outcome"] != Outcome::Broken.word()),
        "length_s": run.length_s(), "faults": kinds, "snapshots": run.named("snapshot").count(),
        "checks": checks, "lives": lives, "audit": last, "silences": silences,
        "waits": { "reasons": waits.reasons, "statuses_asked": waits.asked, "statuses": waits.answered },
    })
}
