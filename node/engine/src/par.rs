//! Thread pools of our own with a niceness, and loops that use the pool they run in.
//!
//! Rayon's global pool is never touched: outside a pool, and inside [`serial`], every loop runs on the caller.

use std::cell::Cell;

use rayon::prelude::*;

thread_local! {
    static SERIAL: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with every loop of this module on the calling thread: for work that is already split by sequence.
pub(crate) fn serial<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            SERIAL.with(|s| s.set(self.0));
        }
    }
    let _restore = Restore(SERIAL.with(|s| s.replace(true)));
    f()
}

/// Threads that a loop started here would use.
pub(crate) fn workers() -> usize {
    if SERIAL.with(Cell::get) || rayon::current_thread_index().is_none() { 1 } else { rayon::current_num_threads() }
}

/// Calls `f` for each index below `tasks`, in parallel if the caller runs in a pool.
pub(crate) fn for_each(tasks: usize, f: impl Fn(usize) + Sync + Send) {
    if tasks <= 1 || workers() == 1 {
        (0..tasks).for_each(f);
    } else {
        (0..tasks).into_par_iter().with_max_len(1).for_each(f);
    }
}

/// Calls `f(index, chunk)` for consecutive chunks of `chunk_len` elements.
pub(crate) fn chunks_mut<T: Send>(data: &mut [T], chunk_len: usize, f: impl Fn(usize, &mut [T]) + Sync + Send) {
    let chunk_len = chunk_len.max(1);
    if data.len() <= chunk_len || workers() == 1 {
        data.chunks_mut(chunk_len).enumerate().for_each(|(i, c)| f(i, c));
    } else {
        data.par_chunks_mut(chunk_len).enumerate().with_max_len(1).for_each(|(i, c)| f(i, c));
    }
}

/// Rows per chunk that give each worker about four chunks.
pub(crate) fn rows_per_chunk(rows: usize) -> usize {
    let workers = workers();
    if workers == 1 { rows.max(1) } else { rows.div_ceil(workers * 4).max(1) }
}

/// A pool of `threads` threads named `name-<i>`, each at niceness `nice`.
///
/// # Errors
/// The operating system refused a thread.
pub(crate) fn pool(
    threads: usize,
    nice: i32,
    name: &'static str,
) -> Result<rayon::ThreadPool, rayon::ThreadPoolBuildError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .thread_name(move |i| format!("{name}-{i}"))
        .start_handler(move |_| set_nice(nice))
        .build()
}

/// Lowers the scheduling priority of the calling thread, so that heartbeats of the same process go first.
pub(crate) fn set_nice(nice: i32) {
    #[cfg(target_os = "linux")]
    if nice > 0 {
        // SAFETY: setpriority takes plain integers; on Linux (PRIO_PROCESS, 0) means the calling thread.
        let rc = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice.min(19)) };
        if rc != 0 {
            tracing::warn!(nice, error = %std::io::Error::last_os_error(), "thread priority not changed");
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = nice;
}
