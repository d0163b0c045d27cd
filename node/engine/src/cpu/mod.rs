//! The Llama model on the CPU in plain slices: packed weights, forward with saved activations, backward.
//!
//! candle's autograd is not used here: its elementwise operators run on a process-wide pool whose threads spin at
//! normal priority, and they take more time than the products of a small model.

pub(crate) mod adapters;
pub(crate) mod backward;
pub(crate) mod forward;
pub(crate) mod model;

pub(crate) use model::CpuModel;
