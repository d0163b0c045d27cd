//! Whether a group without a quorum may go on in a new line, and who is to open it. Sans-IO.
//!
//! Safety does not depend on this: whoever opens a line leaves the old one, and of several lines one stays. It keeps
//! survivors who see each other from opening several, and a line that still has a majority from being left.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use starling_protocol::NodeId;
use starling_protocol::wire::Standing;

/// What one member found when it asked the others.
#[derive(Clone, Debug)]
pub(super) struct Survey {
    pub(super) node: NodeId,
    pub(super) own: Standing,
    pub(super) voters: BTreeSet<NodeId>,
    /// Live members that are not in another line, with what they said, or why they said nothing.
    pub(super) others: BTreeMap<NodeId, Result<Standing, String>>,
}

/// What is to become of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outlook {
    /// This node opens a new line now; so many members are alive, and `known` is the greatest generation among them.
    Open { survivors: usize, known: u8 },
    /// Not now, or not this node.
    Wait(String),
}

fn wait(why: impl Into<String>) -> Outlook {
    Outlook::Wait(why.into())
}

impl Survey {
    /// Members of the same line that answered.
    fn same(&self) -> impl Iterator<Item = (NodeId, &Standing)> {
        let others = self.others.iter().filter_map(|(n, s)| Some((*n, s.as_ref().ok()?)));
        others.filter(|(_, s)| s.line == self.own.line)
    }

    /// What is to be done; `asked` is whether an operator wants it done now.
    pub(super) fn outlook(&self, asked: bool) -> Outlook {
        if self.own.last.is_none() {
            return wait("nothing is here that a new generation could go on from");
        }
        let answered = || self.others.iter().filter_map(|(n, s)| Some((n, s.as_ref().ok()?)));
        // One that joined a line and never got its state, because that died with its leader, knows nothing to wait for.
        let goes_on = |s: &Standing| s.line > self.own.line && (s.leader.is_some() || s.last.is_some());
        if let Some((node, s)) = answered().find(|(_, s)| goes_on(s)) {
            return wait(format!("{} is in {}, whose leader is to take this node in", node.short(), s.line));
        }
        if let Some((node, leader)) = self.same().find_map(|(n, s)| Some((n, s.leader?))) {
            return wait(format!("{} hears a leader, {}", node.short(), leader.short()));
        }
        if let Some((node, why)) = self.others.iter().find_map(|(n, s)| Some((n, s.as_ref().err()?))) {
            return wait(format!("a new generation is held back by {}, which does not answer: {why}", node.short()));
        }
        let alive = 1 + self.same().filter(|(n, _)| self.voters.contains(n)).count();
        let alive = alive - usize::from(!self.voters.contains(&self.node));
        if alive > self.voters.len() / 2 {
            return wait("a majority of the voters is alive, so an election will do");
        }
        let everyone = || self.same().chain([(self.node, &self.own)]);
        let best = everyone().filter(|(_, s)| s.able && s.last.is_some());
        let Some((best, standing)) = best.max_by_key(|(n, s)| (s.last, Reverse(*n))) else {
            return wait("none of its live members could lead a new generation");
        };
        if !asked {
            if let Some((never, _)) = everyone().find(|(_, s)| s.willing_in_ms.is_none()) {
                let who = if never == self.node { "this node".to_owned() } else { never.short() };
                return wait(format!("a new generation is held back by {who}, whose generation-after is never"));
            }
            let last = everyone().max_by_key(|(n, s)| (s.willing_in_ms, Reverse(*n)));
            if let Some((last, ms)) = last.and_then(|(n, s)| Some((n, s.willing_in_ms.filter(|ms| *ms > 0)?))) {
                let after = Duration::from_secs(ms.div_ceil(1000));
                let by = if best == self.node { "this node".to_owned() } else { best.short() };
                let held = if last == self.node { String::new() } else { format!(", held back by {}", last.short()) };
                return wait(format!("a new generation will be opened by {by} in {after:?}{held}"));
            }
        }
        if best != self.node {
            let version = standing.version;
            return wait(format!(
                "a new generation is to be opened by {}, which has the newest log, at version {version}",
                best.short()
            ));
        }
        let known = answered().map(|(_, s)| s.line.generation).max().unwrap_or_default();
        Outlook::Open { survivors: everyone().count(), known }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use starling_protocol::{Line, PolicyVersion, Term};

    fn id(n: u8) -> NodeId {
        NodeId([n; 32])
    }

    fn standing(version: u64, index: u64) -> Standing {
        Standing {
            line: Line::default(),
            version: PolicyVersion(version),
            last: Some((Term(3), index)),
            leader: None,
            able: true,
            willing_in_ms: Some(0),
        }
    }

    /// Node 1 of five voters, with the others that it reaches.
    fn survey(own: Standing, others: &[(u8, Standing)]) -> Survey {
        let others = others.iter().map(|(n, s)| (id(*n), Ok(s.clone()))).collect();
        Survey { node: id(1), own, voters: (1..=5).map(id).collect(), others }
    }

    fn why(s: &Survey) -> String {
        match s.outlook(false) {
            Outlook::Wait(why) => why,
            Outlook::Open { .. } => panic!("it opens: {s:?}"),
        }
    }

    #[test]
    fn the_survivor_with_the_newest_state_opens_and_the_others_wait_for_it() {
        let s = survey(standing(7, 20), &[(2, standing(7, 20))]);
        assert_eq!(s.outlook(false), Outlook::Open { survivors: 2, known: 0 }, "ties go to the lower id");
        for ahead in [Standing { last: Some((Term(4), 10)), ..standing(7, 20) }, standing(7, 21)] {
            let s = survey(standing(7, 20), &[(2, ahead)]);
            assert!(why(&s).contains("opened by 02020202"), "{}", why(&s));
            assert!(matches!(s.outlook(true), Outlook::Wait(_)), "not even if asked");
        }
        let unable = Standing { able: false, ..standing(9, 30) };
        assert_eq!(survey(standing(7, 20), &[(2, unable)]).outlook(false), Outlook::Open { survivors: 2, known: 0 });
    }

    #[test]
    fn a_majority_or_a_leader_or_a_greater_line_keeps_the_line_as_it_is() {
        let s = survey(standing(7, 20), &[(2, standing(7, 20)), (3, standing(6, 19))]);
        assert!(why(&s).contains("majority") && matches!(s.outlook(true), Outlook::Wait(_)));
        let s = survey(standing(7, 20), &[(2, Standing { leader: Some(id(4)), ..standing(7, 20) })]);
        assert!(why(&s).contains("02020202 hears a leader, 04040404"), "{}", why(&s));
        let line = Line { generation: 1, steps: 7, survivors: 1, opened_by: id(9) };
        let s = survey(standing(7, 20), &[(2, Standing { line, ..standing(7, 20) })]);
        assert!(why(&s).contains("generation 1, opened by 09090909"), "{}", why(&s));
        // Those that are no voters count for nothing here, and for a place in the new line.
        let s = survey(standing(7, 20), &[(8, standing(7, 20)), (9, standing(7, 20))]);
        assert_eq!(s.outlook(false), Outlook::Open { survivors: 3, known: 0 });
    }

    #[test]
    fn a_wait_says_when_it_ends_and_who_holds_it_back() {
        let soon = Standing { willing_in_ms: Some(30_001), ..standing(7, 20) };
        assert_eq!(why(&survey(soon.clone(), &[])), "a new generation will be opened by this node in 31s");
        let s = survey(standing(7, 20), &[(2, soon.clone())]);
        assert!(why(&s).ends_with("in 31s, held back by 02020202"), "{}", why(&s));
        assert_eq!(s.outlook(true), Outlook::Open { survivors: 2, known: 0 }, "an operator need not wait");
        let never = Standing { willing_in_ms: None, ..standing(7, 20) };
        let s = survey(soon, &[(2, never)]);
        assert!(why(&s).contains("held back by 02020202, whose generation-after is never"), "{}", why(&s));
        let mut silent = survey(standing(7, 20), &[]);
        silent.others.insert(id(2), Err("no answer within 5s".into()));
        assert!(why(&silent).contains("held back by 02020202, which does not answer"), "{}", why(&silent));
        assert!(matches!(silent.outlook(true), Outlook::Wait(_)));
    }

    #[test]
    fn a_node_without_a_state_opens_nothing() {
        let empty = Standing { last: None, ..standing(0, 0) };
        assert!(why(&survey(empty.clone(), &[])).contains("nothing is here"));
        assert_eq!(
            survey(standing(1, 3), &[(2, empty.clone())]).outlook(false),
            Outlook::Open { survivors: 2, known: 0 }
        );
        // One that joined a line whose state is lost holds nobody back, and joins what is opened above it.
        let line = Line { generation: 1, steps: 1, survivors: 1, opened_by: id(9) };
        let s = survey(standing(1, 3), &[(2, Standing { line, ..empty })]);
        assert_eq!(s.outlook(false), Outlook::Open { survivors: 1, known: 1 });
    }
}
