//! A run as a page: a lane per node, stepped through event by event.

use crate::run::Outcome;
use crate::scenario::Scenario;
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::path::Path;

/// The page, without its data.
const PAGE: &str = include_str!("page.html");
/// What the page has in the data's place.
const PLACE: &str = "/*TRACE*/null";

/// Writes `index.html`, which needs nothing beside it, and `trace.json` with the same data into `dir`.
///
/// # Errors
/// When the folder cannot be written.
pub fn write(dir: &Path, scenario: &Scenario, outcome: &Outcome) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let data = data(scenario, outcome);
    fs::write(dir.join("trace.json"), serde_json::to_vec(&data)?)?;
    // Inside a script element, `</` would end it.
    let inline = serde_json::to_string(&data)?.replace("</", "<\\/");
    fs::write(dir.join("index.html"), PAGE.replacen(PLACE, &inline, 1))
}

fn data(scenario: &Scenario, o: &Outcome) -> Value {
    let groups = scenario.node_names();
    let nodes = groups.iter().enumerate().map(|(i, (name, g))| {
        let traffic = o.traffic.get(i).cloned().unwrap_or_default();
        json!({ "name": name, "role": scenario.nodes[*g].role.roles(), "traffic": traffic })
    });
    let events = o.record.iter().map(|(at, e)| json!([at.as_secs_f64(), e]));
    let left_out = o.left_out.between.map(
        |(from, to)| json!({ "events": o.left_out.events, "from_s": from.as_secs_f64(), "to_s": to.as_secs_f64() }),
    );
    json!({
        "scenario": scenario.name,
        "about": scenario.about,
        "seed": o.seed,
        "trace": o.trace,
        "virtual_s": o.virtual_time.as_secs_f64(),
        "healed_in_s": o.healed_in.map(|d| d.as_secs_f64()),
        "counts": o.counts,
        "violations": o.violations,
        "nodes": nodes.collect::<Vec<_>>(),
        "left_out": left_out,
        "events": events.collect::<Vec<_>>(),
    })
}
