//! A response as events: every item is announced, filled and closed, and all events are numbered.

use super::response::{Ids, Shape, call_item, message_item, status, text_part};
use super::store::After;
use crate::answer::Block;
use crate::api::ApiError;
use crate::api::sse::{Renderer, event};
use crate::call::Calls;
use serde_json::{Value, json};

pub(super) struct ResponseStream {
    shape: Shape,
    after: Option<After>,
    ids: Ids,
    sequence: u64,
    /// Items that are closed.
    closed: usize,
    /// Bytes sent of the text item behind those, if it is open.
    open: Option<usize>,
}

impl ResponseStream {
    pub(super) fn new(shape: Shape, after: After) -> Self {
        Self { shape, after: Some(after), ids: Ids::default(), sequence: 0, closed: 0, open: None }
    }

    /// Sends an event with its name and number.
    fn send(&mut self, name: &str, mut body: Value, out: &mut Vec<u8>) {
        body["type"] = name.into();
        body["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        event(out, name, &body);
    }

    fn open_text(&mut self, out: &mut Vec<u8>) {
        let (index, id) = (self.closed, self.ids.get(self.closed, "msg_"));
        let item = message_item(&id, None, "in_progress");
        self.send("response.output_item.added", json!({ "output_index": index, "item": item }), out);
        let part = json!({ "item_id": id, "output_index": index, "content_index": 0, "part": text_part("") });
        self.send("response.content_part.added", part, out);
        self.open = Some(0);
    }

    /// What the open text gained.
    fn grow_text(&mut self, text: &str, out: &mut Vec<u8>) {
        let sent = self.open.unwrap_or(0);
        if text.len() > sent {
            let (index, id) = (self.closed, self.ids.get(self.closed, "msg_"));
            let delta = &text[sent..];
            let body = json!({
                "item_id": id, "output_index": index, "content_index": 0, "delta": delta, "logprobs": [],
            });
            self.send("response.output_text.delta", body, out);
            self.open = Some(text.len());
        }
    }

    fn close_text(&mut self, text: &str, status: &str, out: &mut Vec<u8>) {
        let (index, id) = (self.closed, self.ids.get(self.closed, "msg_"));
        let body = json!({ "item_id": id, "output_index": index, "content_index": 0, "text": text, "logprobs": [] });
        self.send("response.output_text.done", body, out);
        let body = json!({ "item_id": id, "output_index": index, "content_index": 0, "part": text_part(text) });
        self.send("response.content_part.done", body, out);
        let item = message_item(&id, Some(text), status);
        self.send("response.output_item.done", json!({ "output_index": index, "item": item }), out);
        self.open = None;
        self.closed += 1;
    }

    fn whole_call(&mut self, call_id: &str, name: &str, arguments: &str, out: &mut Vec<u8>) {
        let (index, id) = (self.closed, self.ids.get(self.closed, "fc_"));
        let item = call_item(&id, call_id, name, "", "in_progress");
        self.send("response.output_item.added", json!({ "output_index": index, "item": item }), out);
        let body = json!({ "item_id": id, "output_index": index, "delta": arguments });
        self.send("response.function_call_arguments.delta", body, out);
        let body = json!({ "item_id": id, "output_index": index, "name": name, "arguments": arguments });
        self.send("response.function_call_arguments.done", body, out);
        let item = call_item(&id, call_id, name, arguments, "completed");
        self.send("response.output_item.done", json!({ "output_index": index, "item": item }), out);
        self.closed += 1;
    }
}

impl Renderer for ResponseStream {
    fn begin(&mut self, _: &Calls, out: &mut Vec<u8>) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.shape.in_progress();
            self.send(name, json!({ "response": response }), out);
        }
    }

    fn more(&mut self, calls: &mut Calls, out: &mut Vec<u8>) {
        let (_, answer) = calls.single();
        while let Some(block) = answer.blocks.get(self.closed) {
            match block {
                Block::Text(text) => {
                    if self.open.is_none() {
                        self.open_text(out);
                    }
                    self.grow_text(text, out);
                    // A text at the end may still grow.
                    if self.closed + 1 == answer.blocks.len() {
                        return;
                    }
                    self.close_text(text, "completed", out);
                }
                Block::Call { id, call } => self.whole_call(id, &call.name, &call.arguments, out),
            }
        }
    }

    fn finish(&mut self, calls: &mut Calls, out: &mut Vec<u8>) {
        let (_, answer) = calls.single();
        if answer.blocks.is_empty() {
            self.open_text(out);
        }
        if self.open.is_some() {
            let text = match answer.blocks.last() {
                Some(Block::Text(text)) => text.as_str(),
                _ => "",
            };
            self.close_text(text, status(answer), out);
        }
        // Before the last event: whoever has read it may go on from this response.
        if let Some(after) = self.after.take() {
            after.keep(answer);
        }
        let response = self.shape.complete(calls, &self.ids);
        let name = if response["status"] == "incomplete" { "response.incomplete" } else { "response.completed" };
        self.send(name, json!({ "response": response }), out);
    }

    fn fail(&mut self, calls: &Calls, error: &ApiError, out: &mut Vec<u8>) {
        let response = self.shape.failed(calls, &self.ids, error);
        self.send("response.failed", json!({ "response": response }), out);
    }
}
