//! Stop strings: text that ends an answer and is never shown.

/// Looks for stop strings in text that arrives in pieces, and holds back what may become one.
#[derive(Debug, Default)]
pub struct StopScanner {
    stops: Vec<String>,
    held: String,
    found: Option<usize>,
}

impl StopScanner {
    /// For an answer that ends at any of `stops`, none of them empty.
    #[must_use]
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new(), found: None }
    }

    /// Appends to `out` the text that certainly lies before a stop string. True when one was found; nothing
    /// may be pushed after that.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.stops.is_empty() {
            out.push_str(text);
            return false;
        }
        self.held.push_str(text);
        let places = self.stops.iter().enumerate().filter_map(|(i, s)| Some((self.held.find(s.as_str())?, i)));
        if let Some((at, stop)) = places.min() {
            out.push_str(&self.held[..at]);
            self.held.clear();
            self.found = Some(stop);
            return true;
        }
        let keep = self.stops.iter().map(|s| partial_suffix(&self.held, s)).max().unwrap_or(0);
        let certain = self.held.len() - keep;
        out.push_str(&self.held[..certain]);
        self.held.drain(..certain);
        false
    }

    /// The stop string that was found; of several at one place, the first that was asked for.
    #[must_use]
    pub fn found(&self) -> Option<&str> {
        self.found.and_then(|i| self.stops.get(i)).map(String::as_str)
    }

    /// Appends what was held back: the answer ended otherwise.
    pub fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

/// Length in bytes of the longest end of `text` that is a beginning of `pattern`, but not all of it.
pub(super) fn partial_suffix(text: &str, pattern: &str) -> usize {
    let longest = pattern.len().saturating_sub(1).min(text.len());
    (1..=longest).rev().find(|&n| pattern.is_char_boundary(n) && text.ends_with(&pattern[..n])).unwrap_or(0)
}
