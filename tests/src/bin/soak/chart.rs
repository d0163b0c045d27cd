//! The run as a picture: faults, versions, memory, open files and disk over time, as one SVG.

use crate::read::{Run, Sample};
use crate::silence;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Points (seconds, value).
type Line = Vec<(f64, f64)>;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 150.0;
const PANEL_HEIGHT: f64 = 150.0;
const PANEL_GAP: f64 = 46.0;
const LANE_HEIGHT: f64 = 18.0;
const TOP: f64 = 64.0;
/// Of nodes in their order, to be told apart also without full colour vision (Okabe and Ito's).
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#555555", "#cc79a7", "#e69f00", "#56b4e9", "#a08000"];
/// A line is broken where a process is missing for longer than two samples.
const BREAK_S: f64 = 25.0;

/// Faults of a kind share a lane.
const LANES: [(&str, &[&str]); 5] = [
    ("killed", &["Kill"]),
    ("stopped", &["Stop"]),
    ("paused", &["Pause"]),
    ("cut", &["Split", "OneWay", "Flap", "Loss"]),
    ("joined, left", &["Join", "Leave"]),
];

pub(crate) fn svg(run: &Run) -> String {
    let length_s = run.length_s().max(1.0);
    let mut nodes: Vec<&str> = Vec::new();
    for s in &run.samples {
        if !nodes.contains(&s.node.as_str()) {
            nodes.push(&s.node);
        }
    }
    let series = |value: fn(&Sample) -> f64| -> Vec<Line> {
        let of = |node: &&str| run.samples.iter().filter(|s| s.node == **node).map(|s| (s.t, value(s))).collect();
        nodes.iter().map(of).collect()
    };
    let steps: Line = (1_u32..).zip(silence::steps(run)).map(|(n, t)| (t, f64::from(n))).collect();
    let panels: [(&str, Vec<Line>); 4] = [
        ("steps seen", vec![steps]),
        ("resident memory, MiB", series(|s| s.rss_kib / 1024.0)),
        ("open files", series(|s| s.open_files)),
        ("data folder, MiB", series(|s| s.data_bytes / 1024.0 / 1024.0)),
    ];
    #[expect(clippy::cast_precision_loss, reason = "a few lanes and panels")]
    let lanes_height = LANES.len() as f64 * LANE_HEIGHT;
    let panels_top = TOP + lanes_height + PANEL_GAP;
    #[expect(clippy::cast_precision_loss, reason = "a few lanes and panels")]
    let height = panels_top + panels.len() as f64 * (PANEL_HEIGHT + PANEL_GAP);
    let x = |t: f64| LEFT + t / length_s * (WIDTH - LEFT - RIGHT);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height:.0}\" fill=\"#ffffff\"/>\n"
    );
    label(&mut out, LEFT, 24.0, "start", "16", &format!("{:.0} minutes under churn, cuts and kills", length_s / 60.0));
    legend(&mut out, &nodes);
    for (lane, (name, kinds)) in LANES.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "a few lanes and panels")]
        let y = TOP + lane as f64 * LANE_HEIGHT;
        label(&mut out, LEFT - 8.0, y + 12.0, "end", "12", name);
        for (from, to) in faults(run, kinds) {
            let width = (x(to) - x(from)).max(2.0);
            // A text cannot fail to be written to.
            let _ = writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" fill=\"#b03030\"/>",
                x(from),
                y + 2.0,
                LANE_HEIGHT - 4.0
            );
        }
    }
    for (i, (title, lines)) in panels.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "a few lanes and panels")]
        let top = panels_top + i as f64 * (PANEL_HEIGHT + PANEL_GAP);
        panel(&mut out, title, lines, top, length_s, &x);
    }
    out.push_str("</svg>\n");
    out
}

/// From each fault's begin to its end.
fn faults(run: &Run, kinds: &[&str]) -> Vec<(f64, f64)> {
    let mut found = Vec::new();
    let mut begun = None;
    for e in &run.events {
        match e.event.as_str() {
            "fault" => {
                let kind = e.text("fault").split([' ', '{']).next().unwrap_or_default();
                begun = kinds.contains(&kind).then_some(e.t);
            }
            "healed" => found.extend(begun.take().map(|from| (from, e.t))),
            _ => {}
        }
    }
    found
}

fn panel(out: &mut String, title: &str, lines: &[Line], top: f64, length_s: f64, x: &impl Fn(f64) -> f64) {
    let most = lines.iter().flatten().map(|p| p.1).fold(0.0, f64::max);
    let step = nice_step(most / 4.0);
    let high = (most / step).ceil().max(1.0) * step;
    let bottom = top + PANEL_HEIGHT;
    let y = |v: f64| bottom - v / high * PANEL_HEIGHT;
    label(out, LEFT, top - 8.0, "start", "13", title);
    let mut tick = 0.0;
    while tick <= high * 1.001 {
        rule(out, LEFT, y(tick), WIDTH - RIGHT, y(tick));
        label(out, LEFT - 8.0, y(tick) + 4.0, "end", "11", &format!("{tick}"));
        tick += step;
    }
    let every_min = nice_step(length_s / 60.0 / 8.0);
    let mut minute = 0.0;
    while minute * 60.0 <= length_s {
        let at = x(minute * 60.0);
        rule(out, at, top, at, bottom);
        label(out, at, bottom + 14.0, "middle", "11", &format!("{minute} min"));
        minute += every_min;
    }
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let mut path = String::new();
        let mut last = f64::NEG_INFINITY;
        for (t, v) in line {
            let pen = if t - last > BREAK_S && lines.len() > 1 || path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{pen}{:.1},{:.1}", x(*t), y(*v));
            last = *t;
        }
        let _ = writeln!(out, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.4\"/>");
    }
}

fn legend(out: &mut String, nodes: &[&str]) {
    let at: BTreeMap<&str, f64> = (0_u32..).zip(nodes).map(|(i, n)| (*n, TOP + 12.0 + f64::from(i) * 18.0)).collect();
    for (node, colour) in nodes.iter().zip(COLOURS.iter().cycle()) {
        let (x, y) = (WIDTH - RIGHT + 16.0, at[node]);
        let _ = writeln!(out, "<rect x=\"{x}\" y=\"{:.0}\" width=\"12\" height=\"4\" fill=\"{colour}\"/>", y - 6.0);
        label(out, x + 20.0, y, "start", "12", node);
    }
}

fn rule(out: &mut String, x1: f64, y1: f64, x2: f64, y2: f64) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#dddddd\" stroke-width=\"1\"/>"
    );
}

/// Texts are names and numbers of this program: none needs escaping.
fn label(out: &mut String, x: f64, y: f64, anchor: &str, size: &str, text: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"#333333\">{text}</text>"
    );
}

/// 1, 2 or 5 times a power of ten, at least `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.max(1e-9).log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|f| f * power >= least * 0.999);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        for (least, expected) in [(0.7, 1.0), (1.0, 1.0), (1.3, 2.0), (3.0, 5.0), (6.0, 10.0), (130.0, 200.0)] {
            assert!((nice_step(least) - expected).abs() < 1e-9, "{least}: {}", nice_step(least));
        }
    }
}
