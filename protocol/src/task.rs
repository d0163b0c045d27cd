//! Task sets: JSON lines, one task each.

use crate::ids::NAME_LEN_BYTES_MAX;

/// Longest task line in bytes.
pub const TASK_LINE_LEN_BYTES_MAX: usize = 64 << 10;

/// One line of a task set. The line goes to the agent as it is; Starling itself reads only the id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The `id` field, unique in its set.
    pub id: String,
    /// The whole line, a JSON object.
    pub line: String,
}

/// Why a task set is refused. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskSetError {
    /// Not UTF-8.
    #[error("task set: line {line}: not UTF-8")]
    NotUtf8 {
        /// Where.
        line: usize,
    },
    /// A line is too long.
    #[error("task set: line {line}: {got} bytes, at most {TASK_LINE_LEN_BYTES_MAX} are allowed")]
    TooLong {
        /// Where.
        line: usize,
        /// Its length in bytes.
        got: usize,
    },
    /// A line has no usable `id`, or is not a JSON object.
    #[error("task set: line {line}: {reason}")]
    BadLine {
        /// Where.
        line: usize,
        /// What was expected and what came.
        reason: String,
    },
    /// Two lines have one id.
    #[error("task set: line {line}: id {id:?} is already that of line {first}")]
    DuplicateId {
        /// The second line.
        line: usize,
        /// The first line.
        first: usize,
        /// The id.
        id: String,
    },
    /// No task at all.
    #[error("task set: no tasks in it, expected one JSON object a line")]
    Empty,
}

/// Reads a task set. `id_of` parses a line as a JSON object and returns its `id` field, or says why not;
/// the JSON parser is the caller's, so that this crate needs none.
///
/// Blank lines are skipped.
///
/// # Errors
/// [`TaskSetError`] for the first line that is wrong.
pub fn read_task_set(bytes: &[u8], id_of: impl Fn(&str) -> Result<String, String>) -> Result<Vec<Task>, TaskSetError> {
    let mut tasks = Vec::new();
    let mut seen = std::collections::BTreeMap::new();
    for (i, raw) in bytes.split(|b| *b == b'\n').enumerate() {
        let line = i + 1;
        let text = std::str::from_utf8(raw).map_err(|_utf8| TaskSetError::NotUtf8 { line })?.trim();
        if text.is_empty() {
            continue;
        }
        if text.len() > TASK_LINE_LEN_BYTES_MAX {
            return Err(TaskSetError::TooLong { line, got: text.len() });
        }
        let id = id_of(text).map_err(|reason| TaskSetError::BadLine { line, reason })?;
        if id.is_empty() || id.len() > NAME_LEN_BYTES_MAX {
            return Err(TaskSetError::BadLine {
                line,
                reason: format!("field `id`: expected 1 to {NAME_LEN_BYTES_MAX} bytes, got {}", id.len()),
            });
        }
        if let Some(first) = seen.insert(id.clone(), line) {
            return Err(TaskSetError::DuplicateId { line, first, id });
        }
        tasks.push(Task { id, line: text.to_owned() });
    }
    if tasks.is_empty() { Err(TaskSetError::Empty) } else { Ok(tasks) }
}

/// The order in which a set's tasks are taken: a new permutation each pass over the set, from the seed alone.
#[derive(Clone, Debug)]
pub struct TaskOrder {
    seed: u64,
    len: u32,
    pass: u64,
    permutation: Vec<u32>,
}

impl TaskOrder {
    /// For `len` tasks (at least one) under `seed`.
    #[must_use]
    pub fn new(seed: u64, len: u32) -> Self {
        let mut order = Self { seed, len: len.max(1), pass: 0, permutation: Vec::new() };
        order.shuffle(0);
        order
    }

    fn shuffle(&mut self, pass: u64) {
        let key = |i: u32| {
            let mut h = blake3::Hasher::new();
            h.update(b"starling/task-order/1").update(&self.seed.to_le_bytes());
            h.update(&pass.to_le_bytes()).update(&i.to_le_bytes());
            *h.finalize().as_bytes()
        };
        let mut all: Vec<u32> = (0..self.len).collect();
        all.sort_by_cached_key(|i| key(*i));
        self.permutation = all;
        self.pass = pass;
    }

    /// Index of the `nth` task taken, counted from 0 over all passes.
    pub fn nth(&mut self, nth: u64) -> u32 {
        let pass = nth / u64::from(self.len);
        if pass != self.pass {
            self.shuffle(pass);
        }
        let at = usize::try_from(nth % u64::from(self.len)).unwrap_or(0);
        self.permutation[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_of(s: &str) -> Result<String, String> {
        s.strip_prefix("id=").map(str::to_owned).ok_or_else(|| format!("expected id=.., got {s:?}"))
    }

    #[test]
    fn a_task_set_reads_line_by_line_and_names_the_bad_one() {
        assert_eq!(read_task_set(b"id=a\n\nid=b\n", id_of).unwrap().len(), 2);
        assert_eq!(
            read_task_set(b"id=a\nid=a\n", id_of),
            Err(TaskSetError::DuplicateId { line: 2, first: 1, id: "a".into() })
        );
        assert!(read_task_set(b"id=a\nx\n", id_of).unwrap_err().to_string().contains("line 2"));
        assert_eq!(read_task_set(b"\n", id_of), Err(TaskSetError::Empty));
        assert_eq!(read_task_set(b"\xff", id_of), Err(TaskSetError::NotUtf8 { line: 1 }));
    }

    #[test]
    fn every_pass_takes_every_task_once_in_its_own_order() {
        let mut order = TaskOrder::new(7, 10);
        let mut passes = Vec::new();
        for pass in 0..3 {
            let taken: Vec<u32> = (0..10).map(|i| order.nth(pass * 10 + i)).collect();
            let mut sorted = taken.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
            passes.push(taken);
        }
        assert_ne!(passes[0], passes[1]);
        assert_eq!(TaskOrder::new(7, 10).nth(13), passes[1][3]);
    }
}
