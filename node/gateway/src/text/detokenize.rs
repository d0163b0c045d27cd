//! Token ids to text, as they arrive, never cutting a character.

use super::ChatFormat;
use std::sync::Arc;
use tokenizers::Tokenizer;

/// The bytes of every token of a byte-level vocabulary, end to end.
#[derive(Debug)]
pub(super) struct ByteTable {
    bytes: Vec<u8>,
    /// Token `i` is `bytes[ends[i - 1]..ends[i]]`.
    ends: Vec<u32>,
}

impl ByteTable {
    /// From a tokenizer whose vocabulary is written in GPT-2's byte symbols. Added tokens stand for their text.
    pub(super) fn new(tokenizer: &Tokenizer) -> Self {
        let symbols: std::collections::HashMap<char, u8> =
            (0..=255).map(|b| (super::byte_model::byte_symbol(b), b)).collect();
        let added = tokenizer.get_added_tokens_decoder();
        let mut vocab: Vec<(u32, String)> =
            tokenizer.get_vocab(true).into_iter().map(|(text, id)| (id, text)).collect();
        vocab.sort_unstable();
        let mut table = Self { bytes: Vec::new(), ends: Vec::new() };
        let position = |table: &Self| u32::try_from(table.bytes.len()).unwrap_or(u32::MAX);
        for (id, text) in vocab {
            // Ids without a token, which some vocabularies have, get no bytes.
            while table.ends.len() < id as usize {
                table.ends.push(position(&table));
            }
            if added.contains_key(&id) {
                table.bytes.extend_from_slice(text.as_bytes());
            } else {
                for c in text.chars() {
                    match symbols.get(&c) {
                        Some(b) => table.bytes.push(*b),
                        None => table.bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
            }
            table.ends.push(position(&table));
        }
        table
    }

    pub(super) fn get(&self, id: u32) -> &[u8] {
        let i = id as usize;
        let Some(&end) = self.ends.get(i) else { return &[] };
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

/// Turns one answer's tokens into text. What a multi-byte character lacks is waited for.
#[derive(Debug)]
pub struct Detokenizer {
    format: Arc<ChatFormat>,
    /// Byte-level: bytes that are not a whole character yet.
    bytes: Vec<u8>,
    /// Otherwise: all ids, and where the window starts whose text is known.
    ids: Vec<u32>,
    known_from: usize,
    known_to: usize,
}

impl Detokenizer {
    /// For a new answer.
    #[must_use]
    pub fn new(format: Arc<ChatFormat>) -> Self {
        Self { format, bytes: Vec::new(), ids: Vec::new(), known_from: 0, known_to: 0 }
    }

    /// Appends to `text` what `id`, which is not special, makes certain.
    pub fn push(&mut self, id: u32, text: &mut String) {
        if let Some(table) = &self.format.bytes {
            let token = table.get(id);
            if self.bytes.is_empty()
                && let Ok(whole) = std::str::from_utf8(token)
            {
                text.push_str(whole);
                return;
            }
            self.bytes.extend_from_slice(token);
            self.take_characters(text);
        } else {
            self.ids.push(id);
            let before = self.window(self.known_to);
            let after = self.window(self.ids.len());
            if !after.ends_with(char::REPLACEMENT_CHARACTER)
                && let Some(new) = after.strip_prefix(before.as_str())
                && !new.is_empty()
            {
                text.push_str(new);
                self.known_from = self.known_to;
                self.known_to = self.ids.len();
            }
        }
    }

    /// Appends what is left, incomplete characters as U+FFFD. Special tokens and the end do this.
    pub fn flush(&mut self, text: &mut String) {
        if self.format.bytes.is_some() {
            if !self.bytes.is_empty() {
                text.push_str(&String::from_utf8_lossy(&self.bytes));
                self.bytes.clear();
            }
        } else {
            let before = self.window(self.known_to);
            let after = self.window(self.ids.len());
            text.push_str(after.strip_prefix(before.as_str()).unwrap_or_default());
            self.ids.clear();
            (self.known_from, self.known_to) = (0, 0);
        }
    }

    fn window(&self, to: usize) -> String {
        self.format.decode(&self.ids[self.known_from..to])
    }

    fn take_characters(&mut self, text: &mut String) {
        loop {
            match std::str::from_utf8(&self.bytes) {
                Ok(all) => {
                    text.push_str(all);
                    self.bytes.clear();
                    return;
                }
                Err(e) => {
                    let valid = e.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.bytes[..valid]));
                    let Some(bad) = e.error_len() else {
                        self.bytes.drain(..valid);
                        return;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.bytes.drain(..valid + bad);
                }
            }
        }
    }
}
