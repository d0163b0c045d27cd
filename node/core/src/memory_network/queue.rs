//! What is under way, in the order of arrival, and the one task that delivers it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use starling_protocol::NodeId;
use starling_protocol::wire::{Service, Topic};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};

use super::observe::MessageKind;
use super::{MemoryNetwork, Process, Reply, Slot, World};
use crate::transport::{FrameStream, Verdict};
use crate::watch::lock;

/// What happens at its time. `run` is that of the receiving process: what was sent to a former one is lost.
pub(super) enum Task {
    Call {
        id: u64,
        from: Slot,
        to: Slot,
        run: u64,
        service: Service,
        body: Bytes,
    },
    Answer {
        id: u64,
        from: Slot,
        to: Slot,
        service: Service,
        reply: Reply,
    },
    Gossip {
        from: Slot,
        to: Slot,
        run: u64,
        id: u64,
    },
    Stream {
        from: Slot,
        to: Slot,
        run: u64,
        stream: FrameStream,
    },
    Heartbeat {
        node: Slot,
        run: u64,
    },
    /// The connections over cut links have been silent for too long.
    GiveUpCut,
}

/// Tasks by time, and by order of sending where times are equal.
#[derive(Default)]
pub(super) struct Queue {
    /// When, in which order, and where among `tasks`: tasks are too long to be moved about in a heap.
    times: BinaryHeap<Reverse<(Instant, u64, usize)>>,
    tasks: Vec<Option<Task>>,
    free: Vec<usize>,
    pushed: u64,
    /// When the delivering task wakes; `None` until a task is pushed.
    wake_at: Option<Instant>,
    wake: Arc<Notify>,
    running: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("tasks", &self.times.len()).field("pushed", &self.pushed).finish()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.wake.notify_one(); // the delivering task finds its network gone
    }
}

impl Queue {
    pub(super) fn push(&mut self, at: Instant, task: Task) {
        self.pushed += 1;
        let place = self.free.pop().unwrap_or_else(|| {
            self.tasks.push(None);
            self.tasks.len() - 1
        });
        self.tasks[place] = Some(task);
        self.times.push(Reverse((at, self.pushed, place)));
        if self.wake_at.is_none_or(|w| at < w) {
            self.wake_at = Some(at);
            self.wake.notify_one();
        }
    }
    fn pop_due(&mut self, now: Instant) -> Option<Task> {
        let next = self.times.peek().map(|Reverse((at, _, place))| (*at, *place));
        let Some((_, place)) = next.filter(|(at, _)| *at <= now) else {
            self.wake_at = next.map(|(at, _)| at);
            return None;
        };
        self.times.pop();
        self.free.push(place);
        self.tasks[place].take()
    }
}

/// What is left to do once the world is unlocked.
enum Effect {
    Serve { process: Arc<Process>, id: u64, from: (Slot, NodeId), to: Slot, service: Service, body: Bytes },
    Reply(oneshot::Sender<Reply>, Reply),
    Gossip { process: Arc<Process>, from: (Slot, NodeId), to: Slot, id: u64, topic: Topic, body: Bytes },
    Stream { process: Arc<Process>, from: NodeId, stream: FrameStream },
    Close(Vec<(Slot, Slot)>),
}

impl World {
    fn effect_of(&mut self, task: Task) -> Option<Effect> {
        match task {
            Task::Call { id, from, to, run, service, body } => {
                if !self.arrives(from, to, Some(run), MessageKind::Call(service), body.len()) {
                    return None;
                }
                let process = self.node(to).process.clone()?;
                Some(Effect::Serve { process, id, from: (from, self.node(from).id), to, service, body })
            }
            Task::Answer { id, from, to, service, reply } => {
                let len = reply.as_ref().map_or(0, Bytes::len);
                if !self.arrives(from, to, None, MessageKind::Call(service), len) {
                    return None;
                }
                // The first answer counts; the caller may have given up.
                self.calls_open.remove(&id).map(|tx| Effect::Reply(tx, reply))
            }
            Task::Gossip { from, to, run, id } => {
                let (topic, body) = self.take_gossip(from, to, run, id)?;
                let process = self.node(to).process.clone()?;
                Some(Effect::Gossip { process, from: (from, self.node(from).id), to, id, topic, body })
            }
            Task::Stream { from, to, run, stream } => {
                if !self.arrives(from, to, Some(run), MessageKind::Stream, 0) {
                    return None;
                }
                let process = self.node(to).process.clone()?;
                Some(Effect::Stream { process, from: self.node(from).id, stream })
            }
            Task::Heartbeat { node, run } => {
                self.heartbeat(node, run);
                None
            }
            Task::GiveUpCut => Some(Effect::Close(self.cut_links())),
        }
    }
}

impl MemoryNetwork {
    /// Starts the delivering task, once. It ends with the network.
    pub(super) fn start_delivery(self: &Arc<Self>) {
        let wake = {
            let mut world = lock(&self.0);
            if std::mem::replace(&mut world.queue.running, true) {
                return;
            }
            world.queue.wake.clone()
        };
        let network = Arc::downgrade(self);
        // Every other task has a budget after which it seems to wait; this one would deliver late then.
        drop(tokio::spawn(tokio::task::unconstrained(deliver(network, wake))));
    }

    /// Delivers what is due. Returns when the next is.
    fn deliver_due(self: &Arc<Self>) -> Option<Instant> {
        let now = Instant::now();
        loop {
            let effect = {
                let mut world = lock(&self.0);
                world.queue.wake_at = Some(now); // whatever is pushed now is seen before this returns
                match world.queue.pop_due(now) {
                    Some(task) => world.effect_of(task),
                    None => return world.queue.wake_at,
                }
            };
            if let Some(effect) = effect {
                self.act(effect);
            }
        }
    }

    fn act(self: &Arc<Self>, effect: Effect) {
        match effect {
            Effect::Serve { process, id, from, to, service, body } => self.serve(&process, id, from, to, service, body),
            Effect::Reply(tx, reply) => drop(tx.send(reply)),
            Effect::Gossip { process, from: (sender, from), to, id, topic, body } => {
                let judge = || process.inbound.on_gossip(from, &topic, &body);
                let verdict = catch_unwind(AssertUnwindSafe(|| process.enter(judge)));
                if matches!(verdict, Ok(Verdict::Accept)) {
                    lock(&self.0).forward(to, sender, id);
                }
            }
            Effect::Stream { process, from, stream } => {
                let inbound = process.inbound.clone();
                process.spawn(async move { inbound.on_generate(from, stream).await });
            }
            Effect::Close(links) => links.into_iter().for_each(|(a, b)| self.close(a, b)),
        }
    }

    /// Runs the callee's handler. Most answer without waiting, and need no task of their own.
    fn serve(
        self: &Arc<Self>,
        process: &Arc<Process>,
        id: u64,
        (caller, from): (Slot, NodeId),
        to: Slot,
        service: Service,
        body: Bytes,
    ) {
        let inbound = process.inbound.clone();
        let mut handler = Box::pin(async move { inbound.on_call(from, service, body).await });
        let mut context = Context::from_waker(Waker::noop());
        let first = || process.enter(|| handler.as_mut().poll(&mut context));
        match catch_unwind(AssertUnwindSafe(first)) {
            Ok(Poll::Ready(reply)) => lock(&self.0).answer(id, to, caller, service, reply),
            Ok(Poll::Pending) => {
                let network = self.clone();
                process.spawn(async move {
                    let reply = handler.await;
                    lock(&network.0).answer(id, to, caller, service, reply);
                });
            }
            Err(_panic) => {} // reported by the panic hook; to the caller it is silence, as from a crashed task
        }
    }
}

async fn deliver(network: Weak<MemoryNetwork>, wake: Arc<Notify>) {
    loop {
        let next = match network.upgrade() {
            Some(network) => network.deliver_due(),
            None => return,
        };
        match next {
            Some(at) => tokio::select! {
                biased;
                () = wake.notified() => {}
                () = sleep_until(at) => {}
            },
            None => wake.notified().await,
        }
    }
}
