//! What `previous_response_id` goes on from: conversations, in memory, bounded, in an episode or behind a key.

use crate::answer::Answer;
use crate::episode::Episode;
use crate::gateway::Inner;
use crate::request::{Message, MessageCall, Role, parse_arguments};
use starling_protocol::Hash;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

/// Most conversations, however short.
const RESPONSES_MAX: usize = 4096;

type Key = (Hash, String);

/// The newest conversations, up to a number of bytes. The newest one is kept whatever its length.
#[derive(Debug, Default)]
pub(crate) struct ResponseStore {
    by_id: HashMap<Key, (Arc<Vec<Message<'static>>>, usize)>,
    oldest_first: VecDeque<Key>,
    len_bytes: usize,
}

impl ResponseStore {
    fn get(&self, key: &Key) -> Option<Arc<Vec<Message<'static>>>> {
        self.by_id.get(key).map(|(messages, _)| Arc::clone(messages))
    }

    fn put(&mut self, key: Key, messages: Vec<Message<'static>>, len_bytes_max: usize) {
        let len = messages.iter().map(len_bytes).sum();
        self.len_bytes += len;
        self.oldest_first.push_back(key.clone());
        self.by_id.insert(key, (Arc::new(messages), len));
        while self.by_id.len() > 1 && (self.len_bytes > len_bytes_max || self.by_id.len() > RESPONSES_MAX) {
            let Some(oldest) = self.oldest_first.pop_front() else { break };
            if let Some((_, len)) = self.by_id.remove(&oldest) {
                self.len_bytes -= len;
            }
        }
    }
}

/// What a message takes, about.
fn len_bytes(message: &Message<'_>) -> usize {
    let call = |c: &MessageCall<'_>| c.name.len() + c.arguments.to_string().len() + 128;
    let calls: usize = message.calls.iter().map(call).sum();
    message.text.len() + calls + 128
}

/// Whose responses: those of an episode, or those that came with the same key outside an episode.
pub(super) enum Shelf {
    Episode(Arc<Inner>, Arc<Episode>),
    Open(Arc<Inner>, Hash),
}

impl Shelf {
    pub(super) fn get(&self, id: &str) -> Option<Arc<Vec<Message<'static>>>> {
        match self {
            Self::Episode(_, episode) => episode.state().responses.get(&(Hash::default(), id.to_owned())),
            Self::Open(inner, scope) => {
                let store = inner.responses.lock().unwrap_or_else(PoisonError::into_inner);
                store.get(&(*scope, id.to_owned()))
            }
        }
    }

    fn put(&self, id: String, messages: Vec<Message<'static>>) {
        match self {
            Self::Episode(inner, episode) => {
                let max = inner.config.responses_len_bytes_max;
                episode.state().responses.put((Hash::default(), id), messages, max);
            }
            Self::Open(inner, scope) => {
                let mut store = inner.responses.lock().unwrap_or_else(PoisonError::into_inner);
                store.put((*scope, id), messages, inner.config.responses_len_bytes_max);
            }
        }
    }
}

/// What is to be done when the answer is complete.
pub(super) struct After {
    pub(super) shelf: Shelf,
    /// What was asked, without instructions; `None` if nothing is to be kept.
    pub(super) conversation: Option<Vec<Message<'static>>>,
    pub(super) id: String,
}

impl After {
    /// Keeps the conversation with its answer.
    pub(super) fn keep(self, answer: &Answer) {
        let Some(mut messages) = self.conversation else { return };
        let calls = answer.calls().map(|(id, call)| MessageCall {
            id: Some(id.to_owned().into()),
            name: call.name.clone().into(),
            arguments: parse_arguments(&call.arguments),
        });
        let calls = calls.collect();
        messages.push(Message { calls, ..Message::new(Role::Assistant, answer.text().into_owned()) });
        self.shelf.put(self.id, messages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        (Hash::default(), name.to_owned())
    }

    #[test]
    fn the_oldest_conversations_make_room_and_the_newest_always_stays() {
        let mut store = ResponseStore::default();
        let one = |text: String| vec![Message::new(Role::User, text)];
        for i in 0..10 {
            store.put(key(&i.to_string()), one("x".repeat(100)), 1000);
        }
        let kept: Vec<bool> = (0..10).map(|i| store.get(&key(&i.to_string())).is_some()).collect();
        // 100 bytes and 128 for the message: four fit into 1000.
        assert_eq!(kept, [false, false, false, false, false, false, true, true, true, true]);
        assert_eq!(store.len_bytes, 4 * 228);
        store.put(key("long"), one("x".repeat(5000)), 1000);
        assert!(store.get(&key("long")).is_some() && store.get(&key("9")).is_none());
        assert_eq!((store.by_id.len(), store.oldest_first.len()), (1, 1));
        assert!(store.get(&(Hash::of(b"another"), "long".to_owned())).is_none());
    }
}
