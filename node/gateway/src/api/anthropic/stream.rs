//! A message as events: each content block is started, filled and stopped.

use super::error;
use super::response::{Message, Usage, no_input, stop, text_block, tool_use_block};
use crate::answer::Block;
use crate::api::ApiError;
use crate::api::sse::{Renderer, event};
use crate::call::Calls;
use serde_json::json;

pub(super) struct MessageStream {
    id: String,
    request_id: String,
    /// Blocks that are stopped.
    stopped: usize,
    /// Bytes sent of the text block behind those, if it is started.
    open: Option<usize>,
}

impl MessageStream {
    pub(super) fn new(id: String, request_id: String) -> Self {
        Self { id, request_id, stopped: 0, open: None }
    }

    fn start(&self, block: &super::response::ContentBlock<'_>, out: &mut Vec<u8>) {
        let body = json!({ "type": "content_block_start", "index": self.stopped, "content_block": block });
        event(out, "content_block_start", &body);
    }

    fn stop(&mut self, out: &mut Vec<u8>) {
        event(out, "content_block_stop", &json!({ "type": "content_block_stop", "index": self.stopped }));
        self.stopped += 1;
        self.open = None;
    }

    fn delta(&self, delta: serde_json::Value, out: &mut Vec<u8>) {
        let body = json!({ "type": "content_block_delta", "index": self.stopped, "delta": delta });
        event(out, "content_block_delta", &body);
    }
}

fn ping(out: &mut Vec<u8>) {
    event(out, "ping", &json!({ "type": "ping" }));
}

impl Renderer for MessageStream {
    fn begin(&mut self, calls: &Calls, out: &mut Vec<u8>) {
        let (call, _) = calls.single();
        let message = Message {
            id: &self.id,
            kind: "message",
            role: "assistant",
            model: call.model.as_str(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: Usage::of(calls),
        };
        event(out, "message_start", &json!({ "type": "message_start", "message": message }));
        ping(out);
    }

    fn more(&mut self, calls: &mut Calls, out: &mut Vec<u8>) {
        let (_, answer) = calls.single();
        while let Some(block) = answer.blocks.get(self.stopped) {
            match block {
                Block::Text(text) => {
                    if self.open.is_none() {
                        self.start(&text_block(""), out);
                    }
                    let sent = self.open.unwrap_or(0);
                    if text.len() > sent {
                        self.delta(json!({ "type": "text_delta", "text": &text[sent..] }), out);
                    }
                    self.open = Some(text.len());
                    // A text at the end may still grow.
                    if self.stopped + 1 == answer.blocks.len() {
                        return;
                    }
                }
                Block::Call { id, call } => {
                    self.start(&tool_use_block(id, &call.name, no_input()), out);
                    self.delta(json!({ "type": "input_json_delta", "partial_json": call.arguments }), out);
                }
            }
            self.stop(out);
        }
    }

    fn finish(&mut self, calls: &mut Calls, out: &mut Vec<u8>) {
        if self.open.is_some() {
            self.stop(out);
        }
        let (call, answer) = calls.single();
        let (stop_reason, stop_sequence) = stop(call, answer);
        let body = json!({
            "type": "message_delta",
            "delta": { "stop_reason": stop_reason, "stop_sequence": stop_sequence },
            "usage": Usage::of(calls),
        });
        event(out, "message_delta", &body);
        event(out, "message_stop", &json!({ "type": "message_stop" }));
    }

    fn fail(&mut self, _: &Calls, error: &ApiError, out: &mut Vec<u8>) {
        event(out, "error", &error::body(error, &self.request_id));
    }

    fn heartbeat(&mut self, out: &mut Vec<u8>) {
        ping(out);
    }
}
