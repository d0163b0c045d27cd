//! End-to-end tests: a mesh of real `starling` processes on loopback, driven through its binary and its HTTP.
//!
//! [`TestMesh`] starts nodes, kills them with SIGKILL, starts them again on the same folder and reads their stores
//! after the end. What a test waits for has a deadline ([`until`]); what it draws comes from one printed seed
//! ([`Seed`]). A mesh that is dropped before [`TestMesh::passed`] prints the seed, the folder with the logs and their
//! last lines, and keeps the folder.
//!
//! Nodes die with the thread that started them (`PR_SET_PDEATHSIG`), so that an aborted test run leaves none behind:
//! use `#[tokio::test]` as it is, whose runtime stays on the test's own thread.
//!
//! | variable | |
//! |---|---|
//! | `STARLING_TEST_BIN` | folder of the built binaries; default: the folder above the test's own |
//! | `STARLING_TEST_PYTHON` | a Python with `examples/agents/python/requirements.txt` installed |
//! | `STARLING_TEST_PYTHON_ANTHROPIC` | a Python with `tests/python/requirements-anthropic.txt` installed |
//! | `TEST_SEED` | the seed of an earlier run |
//! | `STARLING_TEST_PATIENCE` | deadlines times this number, for a machine that does other work too |

mod audit;
mod binaries;
mod job;
mod mesh;
mod network;
mod node;
mod proxy;
mod seed;
mod wait;

pub use audit::StoresReport;
pub use binaries::{agent_binary, python, python_anthropic, repository, starling_binary};
pub use job::Job;
pub use mesh::TestMesh;
pub use network::{Network, Space};
pub use node::{CliOutput, Role, TestNode, starling, starling_in};
pub use seed::Seed;
pub use wait::{patience, until};

/// The name of the model that the binary carries.
pub const MODEL: &str = "starling-byte";
