//! Waits without a reason (promise 5), looked for in what every node said every 5 s.

use crate::read::{Run, Status};
use std::collections::BTreeMap;

/// A node whose version does not move and that names no reason breaks the promise after 5 s. Statuses are taken every
/// 5 s and on a starved machine later, so: in every status of a time this long.
const EMPTY_S_MAX: f64 = 10.0;
/// A mesh without a step, or without an episode, for this long must say why: three times what a step takes here.
pub(crate) const STILL_S_MAX: f64 = 30.0;
/// Agents that run and end nothing for this long wait for something, and their node must say for what: an episode takes
/// some 10 s.
const AGENTS_S_MAX: f64 = 60.0;
/// A node that should answer and does not for this long.
const UNANSWERED_S_MAX: f64 = 60.0;

/// Between two statuses that lie further apart than this nothing is known: the soak itself got no time.
const BLIND_S: f64 = 8.0;

/// A wait that nobody gave a reason for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Silence {
    /// What waited.
    pub(crate) who: String,
    pub(crate) from_s: f64,
    pub(crate) to_s: f64,
    /// What was said meanwhile, for a look.
    pub(crate) said: Vec<String>,
}

/// A time without a step (or without an episode), longer than [`STILL_S_MAX`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Still {
    pub(crate) from_s: f64,
    pub(crate) to_s: f64,
}

/// What the statuses of a run say about its waits.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    pub(crate) silences: Vec<Silence>,
    pub(crate) without_step: Vec<Still>,
    pub(crate) without_episode: Vec<Still>,
    /// Reasons that were named, without their numbers, and in how many statuses.
    pub(crate) reasons: BTreeMap<String, usize>,
    /// Statuses that were asked for, and those that came.
    pub(crate) asked: usize,
    pub(crate) answered: usize,
}

pub(crate) fn look(run: &Run) -> Waits {
    let mut waits = Waits { asked: run.statuses.len(), ..Waits::default() };
    for status in run.statuses.iter().filter(|s| s.unanswered.is_none()) {
        waits.answered += 1;
        for reason in &status.doing {
            *waits.reasons.entry(without_numbers(reason)).or_default() += 1;
        }
    }
    let mut by_life: BTreeMap<(&str, u32), Vec<&Status>> = BTreeMap::new();
    run.statuses.iter().for_each(|s| by_life.entry((&s.node, s.life)).or_default().push(s));
    for ((node, _), statuses) in &by_life {
        let empty = |s: &Status| s.unanswered.is_none() && !s.doing.iter().any(|d| says_something(d));
        let version = |s: &Status| s.version;
        waits.silences.extend(stretches(statuses, empty, version, EMPTY_S_MAX, &format!("{node}, which says nothing")));
        let only_agents = |s: &Status| s.agents.is_some() && !s.doing.iter().any(|d| names_a_reason(d));
        let ended = |s: &Status| s.agents.as_ref().map(|a| a.ended);
        waits.silences.extend(stretches(
            statuses,
            only_agents,
            ended,
            AGENTS_S_MAX,
            &format!("{node}, whose agents end nothing"),
        ));
        let unanswered = |s: &Status| s.unanswered.is_some();
        waits.silences.extend(stretches(
            statuses,
            unanswered,
            |_| (),
            UNANSWERED_S_MAX,
            &format!("{node}, which does not answer"),
        ));
    }
    waits.without_step = still(run, &steps(run));
    waits.without_episode = still(run, &episodes(run));
    for (what, times) in [("no step", &waits.without_step), ("no episode", &waits.without_episode)] {
        for time in times {
            waits.silences.extend(unexplained(run, time, what));
        }
    }
    waits
}

/// Times in which every status is `silent` and `value` does not change, longer than `max_s` without what the node waited for
/// a processor.
fn stretches<V: PartialEq>(
    statuses: &[&Status],
    silent: impl Fn(&Status) -> bool,
    value: impl Fn(&Status) -> V,
    max_s: f64,
    who: &str,
) -> Vec<Silence> {
    let goes_on = |a: &Status, b: &Status| {
        let seen = b.unanswered.is_some() || b.t - a.t < BLIND_S;
        seen && silent(a) && silent(b) && value(a) == value(b)
    };
    let stretches = statuses.chunk_by(|a, b| goes_on(a, b));
    let long = stretches.filter(|s| silent(s[0]) && counted_s(s) > max_s);
    let told = |s: &[&Status]| s.iter().map(|s| say(s)).collect();
    long.map(|s| Silence { who: who.to_owned(), from_s: s[0].t, to_s: s[s.len() - 1].t, said: told(s) }).collect()
}

/// Time from the first of these to the last, without what the node waited for a processor.
fn counted_s(statuses: &[&Status]) -> f64 {
    statuses.windows(2).map(|w| (w[1].t - w[0].t) * (1.0 - w[1].starved.unwrap_or(0.0))).sum()
}

/// Moments at which a version was seen that nobody had had before.
pub(crate) fn steps(run: &Run) -> Vec<f64> {
    let (mut newest, mut times) = (0, Vec::new());
    for s in &run.statuses {
        if s.version.is_some_and(|v| v > newest) {
            newest = s.version.unwrap_or(newest);
            times.push(s.t);
        }
    }
    times
}

/// Moments at which an episode was seen to have ended: of a client's agents, or of the soak's own.
fn episodes(run: &Run) -> Vec<f64> {
    let mut before: BTreeMap<(&str, u32), u64> = BTreeMap::new();
    let mut times: Vec<f64> = run.acknowledged.iter().map(|a| a.t).collect();
    for s in &run.statuses {
        if let Some(agents) = &s.agents {
            let last = before.insert((&s.node, s.life), agents.ended).unwrap_or(0);
            if agents.ended > last {
                times.push(s.t);
            }
        }
    }
    times.sort_by(f64::total_cmp);
    times
}

/// Gaps between `times`, and after the last of them, that are longer than [`STILL_S_MAX`].
fn still(run: &Run, times: &[f64]) -> Vec<Still> {
    let end = run.statuses.last().map_or(0.0, |s| s.t);
    let ends = times.iter().skip(1).copied().chain([end]);
    let gaps = times.iter().zip(ends).map(|(from_s, to_s)| Still { from_s: *from_s, to_s });
    gaps.filter(|g| g.to_s - g.from_s > STILL_S_MAX).collect()
}

/// A time without progress is explained if, once it lasts [`STILL_S_MAX`], no statuses that span more than [`EMPTY_S_MAX`] follow
/// each other without one that names a reason.
fn unexplained(run: &Run, time: &Still, what: &str) -> Option<Silence> {
    let within: Vec<&Status> =
        run.statuses.iter().filter(|s| s.t > time.from_s + STILL_S_MAX && s.t <= time.to_s).collect();
    let span = |stretch: &[&Status]| stretch.last().zip(stretch.first()).map_or(0.0, |(last, first)| last.t - first.t);
    let longest = within
        .chunk_by(|a, b| b.t - a.t < BLIND_S)
        .flat_map(|seen| seen.split(|s| s.doing.iter().any(|d| names_a_reason(d))))
        .max_by(|a, b| span(a).total_cmp(&span(b)))?;
    let (from_s, to_s) = (longest.first()?.t, longest.last()?.t);
    let said = || longest.iter().map(|s| say(s)).collect();
    (to_s - from_s > EMPTY_S_MAX).then(|| Silence { who: what.to_owned(), from_s, to_s, said: said() })
}

/// "following 1a2b3c4d" and "agents run 3 episodes" say what a node does and not what it waits for.
fn names_a_reason(doing: &str) -> bool {
    let follows = doing.starts_with("following ");
    let runs_agents = doing.starts_with("agents run ") && doing.ends_with(" episodes");
    !follows && !runs_agents && says_something(doing)
}

/// A peer that cannot be reached may be one that left for good long ago, and then nothing waits for it.
fn says_something(doing: &str) -> bool {
    !doing.starts_with("cannot reach ")
}

fn say(s: &Status) -> String {
    let told: Vec<&str> = s.doing.iter().map(String::as_str).filter(|d| says_something(d)).collect();
    let what = s.unanswered.clone().unwrap_or_else(|| if told.is_empty() { "nothing".into() } else { told.join("; ") });
    format!("{:.1} s {}: {what}", s.t, s.node)
}

/// Ids, counts and addresses become `#`, so that equal reasons are counted together.
fn without_numbers(reason: &str) -> String {
    let word = |w: &str| if w.bytes().any(|b| b.is_ascii_digit()) { "#".to_owned() } else { w.to_owned() };
    let words: Vec<String> = reason.split_whitespace().map(word).collect();
    let mut text = words.join(" ");
    text.truncate(text.floor_char_boundary(100));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::Agents;

    fn status(t: f64, node: &str, version: u64, doing: &[&str]) -> Status {
        Status {
            t,
            node: node.into(),
            life: 1,
            starved: None,
            unanswered: None,
            version: Some(version),
            doing: doing.iter().map(|d| (*d).to_owned()).collect(),
            agents: None,
            store: serde_json::Value::Null,
        }
    }

    /// A step every 5 s.
    fn steps_until(t: f64) -> u64 {
        (0..40).filter(|i| f64::from(*i) * 5.0 <= t).count() as u64
    }

    /// A leader that steps every 10 s for 100 s, then `then`, every 5 s, up to 200 s.
    fn run(then: impl Fn(f64) -> Status) -> Run {
        let busy = (0..20_u32).map(|i| status(f64::from(i) * 5.0, "server-1", u64::from(i / 2), &["training"]));
        let after = (20..40_u32).map(|i| then(f64::from(i) * 5.0));
        Run { events: vec![], samples: vec![], statuses: busy.chain(after).collect(), acknowledged: vec![] }
    }

    #[test]
    fn progress_needs_no_reason() {
        let run = run(|t| status(t, "server-1", steps_until(t), &[]));
        assert_eq!(look(&run).silences, []);
    }

    #[test]
    fn a_wait_with_a_reason_is_none_of_silence() {
        let waits = look(&run(|t| status(t, "server-1", 9, &["waiting for a leader to be elected"])));
        assert_eq!(waits.silences, []);
        assert_eq!(waits.without_step.len(), 1, "{:?}", waits.without_step);
    }

    #[test]
    fn a_node_that_says_nothing_is_found() {
        let silences = look(&run(|t| status(t, "server-1", 9, &[]))).silences;
        assert!(silences.iter().any(|s| s.who.contains("says nothing") && s.to_s - s.from_s > 90.0), "{silences:?}");
    }

    #[test]
    fn what_a_node_does_is_no_reason_for_a_mesh_that_stands_still() {
        let said = ["following 1a2b3c4d", "cannot reach 5e6f7a8b at /ip4/10.77.0.8/tcp/4001: timeout"];
        let silences = look(&run(|t| status(t, "server-1", 9, &said))).silences;
        assert_eq!(silences.len(), 1, "{silences:?}");
        assert_eq!(silences[0].who, "no step");
    }

    #[test]
    fn a_node_that_gets_no_processor_is_not_silent() {
        let starved = |share| {
            run(move |t| Status {
                unanswered: Some("timeout".into()),
                starved: Some(share),
                ..status(t, "server-1", 9, &[])
            })
        };
        let found = |share| look(&starved(share)).silences.iter().filter(|s| s.who.contains("not answer")).count();
        assert_eq!((found(0.1), found(0.95)), (1, 0));
    }

    #[test]
    fn what_was_not_asked_is_not_held_against_the_mesh() {
        let mut run = run(|t| status(t, "server-1", 9, &["training"]));
        run.statuses.retain(|s| s.t < 150.0 || s.t > 175.0);
        assert_eq!(look(&run).silences, []);
    }

    #[test]
    fn agents_that_end_nothing_are_found() {
        let agents = |ended| Some(Agents { ended });
        let mut run = run(|t| status(t, "server-1", steps_until(t), &["training"]));
        run.statuses.extend((0..40_u32).map(|i| Status {
            agents: agents(7),
            ..status(f64::from(i) * 5.0, "client-1", 0, &["agents run 3 episodes"])
        }));
        run.statuses.sort_by(|a, b| a.t.total_cmp(&b.t));
        let silences = look(&run).silences;
        assert!(silences.iter().any(|s| s.who == "client-1, whose agents end nothing"), "{silences:?}");
    }

    #[test]
    fn a_node_that_does_not_answer_is_found() {
        let silences =
            look(&run(|t| Status { unanswered: Some("timeout".into()), ..status(t, "server-1", 9, &[]) })).silences;
        assert!(silences.iter().any(|s| s.who.contains("does not answer")), "{silences:?}");
    }
}
