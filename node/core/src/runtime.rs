//! The runtime that the node's logic and openraft run on: tokio, but with a seeded generator and an ordered watch
//! channel, so that a simulated cluster replays from its seed; and a scope that names a simulated node's tasks, so
//! that it can crash.
//!
//! Inside a [`NodeScope`] everything runs on the one thread of the simulation: a thread pool has an order of its own.

use std::convert::Infallible;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use openraft::{AsyncRuntime, OptionalSend};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::task::{AbortHandle, JoinHandle};

use crate::watch::{FifoWatch, lock};

type Tokio = openraft::TokioRuntime;

tokio::task_local! {
    static SCOPE: NodeScope;
}

/// A simulated node: its generator, and every task that was spawned on its behalf.
///
/// Tasks inherit the scope when they are spawned by [`spawn`] or by openraft from inside it. Production code
/// runs outside any scope; there randomness comes from the operating system.
#[derive(Clone, Debug)]
pub struct NodeScope(Arc<ScopeInner>);

#[derive(Debug)]
struct ScopeInner {
    rng: Mutex<ChaCha8Rng>,
    tasks: Mutex<Vec<AbortHandle>>,
    crashed: AtomicBool,
    /// How much longer every [`blocking`] takes, microseconds.
    blocking_delay_us: AtomicU64,
}

impl NodeScope {
    /// A scope whose draws follow from `seed`. Give each node its own: then one node's extra draw moves no other.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(ScopeInner {
            rng: Mutex::new(ChaCha8Rng::seed_from_u64(seed)),
            tasks: Mutex::new(Vec::new()),
            crashed: AtomicBool::new(false),
            blocking_delay_us: AtomicU64::new(0),
        }))
    }
    /// The scope of the running task.
    #[must_use]
    pub fn current() -> Option<Self> {
        SCOPE.try_with(Clone::clone).ok()
    }
    /// Runs `future` inside the scope.
    pub async fn run<F: Future>(&self, future: F) -> F::Output {
        SCOPE.scope(self.clone(), future).await
    }
    /// Runs `work` inside the scope, at once.
    pub fn enter<T>(&self, work: impl FnOnce() -> T) -> T {
        SCOPE.sync_scope(self.clone(), work)
    }
    /// Spawns `future` inside the scope. After [`NodeScope::crash`] it never runs.
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let handle = tokio::spawn(SCOPE.scope(self.clone(), future));
        if self.0.crashed.load(Ordering::Acquire) {
            handle.abort();
        }
        let mut tasks = lock(&self.0.tasks);
        if tasks.len() == tasks.capacity() {
            tasks.retain(|t| !t.is_finished()); // amortised: the list at most doubles between two sweeps
        }
        tasks.push(handle.abort_handle());
        handle
    }
    /// Ends every task of the node where it stands, as `kill -9` would. Returns how many were alive.
    pub fn crash(&self) -> usize {
        self.0.crashed.store(true, Ordering::Release);
        let tasks = std::mem::take(&mut *lock(&self.0.tasks));
        let alive = tasks.iter().filter(|t| !t.is_finished()).count();
        tasks.iter().for_each(AbortHandle::abort);
        alive
    }
    /// Makes every [`blocking`] take this much longer from now on: a slow disk.
    pub fn delay_blocking(&self, by: Duration) {
        self.0.blocking_delay_us.store(u64::try_from(by.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
    /// Draws from the node's generator.
    #[must_use]
    pub fn draw(&self) -> u64 {
        lock(&self.0.rng).next_u64()
    }
}

/// Spawns `future` in the scope of the running task, or plainly outside of any.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    match NodeScope::current() {
        Some(scope) => scope.spawn(future),
        None => tokio::spawn(future),
    }
}

/// Runs `work`, which may wait for the disk or compute for long, where that disturbs nobody: on a blocking thread, and
/// in a simulated node at once.
///
/// # Errors
/// [`Stopped`] when the runtime ends before `work` began.
///
/// # Panics
/// When `work` does.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Stopped> {
    if let Some(scope) = NodeScope::current() {
        let delay = scope.0.blocking_delay_us.load(Ordering::Relaxed);
        if delay > 0 {
            tokio::time::sleep(Duration::from_micros(delay)).await;
        }
        return Ok(work());
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
        Err(_cancelled) => Err(Stopped),
    }
}

/// The runtime ended: the node is shutting down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node is shutting down")]
pub struct Stopped;

/// Draws from the node's scope; outside of any, from the operating system's entropy.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScopedRng;

impl rand::TryRng for ScopedRng {
    type Error = Infallible;
    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        self.try_next_u64().map(|n| u32::try_from(n >> 32).unwrap_or_default())
    }
    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(SCOPE.try_with(NodeScope::draw).unwrap_or_else(|_| rand::rng().next_u64()))
    }
    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Infallible> {
        for chunk in out.chunks_mut(8) {
            let bytes = self.try_next_u64()?.to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
        Ok(())
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct ScopedRuntime;

impl AsyncRuntime for ScopedRuntime {
    type JoinError = <Tokio as AsyncRuntime>::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = <Tokio as AsyncRuntime>::JoinHandle<T>;
    type Sleep = <Tokio as AsyncRuntime>::Sleep;
    type Instant = <Tokio as AsyncRuntime>::Instant;
    type TimeoutError = <Tokio as AsyncRuntime>::TimeoutError;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = <Tokio as AsyncRuntime>::Timeout<R, T>;
    type ThreadLocalRng = ScopedRng;
    type Mpsc = <Tokio as AsyncRuntime>::Mpsc;
    type Oneshot = <Tokio as AsyncRuntime>::Oneshot;
    type Mutex<T: OptionalSend + 'static> = <Tokio as AsyncRuntime>::Mutex<T>;
    type Watch = FifoWatch;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        spawn(future)
    }
    fn sleep(duration: Duration) -> Self::Sleep {
        Tokio::sleep(duration)
    }
    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        Tokio::sleep_until(deadline)
    }
    fn timeout<R, F: Future<Output = R> + OptionalSend>(duration: Duration, future: F) -> Self::Timeout<R, F> {
        Tokio::timeout(duration, future)
    }
    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(deadline: Self::Instant, future: F) -> Self::Timeout<R, F> {
        Tokio::timeout_at(deadline, future)
    }
    fn is_panic(error: &Self::JoinError) -> bool {
        Tokio::is_panic(error)
    }
    fn thread_rng() -> ScopedRng {
        ScopedRng
    }
    fn new(_threads: usize) -> Self {
        Self
    }
    fn block_on<F: Future<Output = T>, T>(&mut self, future: F) -> T {
        tokio::runtime::Handle::current().block_on(future)
    }
}
