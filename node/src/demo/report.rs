//! The demo's report: `summary.json`, the reward curve as SVG, and a page.

use super::mesh::Demo;
use super::watch::{Point, Watch};
use serde::Serialize;
use starling_protocol::assignment::EvalPhase;
use starling_protocol::control::EvalScore;
use starling_storage::AuditReport;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

/// `summary.json`.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    pub(super) seed: u64,
    pub(super) steps_wanted: u64,
    /// Held-out rewards before the first step, per task set.
    pub(super) reward_start: BTreeMap<String, EvalScore>,
    /// Held-out rewards after the last step, per task set.
    pub(super) reward_end: BTreeMap<String, EvalScore>,
    pub(super) steps_committed: u64,
    /// Terms in which a leader was seen.
    pub(super) terms: Vec<u64>,
    pub(super) leader_kills: u32,
    /// From the kill to a leader with a quorum.
    pub(super) election_ms: Option<u64>,
    /// From the kill to the next committed step.
    pub(super) recovery_ms: Option<u64>,
    /// From the stores.
    pub(super) rollouts_acknowledged: usize,
    /// From the stores.
    pub(super) rollouts_consumed: usize,
    /// From the stores: acknowledged, and in no store.
    pub(super) rollouts_lost: usize,
    /// From the stores: in the consumed list of more than one step.
    pub(super) consumed_twice: usize,
    /// From the stores: versions that two stores disagree on.
    pub(super) forked_versions: usize,
    /// From the stores: values that do not match their hash.
    pub(super) corrupt_values: usize,
    pub(super) episodes_aborted: u64,
    pub(super) leases_expired: u64,
    pub(super) wall_s: f64,
    /// Nodes and agents together, sampled twice a second.
    pub(super) peak_rss_mib: u64,
    /// Promises that did not hold; empty when all is well.
    pub(super) broken: Vec<String>,
}

impl Summary {
    pub(super) fn new(
        seed: u64,
        steps_wanted: u64,
        watch: &Watch,
        demo: &Demo,
        audit: &AuditReport,
        wall: Duration,
        failure: Option<String>,
    ) -> Self {
        let mut broken: Vec<String> = failure.into_iter().collect();
        let mut promise = |ok: bool, text: String| {
            if !ok {
                broken.push(text);
            }
        };
        promise(audit.lost.is_empty(), format!("{} acknowledged rollouts are lost", audit.lost.len()));
        promise(
            audit.consumed_twice.is_empty(),
            format!("{} rollouts were consumed twice", audit.consumed_twice.len()),
        );
        promise(audit.forked_versions.is_empty(), format!("{} versions exist twice", audit.forked_versions.len()));
        promise(audit.deposed.is_empty(), format!("{} steps are a deposed leader's", audit.deposed.len()));
        promise(audit.corrupt.is_empty(), format!("{} stored values do not match their hash", audit.corrupt.len()));
        promise(watch.steps() >= steps_wanted, format!("{} of {steps_wanted} steps were committed", watch.steps()));
        promise(watch.leader_kills() > 0, "the leader was never killed".into());
        promise(watch.recovery_ms().is_some(), "no step was committed after the leader was killed".into());
        let (aborted, expired) = watch.aborted();
        Self {
            seed,
            steps_wanted,
            reward_start: watch.scores(EvalPhase::Start),
            reward_end: watch.scores(EvalPhase::End),
            steps_committed: watch.steps(),
            terms: watch.terms().iter().copied().collect(),
            leader_kills: watch.leader_kills(),
            election_ms: watch.election_ms(),
            recovery_ms: watch.recovery_ms(),
            rollouts_acknowledged: audit.acknowledged,
            rollouts_consumed: audit.consumed,
            rollouts_lost: audit.lost.len(),
            consumed_twice: audit.consumed_twice.len(),
            forked_versions: audit.forked_versions.len(),
            corrupt_values: audit.corrupt.len(),
            episodes_aborted: aborted,
            leases_expired: expired,
            wall_s: (wall.as_secs_f64() * 10.0).round() / 10.0,
            peak_rss_mib: demo.peak_rss_mib(),
            broken,
        }
    }
}

/// The last lines on the terminal.
pub(super) fn text(s: &Summary, dir: &Path) -> String {
    let mut out = String::new();
    for (set, end) in &s.reward_end {
        let start = s.reward_start.get(set).map_or(0.0, |e| e.mean);
        let _ = writeln!(
            out,
            "{set:<12} held-out reward {start:.3} → {:.3} ± {:.3} sampled, {:.3} greedy",
            end.mean, end.ci95, end.greedy_mean
        );
    }
    let ms = |v: Option<u64>| v.map_or("never".into(), |v| format!("{v} ms"));
    let _ = writeln!(
        out,
        "{} steps in terms {:?}; leader killed {} time(s), new leader after {}, next step after {}",
        s.steps_committed,
        s.terms,
        s.leader_kills,
        ms(s.election_ms),
        ms(s.recovery_ms)
    );
    let _ = writeln!(
        out,
        "{} rollouts acknowledged, {} consumed, {} lost, {} consumed twice; {} episodes aborted",
        s.rollouts_acknowledged, s.rollouts_consumed, s.rollouts_lost, s.consumed_twice, s.episodes_aborted
    );
    let _ = write!(out, "{:.0} s, {} MiB at most; report in {}", s.wall_s, s.peak_rss_mib, dir.display());
    out
}

/// Writes the report's files into `dir`.
pub(super) fn write(dir: &Path, s: &Summary, curve: &[Point]) -> anyhow::Result<()> {
    std::fs::write(dir.join("summary.json"), serde_json::to_string_pretty(s)?)?;
    std::fs::write(dir.join("steps.json"), serde_json::to_string(curve)?)?;
    let svg = curve_svg(curve);
    std::fs::write(dir.join("curve.svg"), &svg)?;
    std::fs::write(dir.join("index.html"), page(s, &svg))?;
    Ok(())
}

const COLORS: [&str; 4] = ["#2563eb", "#d97706", "#059669", "#7c3aed"];

/// Mean training reward of each committed step, one line per task set; a dashed line where the term changed.
fn curve_svg(curve: &[Point]) -> String {
    let (w, h, left, top, bottom) = (820.0, 360.0, 48.0, 20.0, 44.0);
    let last = curve.last().map_or(1, |p| p.version).max(2);
    let x = |v: u64| left + (v.saturating_sub(1)) as f64 / (last - 1) as f64 * (w - left - 130.0);
    let y = |r: f64| top + (1.0 - r.clamp(0.0, 1.0)) * (h - top - bottom);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {h}\" font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#444\">\n\
         <rect width=\"{w}\" height=\"{h}\" fill=\"#fff\"/>\n"
    );
    for i in 0..=5 {
        let r = f64::from(i) / 5.0;
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" x2=\"{:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#e5e7eb\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{r:.1}</text>",
            x(last),
            y(r),
            y(r),
            left - 8.0,
            y(r) + 4.0
        );
    }
    for pair in curve.windows(2).filter(|p| p[0].term != p[1].term) {
        let at = (x(pair[0].version) + x(pair[1].version)) / 2.0;
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{:.1}\" stroke=\"#dc2626\" stroke-dasharray=\"4 4\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#dc2626\">leader killed, term {}</text>",
            h - bottom,
            at + 5.0,
            h - bottom - 8.0,
            pair[1].term
        );
    }
    let mut sets: Vec<&String> = curve.iter().flat_map(|p| p.reward.keys()).collect();
    sets.sort();
    sets.dedup();
    let mut label_y = f64::NEG_INFINITY;
    let mut ends: Vec<(f64, &String, &str)> = Vec::new();
    for (set, color) in sets.iter().zip(COLORS.iter().cycle()) {
        let points: Vec<(f64, f64)> =
            curve.iter().filter_map(|p| p.reward.get(*set).map(|r| (x(p.version), y(*r)))).collect();
        let line: Vec<String> = points.iter().map(|(a, b)| format!("{a:.1},{b:.1}")).collect();
        let _ = writeln!(
            out,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{}\"/>",
            line.join(" ")
        );
        if let Some((_, b)) = points.last() {
            ends.push((*b, set, color));
        }
    }
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (b, set, color) in ends {
        label_y = (b + 4.0).max(label_y + 15.0);
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{label_y:.1}\" fill=\"{color}\" font-weight=\"600\">{set}</text>",
            x(last) + 8.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">committed step (1 to {last})</text>\
         <text transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">mean training reward</text>\n</svg>",
        (left + x(last)) / 2.0,
        h - 14.0,
        (top + h - bottom) / 2.0
    );
    out
}

fn page(s: &Summary, svg: &str) -> String {
    let verdict = if s.broken.is_empty() {
        "<p class=\"ok\">Every promise held.</p>".to_owned()
    } else {
        let items: String = s.broken.iter().map(|b| format!("<li>{}</li>", escape(b))).collect();
        format!("<div class=\"bad\"><p>Promises broken:</p><ul>{items}</ul></div>")
    };
    let mut scores = String::new();
    for (set, end) in &s.reward_end {
        let start = s.reward_start.get(set).cloned().unwrap_or_default();
        let _ = write!(
            scores,
            "<tr><td>{}</td><td>{:.3} ± {:.3}</td><td>{:.3} ± {:.3}</td><td>{:.3}</td><td>{:.3}</td></tr>",
            escape(set),
            start.mean,
            start.ci95,
            end.mean,
            end.ci95,
            start.greedy_mean,
            end.greedy_mean
        );
    }
    let ms = |v: Option<u64>| v.map_or("never".to_owned(), |v| format!("{v} ms"));
    let facts = [
        ("Steps committed", format!("{} of {}", s.steps_committed, s.steps_wanted)),
        ("Terms", format!("{:?}", s.terms)),
        ("Leader killed", format!("{} time(s)", s.leader_kills)),
        ("New leader after", ms(s.election_ms)),
        ("Next committed step after", ms(s.recovery_ms)),
        ("Rollouts acknowledged", s.rollouts_acknowledged.to_string()),
        ("Rollouts consumed", s.rollouts_consumed.to_string()),
        ("Rollouts lost", s.rollouts_lost.to_string()),
        ("Consumed twice", s.consumed_twice.to_string()),
        ("Episodes aborted", s.episodes_aborted.to_string()),
        ("Wall time", format!("{:.0} s", s.wall_s)),
        ("Memory, all processes", format!("{} MiB", s.peak_rss_mib)),
    ];
    let rows: String = facts.iter().map(|(k, v)| format!("<tr><th>{k}</th><td>{v}</td></tr>")).collect();
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>Starling demo</title>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><style>\
         body{{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2rem auto;padding:0 1rem;color:#1f2937}}\
         table{{border-collapse:collapse;margin:1rem 0}}th,td{{padding:.3rem .9rem .3rem 0;text-align:left;border-bottom:1px solid #e5e7eb}}\
         th{{font-weight:600}}.ok{{color:#047857;font-weight:600}}.bad{{color:#b91c1c}}svg{{width:100%;height:auto}}</style></head><body>\
         <h1>Starling demo</h1><p>Three servers and two clients on loopback, seed {}.</p>{verdict}\
         <h2>Held-out reward</h2><table><tr><th>Task set</th><th>Sampled, before</th><th>Sampled, after</th><th>Greedy, before</th><th>Greedy, after</th></tr>{scores}</table>\
         <h2>Training reward</h2>{svg}<h2>Facts</h2><table>{rows}</table>\
         <p>Lost and twice-consumed rollouts are read from the nodes' stores after they ended. \
         Figures: <a href=\"summary.json\">summary.json</a>, <a href=\"steps.json\">steps.json</a>, <a href=\"curve.svg\">curve.svg</a>.</p></body></html>\n",
        s.seed
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
