//! A watch channel that wakes its waiters in the order in which they came.
//!
//! `tokio::sync::watch` spreads its waiters over buckets with a generator seeded by the operating system, which
//! would make simulated runs differ. This one has no such source, and otherwise means the same: one value, and
//! receivers that learn that it changed.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::task::{Poll, Waker};

use openraft::async_runtime::watch::{RecvError, SendError};
use openraft::{OptionalSend, OptionalSync};

/// Locks `mutex`. No lock of this module is held while foreign code runs, so poison says nothing.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Channel<T> {
    value: RwLock<T>,
    state: Mutex<ChannelState>,
}

struct ChannelState {
    version: u64,
    wakers: Vec<Waker>,
    senders: usize,
    receivers: usize,
}

impl<T> Channel<T> {
    fn read(&self) -> RwLockReadGuard<'_, T> {
        self.value.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn bump(&self) {
        let wakers = {
            let mut state = lock(&self.state);
            state.version += 1;
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Sending half; clones send to the same receivers.
pub struct Sender<T>(Arc<Channel<T>>);

/// Receiving half.
pub struct Receiver<T> {
    channel: Arc<Channel<T>>,
    seen: u64,
}

/// The sender is gone: the value never changes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the watched value has no sender any more")]
pub struct Closed;

/// A channel that holds `value`.
pub fn channel<T>(value: T) -> (Sender<T>, Receiver<T>) {
    let state = ChannelState { version: 0, wakers: Vec::new(), senders: 1, receivers: 1 };
    let channel = Arc::new(Channel { value: RwLock::new(value), state: Mutex::new(state) });
    (Sender(channel.clone()), Receiver { channel, seen: 0 })
}

impl<T> Sender<T> {
    /// Replaces the value, whether or not anyone listens.
    pub fn replace(&self, value: T) {
        *self.0.value.write().unwrap_or_else(PoisonError::into_inner) = value;
        self.0.bump();
    }
    /// Changes the value in place; receivers learn of it when `modify` returns true.
    pub fn modify(&self, modify: impl FnOnce(&mut T) -> bool) -> bool {
        let changed = modify(&mut self.0.value.write().unwrap_or_else(PoisonError::into_inner));
        if changed {
            self.0.bump();
        }
        changed
    }
    /// The value now.
    #[must_use]
    pub fn get(&self) -> T
    where
        T: Clone,
    {
        self.0.read().clone()
    }
    /// A receiver that has seen the value as it is now.
    #[must_use]
    pub fn receiver(&self) -> Receiver<T> {
        let mut state = lock(&self.0.state);
        state.receivers += 1;
        Receiver { channel: self.0.clone(), seen: state.version }
    }
}

impl<T> Receiver<T> {
    /// The value now; does not mark it as seen.
    #[must_use]
    pub fn get(&self) -> T
    where
        T: Clone,
    {
        self.channel.read().clone()
    }
    /// The value now, not marked as seen. Sending waits while the borrow lives: do not keep it.
    #[must_use]
    pub fn borrow(&self) -> Borrowed<'_, T> {
        Borrowed(self.channel.read())
    }
    /// The value now, marked as seen. Sending waits while the borrow lives: do not keep it.
    #[must_use]
    pub fn borrow_and_update(&mut self) -> Borrowed<'_, T> {
        let guard = self.channel.read();
        self.seen = lock(&self.channel.state).version;
        Borrowed(guard)
    }
    /// Waits until the value was replaced since it was last seen, and marks it as seen. Cancel-safe.
    ///
    /// # Errors
    /// [`Closed`] when no sender is left.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        poll_fn(|cx| {
            let mut state = lock(&self.channel.state);
            if state.version != self.seen {
                self.seen = state.version;
                return Poll::Ready(Ok(()));
            }
            if state.senders == 0 {
                return Poll::Ready(Err(Closed));
            }
            if !state.wakers.iter().any(|w| w.will_wake(cx.waker())) {
                state.wakers.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await
    }
    /// Waits until the value satisfies `wanted`, and returns it. Cancel-safe.
    ///
    /// # Errors
    /// [`Closed`] when no sender is left and the last value does not satisfy it.
    pub async fn wait_for(&mut self, mut wanted: impl FnMut(&T) -> bool) -> Result<T, Closed>
    where
        T: Clone,
    {
        loop {
            let value = self.get();
            if wanted(&value) {
                return Ok(value);
            }
            self.changed().await?;
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        lock(&self.0.state).senders += 1;
        Self(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let wakers = {
            let mut state = lock(&self.0.state);
            state.senders -= 1;
            if state.senders > 0 {
                return;
            }
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        lock(&self.channel.state).receivers += 1;
        Self { channel: self.channel.clone(), seen: self.seen }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        lock(&self.channel.state).receivers -= 1;
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("watch::Sender")
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("watch::Receiver")
    }
}

/// The channel as openraft wants it.
#[derive(Debug)]
pub struct FifoWatch;

/// A borrowed value; sending waits while it lives.
#[derive(Debug)]
pub struct Borrowed<'a, T>(RwLockReadGuard<'a, T>);

impl<T> std::ops::Deref for Borrowed<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl openraft::async_runtime::Watch for FifoWatch {
    type Sender<T: OptionalSend + OptionalSync> = Sender<T>;
    type Receiver<T: OptionalSend + OptionalSync> = Receiver<T>;
    type Ref<'a, T: OptionalSend + 'a> = Borrowed<'a, T>;

    fn channel<T: OptionalSend + OptionalSync>(init: T) -> (Self::Sender<T>, Self::Receiver<T>) {
        channel(init)
    }
}

impl<T: OptionalSend + OptionalSync> openraft::async_runtime::WatchSender<FifoWatch, T> for Sender<T> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        if lock(&self.0.state).receivers == 0 {
            return Err(SendError(value));
        }
        self.replace(value);
        Ok(())
    }
    fn send_if_modified<F: FnOnce(&mut T) -> bool>(&self, modify: F) -> bool {
        self.modify(modify)
    }
    fn borrow_watched(&self) -> Borrowed<'_, T> {
        Borrowed(self.0.read())
    }
    fn subscribe(&self) -> Receiver<T> {
        self.receiver()
    }
}

impl<T: OptionalSend + OptionalSync> openraft::async_runtime::WatchReceiver<FifoWatch, T> for Receiver<T> {
    async fn changed(&mut self) -> Result<(), RecvError> {
        Self::changed(self).await.map_err(|Closed| RecvError(()))
    }
    fn borrow_watched(&self) -> Borrowed<'_, T> {
        self.borrow()
    }
    fn borrow_and_update(&mut self) -> Borrowed<'_, T> {
        Self::borrow_and_update(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test]
    async fn waiters_wake_in_the_order_in_which_they_came() {
        let (tx, rx) = channel(0_u32);
        let turn = Arc::new(AtomicUsize::new(0));
        let tasks: Vec<_> = (0..32)
            .map(|i| {
                let (mut rx, turn) = (rx.clone(), turn.clone());
                tokio::spawn(async move {
                    rx.changed().await.unwrap();
                    assert_eq!(turn.fetch_add(1, Ordering::SeqCst), i);
                })
            })
            .collect();
        tokio::task::yield_now().await;
        tx.replace(1);
        for task in tasks {
            task.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_receiver_learns_that_the_last_sender_is_gone() {
        let (tx, mut rx) = channel(1);
        let other = tx.clone();
        drop(tx);
        other.replace(2);
        assert_eq!(rx.changed().await, Ok(()));
        drop(other);
        assert_eq!(rx.changed().await, Err(Closed));
        assert_eq!(rx.get(), 2);
    }
}
