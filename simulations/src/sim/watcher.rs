//! Looks at a node from inside: who it thinks leads, what it waits for, how full its books are.

use super::recorder::Recorder;
use crate::event::{Event, Gauge, NodeIx};
use starling_core::NodeCore;
use starling_core::runtime::spawn;
use starling_protocol::ModelName;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How often new groups are looked for: much less than an election takes.
const GROUPS_BEAT: Duration = Duration::from_millis(100);
/// How often books and waits are looked at.
const BOOKS_BEAT: Duration = Duration::from_secs(1);
/// Most node records that membership may keep.
const RECORDS_MAX: u64 = 20_000;

/// Starts the watch in the node's scope; it ends with the node.
pub(crate) fn start(core: &Arc<NodeCore>, node: NodeIx, recorder: &Recorder) {
    drop(spawn(watch_groups(core.clone(), node, recorder.clone())));
    drop(spawn(watch_books(core.clone(), node, recorder.clone())));
}

async fn watch_groups(core: Arc<NodeCore>, node: NodeIx, recorder: Recorder) {
    let mut watched = BTreeSet::new();
    loop {
        for model in core.groups().models() {
            if watched.insert(model.clone()) {
                drop(spawn(watch_leadership(core.clone(), node, model, recorder.clone())));
            }
        }
        sleep(GROUPS_BEAT).await;
    }
}

async fn watch_leadership(core: Arc<NodeCore>, node: NodeIx, model: ModelName, recorder: Recorder) {
    let Some(mut view) = core.groups().leadership(&model) else { return };
    loop {
        let v = view.borrow_and_update().clone();
        recorder.record(Event::Leads {
            node,
            model: model.clone(),
            term: v.term,
            leader: v.leader.and_then(|n| recorder.index(n)),
            is_self: v.is_self,
        });
        // Only what changed is news.
        let told = (v.term, v.leader, v.is_self);
        loop {
            if view.changed().await.is_err() {
                return;
            }
            let v = view.get();
            if (v.term, v.leader, v.is_self) != told {
                break;
            }
        }
    }
}

async fn watch_books(core: Arc<NodeCore>, node: NodeIx, recorder: Recorder) {
    let mut moved = Instant::now();
    let mut last = serde_json::Value::Null;
    loop {
        sleep(BOOKS_BEAT).await;
        let records = core.membership().record_count() as u64;
        recorder.record(Event::Gauge { node, gauge: Gauge::Records, value: records, limit: RECORDS_MAX });
        for model in core.groups().models() {
            let status = core.model_status(&model);
            let ledger = &status["ledger"];
            let count = |field: &str| ledger[field].as_u64();
            if let (Some(running), Some(accepted), Some(quota), Some(adopted)) =
                (count("running"), count("accepted"), count("quota"), count("adopted"))
            {
                let (value, limit) = (running + accepted, quota + adopted);
                recorder.record(Event::Gauge { node, gauge: Gauge::Quota, value, limit });
            }
            let now = serde_json::json!([status["version"], status["term"], status["activity"]]);
            if now != last {
                last = now;
                moved = Instant::now();
            }
            let said = status["activity"]["doing"].as_str().filter(|s| !s.is_empty());
            let reason = said.or(status["wait"].as_str()).map(str::to_owned);
            recorder.record(Event::Waits { node, since: moved.elapsed(), reason });
        }
    }
}
