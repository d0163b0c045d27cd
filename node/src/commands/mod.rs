//! What each command of the command line does. Those that ask a running node do it over its admin routes.

pub mod checkpoint;
pub mod client;
pub mod group;
pub mod job;
pub mod node;
pub mod rollout;
pub mod sim;
pub mod status;
pub mod store;
