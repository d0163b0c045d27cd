//! The files that a soak writes, and the clock that they share.

use anyhow::Context;
use serde_json::{Map, Value};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Everything that happened, one JSON object a line: `events.jsonl`, `status.jsonl`, `acknowledged.jsonl`; and `samples.csv`.
pub(crate) struct Log {
    started: Instant,
    folder: PathBuf,
    violations: Cell<usize>,
    events: RefCell<File>,
    statuses: RefCell<File>,
    acknowledged: RefCell<File>,
    samples: RefCell<File>,
}

impl Log {
    pub(crate) fn new(folder: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let open = |name: &str| {
            let path = folder.join(name);
            File::create_new(&path).with_context(|| path.display().to_string()).map(RefCell::new)
        };
        let log = Self {
            started: Instant::now(),
            folder: folder.to_owned(),
            violations: Cell::new(0),
            events: open("events.jsonl")?,
            statuses: open("status.jsonl")?,
            acknowledged: open("acknowledged.jsonl")?,
            samples: open("samples.csv")?,
        };
        log.sample(crate::read::COLUMNS);
        Ok(log)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Seconds since the start.
    pub(crate) fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Something happened: `what`, and `facts`, an object.
    pub(crate) fn event(&self, what: &str, facts: &Value) {
        let line = self.line("event", Value::from(what), facts);
        eprintln!("{:8.1} s  {what} {facts}", self.now());
        write(&self.events, &line);
        if what == "violation" {
            self.violations.set(self.violations.get() + 1);
        }
    }

    /// Events of that name so far.
    pub(crate) fn violations(&self) -> usize {
        self.violations.get()
    }

    pub(crate) fn status(&self, node: &str, facts: &Value) {
        write(&self.statuses, &self.line("node", Value::from(node), facts));
    }

    pub(crate) fn acknowledged(&self, node: &str, facts: &Value) {
        write(&self.acknowledged, &self.line("node", Value::from(node), facts));
    }

    pub(crate) fn sample(&self, line: &str) {
        write(&self.samples, line);
    }

    fn line(&self, key: &str, value: Value, facts: &Value) -> String {
        let mut line = Map::new();
        line.insert("t".into(), Value::from((self.now() * 100.0).round() / 100.0));
        line.insert(key.into(), value);
        line.extend(facts.as_object().cloned().unwrap_or_default());
        Value::Object(line).to_string()
    }
}

/// A log that cannot be written makes the run worthless, so it ends.
#[expect(clippy::expect_used, reason = "see above")]
fn write(file: &RefCell<File>, line: &str) {
    writeln!(file.borrow_mut(), "{line}").expect("the soak's log can be written");
}
