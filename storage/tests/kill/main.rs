//! What a store is after its process was killed, and after its files were damaged, is compared key by key with the
//! memory twin, which went through the same operations in peace.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod damage;
mod operations;
mod sigkill;
mod twin;
