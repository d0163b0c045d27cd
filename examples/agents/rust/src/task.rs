//! A line of a task set.

use anyhow::{Context, Error, Result, bail};
use serde_json::Value;
use std::str::FromStr;

/// Which set it is of, and so how it is solved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Answered in one turn.
    Sums,
    /// Answered with a calculator, over several turns.
    Calculator,
}

impl FromStr for Kind {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "sums" => Ok(Self::Sums),
            "calculator" => Ok(Self::Calculator),
            _ => bail!("set: expected sums or calculator, got {name:?}"),
        }
    }
}

/// What the agent needs of a line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) kind: Kind,
    /// Without spaces: a model that reads bytes pays for each.
    pub(crate) expression: String,
    pub(crate) answer: String,
}

impl Task {
    /// Reads a line; the set is `kind`, or else what the id starts with.
    pub(crate) fn new(line: &Value, kind: Option<Kind>) -> Result<Self> {
        let text = |field: &str| {
            line.get(field)
                .and_then(Value::as_str)
                .with_context(|| format!("task field `{field}`: expected a text, got {:?}", line.get(field)))
        };
        let kind = match kind {
            Some(kind) => kind,
            None => text("id")?.split('-').next().unwrap_or_default().parse()?,
        };
        let expression = text("expression")?.replace(' ', "");
        Ok(Self { kind, expression, answer: text("answer")?.to_owned() })
    }

    /// 1 for exactly the right text, else 0.
    pub(crate) fn reward(&self, answer: &str) -> f64 {
        if answer == self.answer { 1.0 } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_set_is_the_given_one_or_what_the_id_starts_with() {
        let line = json!({ "id": "sums-train-000001", "expression": "12 + 34", "answer": "46" });
        let task = Task::new(&line, None).unwrap();
        assert_eq!(task, Task { kind: Kind::Sums, expression: "12+34".into(), answer: "46".into() });
        assert_eq!(Task::new(&line, Some(Kind::Calculator)).unwrap().kind, Kind::Calculator);
        let err = Task::new(&json!({ "id": "chess-1" }), None).unwrap_err();
        assert_eq!(err.to_string(), "set: expected sums or calculator, got \"chess\"");
    }

    #[test]
    fn only_exactly_the_right_text_is_rewarded() {
        let task = Task { kind: Kind::Sums, expression: String::new(), answer: "46".into() };
        let rewards = ["46", "46.", " 46", "046", "", "64"].map(|answer| task.reward(answer) > 0.5);
        assert_eq!(rewards, [true, false, false, false, false, false]);
    }

    #[test]
    fn every_line_of_the_shipped_sets_is_solved_by_its_own_answer() {
        for set in ["sums", "calculator"] {
            for part in ["train", "heldout"] {
                let path = format!("{}/../../../tasks/{set}/{part}.jsonl", env!("CARGO_MANIFEST_DIR"));
                let lines = std::fs::read_to_string(&path).unwrap();
                for line in lines.lines() {
                    let task = Task::new(&serde_json::from_str(line).unwrap(), None).unwrap();
                    assert_eq!(task.kind, set.parse().unwrap());
                    assert_eq!(task.answer, solve(&task.expression), "{path}: {line}");
                }
            }
        }
    }

    /// What a good agent does: a product first, else from left to right, with the calculator only.
    fn solve(expression: &str) -> String {
        let split = |at: usize| (&expression[..at], &expression[at..=at], &expression[at + 1..]);
        let calc = |x: &str| crate::calculator::calc(x).unwrap();
        let at = |ops: &[char]| expression.rfind(|c| ops.contains(&c));
        match (at(&['*']), at(&['+', '-'])) {
            (Some(times), Some(plus)) if times > plus => {
                let (left, op, right) = split(plus);
                calc(&format!("{left}{op}{}", calc(right)))
            }
            (Some(_), Some(plus)) => {
                let (left, op, right) = split(plus);
                calc(&format!("{}{op}{right}", calc(left)))
            }
            _ => calc(expression),
        }
    }
}
