//! The node's logic above the wire: membership, Raft groups, rollouts, weights, the optimizer leader's loop.
//!
//! It sees the network as a [`transport::Transport`], the disk as a `starling_storage::Store`, and time as
//! tokio's clock, so that the same code runs in a node and in the simulator.

pub mod transport;
