//! Evaluations before the first step and after the last: a fixed plan of places, each filled by one rollout.

use super::leases::Place;
use super::{Admission, Ledger, Surplus};
use crate::assignment::EvalPhase;
use crate::control::{EvalScore, EvaluationCompleted};
use crate::ids::EpisodeId;
use crate::rollout::VerifiedRollout;

#[derive(Clone, Debug)]
pub(super) struct EvalSlot {
    pub(super) set: usize,
    pub(super) index: u32,
    pub(super) greedy: bool,
    pub(super) attempts: u32,
    pub(super) running: Option<EpisodeId>,
    pub(super) reward: Option<f32>,
}

#[derive(Clone, Debug)]
pub(super) struct Evaluation {
    pub(super) phase: EvalPhase,
    pub(super) slots: Vec<EvalSlot>,
}

impl Ledger {
    /// Places of the evaluation that runs now: how many have a reward, and of how many.
    #[must_use]
    pub fn evaluation_progress(&self) -> Option<(EvalPhase, usize, usize)> {
        let e = self.evaluation.as_ref()?;
        Some((e.phase, e.slots.iter().filter(|s| s.reward.is_some()).count(), e.slots.len()))
    }

    pub(super) fn plan_evaluation(&mut self) {
        let spec = &self.job.spec;
        let due = |phase, asked| asked && self.job.evaluation(phase).is_none();
        let phase = if self.job.steps == 0 && due(EvalPhase::Start, spec.evaluate.at_start) {
            EvalPhase::Start
        } else if self.job.steps >= spec.steps && due(EvalPhase::End, spec.evaluate.at_end) {
            EvalPhase::End
        } else {
            self.evaluation = None;
            return;
        };
        let mut slots = Vec::new();
        for (set, tasks) in self.tasks.iter().enumerate() {
            let n = u32::try_from(tasks.heldout.len()).unwrap_or(u32::MAX).max(1);
            for (greedy, count) in [(false, spec.evaluate.samples), (true, spec.evaluate.greedy)] {
                slots.extend((0..count).map(|i| EvalSlot {
                    set,
                    index: i % n,
                    greedy,
                    attempts: 0,
                    running: None,
                    reward: None,
                }));
            }
        }
        self.evaluation = Some(Evaluation { phase, slots });
    }

    pub(super) fn admit_eval(&mut self, v: &VerifiedRollout, phase: EvalPhase, greedy: bool, slot: u32) -> Admission {
        let Some(e) = self.evaluation.as_mut().filter(|e| e.phase == phase) else {
            return Admission::Ignored(Surplus::EvaluationOver);
        };
        let Some(s) = e.slots.get_mut(slot as usize).filter(|s| s.greedy == greedy) else {
            return Admission::Invalid(format!("evaluation slot {slot}, greedy {greedy}: not in the plan"));
        };
        if s.reward.is_some() {
            return Admission::Ignored(Surplus::EvaluationOver);
        }
        if v.oldest_version().is_some_and(|o| o != self.version) {
            return Admission::Ignored(Surplus::Stale);
        }
        s.reward = Some(v.rollout.reward);
        if let Some(other) = s.running.take() {
            self.leases.remove(&other);
        }
        Admission::Accepted
    }

    /// The evaluation that runs, once every place has its reward.
    #[must_use]
    pub fn finished_evaluation(&self) -> Option<EvaluationCompleted> {
        let e = self.evaluation.as_ref()?;
        if e.slots.iter().any(|s| s.reward.is_none()) {
            return None;
        }
        let score = |set: usize| {
            let of = |greedy: bool| -> Vec<f64> {
                let of_set = e.slots.iter().filter(|s| s.set == set && s.greedy == greedy);
                of_set.filter_map(|s| s.reward.map(f64::from)).collect()
            };
            let (sampled, greedy) = (of(false), of(true));
            let mean = |v: &[f64]| if v.is_empty() { 0.0 } else { v.iter().sum::<f64>() / v.len() as f64 };
            let m = mean(&sampled);
            let n = sampled.len() as f64;
            let var = if n > 1.0 { sampled.iter().map(|r| (r - m).powi(2)).sum::<f64>() / (n - 1.0) } else { 0.0 };
            EvalScore {
                samples: u32::try_from(sampled.len()).unwrap_or(u32::MAX),
                mean: m,
                ci95: if n > 0.0 { 1.96 * (var / n).sqrt() } else { 0.0 },
                greedy_samples: u32::try_from(greedy.len()).unwrap_or(u32::MAX),
                greedy_mean: mean(&greedy),
            }
        };
        let scores = self.job.spec.tasks.iter().enumerate().map(|(i, t)| (t.name.clone(), score(i))).collect();
        Some(EvaluationCompleted { job: self.job.job, phase: e.phase, version: self.version, scores })
    }

    /// The finished evaluation stands in the log.
    pub fn handle_evaluated(&mut self, e: EvaluationCompleted) {
        self.job.evaluations.push(e);
        self.leases.retain(|_, l| matches!(l.place, Place::Group(_)));
        self.plan_evaluation();
    }
}
