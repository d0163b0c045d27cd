//! The files of a run, read again: what the verdict is about.

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use starling_protocol::RolloutId;
use std::path::Path;

/// One line of `events.jsonl`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Event {
    /// Seconds since the start.
    pub(crate) t: f64,
    pub(crate) event: String,
    #[serde(flatten)]
    pub(crate) facts: Map<String, Value>,
}

impl Event {
    pub(crate) fn text(&self, key: &str) -> &str {
        self.facts.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    pub(crate) fn number(&self, key: &str) -> Option<f64> {
        self.facts.get(key).and_then(Value::as_f64)
    }
}

/// One line of `samples.csv`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    /// Seconds since the start.
    pub(crate) t: f64,
    pub(crate) node: String,
    pub(crate) life: u32,
    /// Resident memory.
    pub(crate) rss_kib: f64,
    /// The part of it that no file backs: heap and stacks.
    pub(crate) anon_kib: f64,
    pub(crate) open_files: f64,
    /// The node's folder.
    pub(crate) data_bytes: f64,
}

/// One line of `status.jsonl`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Status {
    /// Seconds since the start, when the answer came.
    pub(crate) t: f64,
    pub(crate) node: String,
    pub(crate) life: u32,
    /// The share of the time since the status before that a thread of the node waited for a processor.
    pub(crate) starved: Option<f64>,
    /// Why there is no answer.
    pub(crate) unanswered: Option<String>,
    pub(crate) version: Option<u64>,
    #[serde(default)]
    pub(crate) doing: Vec<String>,
    pub(crate) agents: Option<Agents>,
    #[serde(default)]
    pub(crate) store: Value,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Agents {
    pub(crate) ended: u64,
}

/// All of them.
pub(crate) struct Run {
    pub(crate) events: Vec<Event>,
    pub(crate) samples: Vec<Sample>,
    pub(crate) statuses: Vec<Status>,
    /// Episodes of the soak's own agent.
    pub(crate) acknowledged: Vec<Acknowledged>,
}

/// One line of `acknowledged.jsonl`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Acknowledged {
    /// Seconds since the start.
    pub(crate) t: f64,
    pub(crate) rollout: RolloutId,
}

impl Run {
    /// Reads a run's folder, also while it goes on.
    ///
    /// # Errors
    /// Names the file, the line and what is wrong with it.
    pub(crate) fn read(folder: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            events: lines(&folder.join("events.jsonl"))?,
            samples: samples(&folder.join("samples.csv"))?,
            statuses: lines(&folder.join("status.jsonl"))?,
            acknowledged: lines(&folder.join("acknowledged.jsonl"))?,
        })
    }

    /// Seconds from the start to the last thing that was written.
    pub(crate) fn length_s(&self) -> f64 {
        let last = [self.events.last().map(|e| e.t), self.statuses.last().map(|s| s.t)];
        last.into_iter().flatten().fold(0.0, f64::max)
    }

    pub(crate) fn named<'a>(&'a self, what: &'a str) -> impl Iterator<Item = &'a Event> {
        self.events.iter().filter(move |e| e.event == what)
    }
}

/// The whole lines of a file: one that has no end yet is still being written.
fn whole_lines(path: &Path) -> anyhow::Result<String> {
    let mut text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
    Ok(text)
}

fn lines<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<T>> {
    let text = whole_lines(path)?;
    let parse = |(i, line): (usize, &str)| {
        serde_json::from_str(line).with_context(|| format!("{}, line {}: {line}", path.display(), i + 1))
    };
    text.lines().enumerate().map(parse).collect()
}

fn samples(path: &Path) -> anyhow::Result<Vec<Sample>> {
    let text = whole_lines(path)?;
    let mut rows = text.lines().enumerate();
    let (_, head) = rows.next().with_context(|| format!("{} is empty", path.display()))?;
    ensure!(head == COLUMNS, "{}, line 1: expected {COLUMNS:?}, got {head:?}", path.display());
    rows.map(|(i, line)| sample(line).with_context(|| format!("{}, line {}: {line}", path.display(), i + 1))).collect()
}

/// The columns of `samples.csv`.
pub(crate) const COLUMNS: &str = "t_s,node,life,pid,rss_kib,anon_kib,file_kib,open_files,threads,data_bytes";

fn sample(line: &str) -> anyhow::Result<Sample> {
    let fields: Vec<&str> = line.split(',').collect();
    let expected = COLUMNS.split(',').count();
    ensure!(fields.len() == expected, "expected {expected} fields, got {}", fields.len());
    let number = |i: usize| fields[i].parse::<f64>().with_context(|| format!("field {}: {:?}", i + 1, fields[i]));
    Ok(Sample {
        t: number(0)?,
        node: fields[1].to_owned(),
        life: fields[2].parse().context("the third field")?,
        rss_kib: number(4)?,
        anon_kib: number(5)?,
        open_files: number(7)?,
        data_bytes: number(9)?,
    })
}
