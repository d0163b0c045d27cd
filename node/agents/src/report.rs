//! The result line of an agent program: text in, checked numbers out.

use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Most metrics of an episode.
const METRICS_MAX: usize = 64;
/// Longest name of a metric, in bytes.
const METRIC_NAME_LEN_BYTES_MAX: usize = 128;
/// Characters of a line that an error shows.
const SHOWN_CHARS: usize = 120;

/// What an agent program reports. All numbers are finite as `f32`, which is what a rollout holds.
#[derive(Clone, Debug, PartialEq)]
pub struct EpisodeReport {
    /// The episode's reward.
    pub reward: f64,
    /// Whatever else it measured.
    pub metrics: BTreeMap<String, f64>,
}

/// Why a program's output holds no result. The agent's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// Nothing that looks like a result.
    #[error(
        "expected a JSON line like {{\"reward\": 1.0}} on standard output, got {}",
        last.as_ref().map_or("no output".to_owned(), |l| format!("as its last line {l:?}"))
    )]
    Missing {
        /// The last line, cut.
        last: Option<String>,
    },
    /// A line starts like JSON and is not.
    #[error("expected a JSON object, got {line:?}: {reason}")]
    NotJson {
        /// The line, cut.
        line: String,
        /// What the parser said.
        reason: String,
    },
    /// A line is too long to be a result.
    #[error("expected a JSON line of at most {limit_bytes} bytes, got a line of {got_bytes} that starts with {head:?}")]
    TooLong {
        /// The limit.
        limit_bytes: usize,
        /// Its length.
        got_bytes: usize,
        /// Its first characters.
        head: String,
    },
    /// A field is wrong.
    #[error("field `{field}`: expected {expected}, got {got}")]
    Field {
        /// Which one.
        field: String,
        /// What it must be.
        expected: &'static str,
        /// What it is, cut.
        got: String,
    },
}

/// A JSON line of a program: the object, with Python's `NaN` and `Infinity` read as texts.
pub(crate) type Object = Map<String, Value>;

/// Cuts a text for an error message.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

/// Parses a line as a JSON object.
///
/// Python's `json.dumps` writes NaN and infinities as bare words, which is not JSON. They are read as texts, so that the
/// check of the field can say which one it is.
pub(crate) fn parse_object(line: &str) -> Result<Object, ReportError> {
    serde_json::from_str(line)
        .or_else(|err| serde_json::from_str(&quote_non_finite(line)).map_err(|_again| err))
        .map_err(|err| ReportError::NotJson { line: shown(line), reason: err.to_string() })
}

fn quote_non_finite(line: &str) -> String {
    let mut out = String::with_capacity(line.len() + 8);
    let mut rest = line;
    let (mut in_text, mut escaped) = (false, false);
    while let Some(c) = rest.chars().next() {
        let word = ["NaN", "-Infinity", "Infinity"].into_iter().find(|w| !in_text && rest.starts_with(w));
        if let Some(word) = word {
            out.extend(["\"", word, "\""]);
            rest = &rest[word.len()..];
            continue;
        }
        out.push(c);
        rest = &rest[c.len_utf8()..];
        if c == '"' && !escaped {
            in_text = !in_text;
        }
        escaped = in_text && c == '\\' && !escaped;
    }
    out
}

/// Reads reward and metrics. Other fields are ignored.
pub(crate) fn read_report(object: &Object) -> Result<EpisodeReport, ReportError> {
    let reward = finite("reward", "a finite number", object.get("reward"))?;
    let mut metrics = BTreeMap::new();
    match object.get("metrics") {
        None | Some(Value::Null) => {}
        Some(Value::Object(map)) if map.len() <= METRICS_MAX => {
            for (name, value) in map {
                if name.is_empty() || name.len() > METRIC_NAME_LEN_BYTES_MAX {
                    return Err(field("metrics", "names of 1 to 128 bytes", &shown(name)));
                }
                let value = finite(&format!("metrics.{name}"), "a finite number", Some(value))?;
                metrics.insert(name.clone(), value);
            }
        }
        Some(Value::Object(map)) => return Err(field("metrics", "at most 64 entries", &map.len().to_string())),
        Some(other) => return Err(field("metrics", "an object of numbers", &shown(&other.to_string()))),
    }
    Ok(EpisodeReport { reward, metrics })
}

/// The program's own word that it failed: the field `error` of a result line.
pub(crate) fn claimed_error(object: &Object) -> Option<String> {
    object.get("error").filter(|e| !e.is_null()).map(|e| shown(e.as_str().unwrap_or(&e.to_string())))
}

fn field(field: &str, expected: &'static str, got: &str) -> ReportError {
    ReportError::Field { field: field.to_owned(), expected, got: got.to_owned() }
}

fn finite(name: &str, expected: &'static str, value: Option<&Value>) -> Result<f64, ReportError> {
    match value {
        None => Err(field(name, expected, "nothing")),
        Some(Value::Number(n)) => match n.as_f64() {
            // A rollout holds f32: a number that is infinite there is refused here, where the agent hears of it.
            Some(x) if x.abs() <= f64::from(f32::MAX) => Ok(x),
            _ => Err(field(name, "a number within ±3.4e38", &n.to_string())),
        },
        Some(Value::String(s)) if ["NaN", "Infinity", "-Infinity"].contains(&s.as_str()) => {
            Err(field(name, expected, s))
        }
        Some(other) => Err(field(name, expected, &shown(&other.to_string()))),
    }
}

/// Follows a program's output and keeps its last JSON line: what `PerEpisode` programs are read with.
#[derive(Debug, Default)]
pub(crate) struct ResultScan {
    result: Option<Object>,
    /// Why the last line that looked like a result was not one.
    refused: Option<ReportError>,
    last: Option<String>,
}

impl ResultScan {
    /// Takes one line.
    pub(crate) fn line(&mut self, line: &str) {
        let line = line.trim();
        if line.starts_with('{') {
            match parse_object(line) {
                Ok(object) => self.result = Some(object),
                Err(err) => self.refused = Some(err),
            }
        } else if !line.is_empty() {
            self.last = Some(shown(line));
        }
    }

    /// Takes a line that was too long to keep.
    pub(crate) fn too_long(&mut self, limit_bytes: usize, got_bytes: usize, head: &str) {
        self.refused = Some(ReportError::TooLong { limit_bytes, got_bytes, head: shown(head) });
    }

    /// The last JSON line.
    ///
    /// # Errors
    /// When there was none: the reason why the last candidate is none.
    pub(crate) fn finish(self) -> Result<Object, ReportError> {
        let Self { result, refused, last } = self;
        result.ok_or_else(|| refused.unwrap_or(ReportError::Missing { last }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(line: &str) -> Result<EpisodeReport, ReportError> {
        read_report(&parse_object(line)?)
    }

    #[test]
    fn reward_and_metrics_are_read_and_other_fields_ignored() {
        let r = report(r#"{"reward": 1, "metrics": {"turns": 3}, "answer": "4"}"#).unwrap();
        assert_eq!(r, EpisodeReport { reward: 1.0, metrics: BTreeMap::from([("turns".into(), 3.0)]) });
        assert!(report(r#"{"reward": -0.5, "metrics": null}"#).unwrap().metrics.is_empty());
    }

    #[test]
    fn a_wrong_field_is_named_with_what_came() {
        let refused = |line: &str| report(line).unwrap_err().to_string();
        assert_eq!(refused("{}"), "field `reward`: expected a finite number, got nothing");
        assert_eq!(refused(r#"{"reward": NaN}"#), "field `reward`: expected a finite number, got NaN");
        assert_eq!(refused(r#"{"reward": "1"}"#), "field `reward`: expected a finite number, got \"1\"");
        assert_eq!(refused(r#"{"reward": 1e300}"#), "field `reward`: expected a number within ±3.4e38, got 1e+300");
        assert_eq!(
            refused(r#"{"reward": 0, "metrics": {"\"NaN": -Infinity}}"#),
            "field `metrics.\"NaN`: expected a finite number, got -Infinity"
        );
        assert_eq!(
            refused(r#"{"reward": 0, "metrics": [1]}"#),
            "field `metrics`: expected an object of numbers, got [1]"
        );
        assert!(refused("{reward}").starts_with("expected a JSON object, got \"{reward}\""));
    }

    #[test]
    fn the_last_json_line_counts() {
        let mut scan = ResultScan::default();
        for line in ["hello", r#"{"reward": 0}"#, r#"  {"reward": 1}  "#, "{'a': 1}", "bye"] {
            scan.line(line);
        }
        assert_eq!(read_report(&scan.finish().unwrap()).unwrap().reward.to_string(), "1");
    }

    #[test]
    fn output_without_a_result_says_what_came_last() {
        assert!(ResultScan::default().finish().unwrap_err().to_string().ends_with("got no output"));
        let mut scan = ResultScan::default();
        scan.line("bye");
        assert!(scan.finish().unwrap_err().to_string().ends_with("got as its last line \"bye\""));
    }
}
