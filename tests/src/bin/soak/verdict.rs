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
    /// The median after the warm-up.
    pub(crate) rss_mib: f64,
    /// By hour; `None` if it was too short.
    pub(crate) rss_mib_per_h: Option<f64>,
    /// Of heap and stacks alone: pages of files come and go with what others on the machine need.
    pub(crate) anon_mib_per_h: Option<f64>,
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
            "\n{:14} {:>4} {:>8} {:>8} {:>7} {:>10} {:>6} {:>8}",
            "process", "life", "minutes", "RSS MiB", "MiB/h", "heap MiB/h", "files", "files/h"
        );
        let slope = |s: Option<f64>| s.map_or("-".to_owned(), |s| format!("{s:+.1}"));
        for l in &self.lives {
            let _ = writeln!(
                text,
                "{:14} {:>4} {:>8.1} {:>8.0} {:>7} {:>10} {:>6.0} {:>8}",
                l.node,
                l.life,
                l.length_s / 60.0,
                l.rss_mib,
                slope(l.rss_mib_per_h),
                slope(l.anon_mib_per_h),
                l.open_files,
                slope(l.files_per_h)
            );
        }
        let judged = self.checks.iter().all(|c| c.outcome != Outcome::NotJudged);
        let end = match (self.held(), judged) {
            (true, true) => "every promise held",
            (true, false) => "what was judged held",
            (false, _) => "BROKEN",
        };
        let _ = writeln!(text, "\n{end}");
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
    let named = |e: &Event| e.facts.get("broken").is_some_and(|b| !b.is_null());
    let broken = |e: &Event| {
        named(e) || lost(e) > 0 || ["consumed_twice", "forked_versions", "corrupt"].iter().any(|k| count(e, k) != 0.0)
    };
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
        [l.rss_mib_per_h, l.anon_mib_per_h].iter().flatten().any(|s| *s > RSS_MIB_PER_H_MAX)
            || l.files_per_h.is_some_and(|s| s > FILES_PER_H_MAX)
    };
    let bad: Vec<String> = judged.iter().filter(leaks).map(|l| format!("{} (life {})", l.node, l.life)).collect();
    let worst = |f: fn(&Life) -> Option<f64>| judged.iter().filter_map(|l| f(l)).fold(f64::MIN, f64::max);
    let found = format!(
        "{} lives were long enough; worst {:+.1} MiB/h resident, {:+.1} MiB/h heap (at most {RSS_MIB_PER_H_MAX}), \
         {:+.1} open files/h (at most {FILES_PER_H_MAX}){}{}",
        judged.len(),
        worst(|l| l.rss_mib_per_h),
        worst(|l| l.anon_mib_per_h),
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
    let (rss, anon) = (points(|s| s.rss_kib / 1024.0), points(|s| s.anon_kib / 1024.0));
    let files = points(|s| s.open_files);
    let middle = |points: &[(f64, f64)]| median(&mut points.iter().map(|p| p.1).collect::<Vec<_>>()).unwrap_or(0.0);
    Life {
        node: node.to_owned(),
        life,
        length_s,
        rss_mib: middle(&rss),
        rss_mib_per_h: if long { theil_sen(&rss) } else { None },
        anon_mib_per_h: if long { theil_sen(&anon) } else { None },
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
                "rss_mib_per_h": l.rss_mib_per_h, "heap_mib_per_h": l.anon_mib_per_h, "open_files": l.open_files, "files_per_h": l.files_per_h,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Two hours of one process, whose memory in MiB and open files are these at a time in hours.
    fn life(rss_mib: impl Fn(f64) -> f64, open_files: impl Fn(f64) -> f64) -> Run {
        let at = |i: u32| {
            let hours = f64::from(i) / 360.0;
            Sample {
                t: hours * 3600.0,
                node: "server-1".into(),
                life: 1,
                rss_kib: (40.0 + rss_mib(hours)) * 1024.0,
                anon_kib: rss_mib(hours) * 1024.0,
                open_files: open_files(hours),
                data_bytes: 1e6,
            }
        };
        Run { events: vec![], samples: (0..720).map(at).collect(), statuses: vec![], acknowledged: vec![] }
    }

    fn outcome(run: &Run, promise: &str) -> Outcome {
        let verdict = Verdict::of(run);
        verdict.checks.iter().find(|c| c.promise.starts_with(promise)).unwrap().outcome
    }

    fn event(text: &str) -> Event {
        serde_json::from_str(text).unwrap()
    }

    /// Saw teeth of 60 MiB, a period of 7 minutes.
    fn teeth(hours: f64) -> f64 {
        60.0 * (hours * 60.0 / 7.0).fract()
    }

    #[test]
    fn caches_that_fill_and_empty_are_no_leak() {
        let warms_up = |h: f64| 80.0 + 150.0 * (h / 0.3).min(1.0) + teeth(h);
        assert_eq!(outcome(&life(warms_up, |h| 50.0 + teeth(h) / 6.0), "no leak"), Outcome::Held);
    }

    #[test]
    fn a_leak_under_the_saw_teeth_is_found() {
        let leaks = |h: f64| 200.0 + teeth(h) + 20.0 * h;
        assert_eq!(outcome(&life(leaks, |_| 50.0), "no leak"), Outcome::Broken);
    }

    #[test]
    fn a_leak_of_files_is_found() {
        assert_eq!(outcome(&life(teeth, |h| (50.0 + 15.0 * h).round()), "no leak"), Outcome::Broken);
    }

    #[test]
    fn a_short_life_is_not_judged() {
        let mut run = life(|h| 1000.0 * h, |_| 50.0);
        run.samples.truncate(100);
        assert_eq!(outcome(&run, "no leak"), Outcome::NotJudged);
    }

    #[test]
    fn one_bad_audit_is_enough() {
        let clean = r#"{"t":9,"event":"snapshot","lost":[],"consumed_twice":0,"forked_versions":0,"corrupt":0}"#;
        let end = clean.replace("snapshot", "audit");
        let lost = clean.replace("[]", r#"["ab"]"#);
        let twice = clean.replace(r#""consumed_twice":0"#, r#""consumed_twice":1"#);
        let without = clean.replace(r#""corrupt":0"#, r#""other":0"#);
        for (events, expected) in [
            (vec![clean, &end], Outcome::Held),
            (vec![clean], Outcome::NotJudged),
            (vec![&lost, &end], Outcome::Broken),
            (vec![&twice, &end], Outcome::Broken),
            (vec![&without, &end], Outcome::Broken),
        ] {
            let run = Run { events: events.iter().map(|e| event(e)).collect(), ..life(teeth, |_| 50.0) };
            assert_eq!(outcome(&run, "nothing lost"), expected, "{events:?}");
        }
    }

    #[test]
    fn a_folder_beyond_its_quota_is_found() {
        let begin = event(r#"{"t":0,"event":"begin","store_quota":"3GiB","rollouts_kept":"10m"}"#);
        let mut run = Run { events: vec![begin], ..life(teeth, |_| 50.0) };
        assert_eq!(outcome(&run, "the disk"), Outcome::Held);
        run.samples[300].data_bytes = 3.5 * GIB;
        assert_eq!(outcome(&run, "the disk"), Outcome::Broken);
    }

    #[test]
    fn what_the_run_found_wrong_is_told() {
        let violation = event(r#"{"t":7,"event":"violation","what":"a step","why":"none came"}"#);
        let run = Run { events: vec![violation], ..life(teeth, |_| 50.0) };
        let verdict = Verdict::of(&run);
        assert!(!verdict.held());
        assert!(verdict.text().contains("none came"), "{}", verdict.text());
    }
}
