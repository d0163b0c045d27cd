//! The node's folder: identity, store, admin token, and where the running node is reached.

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use starling_protocol::{Hash, NodeId};
use std::path::{Path, PathBuf};

/// The folder's layout.
#[derive(Debug, Clone)]
pub struct DataDir(PathBuf);

/// `node.json`: written by the running node, read by the command line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Running {
    /// Process.
    pub pid: u32,
    /// The node.
    pub node: NodeId,
    /// `http://address:port`.
    pub http: String,
    /// Where peers dial it.
    pub addresses: Vec<String>,
}

/// `mesh.json`: which mesh the node belongs to and whom it knows there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MeshFile {
    /// The mesh.
    pub network: Hash,
    /// Nodes to knock at, from the ticket and from earlier runs.
    pub nodes: Vec<(NodeId, Vec<String>)>,
}

impl DataDir {
    /// The folder asked for, or `~/.starling`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn open(asked: Option<&Path>) -> anyhow::Result<Self> {
        let path = match asked {
            Some(p) => p.to_owned(),
            None => match std::env::var_os("HOME") {
                Some(home) => PathBuf::from(home).join(".starling"),
                None => bail!("--data: expected a folder, and HOME is not set to find a default"),
            },
        };
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The RocksDB folder.
    #[must_use]
    pub fn store(&self) -> PathBuf {
        self.0.join("store")
    }

    /// The admin token, made on first use; readable by the owner only.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn admin_token(&self) -> anyhow::Result<String> {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.0.join("admin.token");
        if let Ok(token) = std::fs::read_to_string(&path) {
            return Ok(token.trim().to_owned());
        }
        let token = format!("st-{}", hex::encode(rand::random::<[u8; 24]>()));
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        file.write_all(token.as_bytes())?;
        Ok(token)
    }

    /// What the running node wrote.
    ///
    /// # Errors
    /// When no node runs on this folder.
    pub fn running(&self) -> anyhow::Result<Running> {
        let path = self.0.join("node.json");
        let text = std::fs::read_to_string(&path).with_context(|| {
            format!("no node runs on {} (start one with `starling node run` or `starling join`)", self.0.display())
        })?;
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// Tells the command line where the node is reached.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_running(&self, running: &Running) -> anyhow::Result<()> {
        self.write_json("node.json", running)
    }

    /// The node has ended.
    pub fn clear_running(&self) {
        let _ = std::fs::remove_file(self.0.join("node.json"));
    }

    /// The mesh of earlier runs, if any.
    ///
    /// # Errors
    /// When the file is damaged.
    pub fn mesh(&self) -> anyhow::Result<Option<MeshFile>> {
        let path = self.0.join("mesh.json");
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                Ok(Some(serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))?))
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Remembers the mesh.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_mesh(&self, mesh: &MeshFile) -> anyhow::Result<()> {
        self.write_json("mesh.json", mesh)
    }

    /// Where the node listened in its last run, as multiaddrs; empty when it is not known. A file that makes no sense
    /// is of no use and no reason not to start.
    #[must_use]
    pub fn listened(&self) -> Vec<String> {
        let path = self.0.join("listen.json");
        let Ok(text) = std::fs::read_to_string(&path) else { return Vec::new() };
        serde_json::from_str(&text).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "not read: this node listens on new ports");
            Vec::new()
        })
    }

    /// Remembers where the node listens.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_listened(&self, addresses: &[String]) -> anyhow::Result<()> {
        self.write_json("listen.json", &addresses)
    }

    /// Whole or not at all: a crash in the middle leaves the old file.
    fn write_json(&self, name: &str, value: &impl Serialize) -> anyhow::Result<()> {
        let (tmp, path) = (self.0.join(format!("{name}.tmp")), self.0.join(name));
        let text = serde_json::to_string_pretty(value)?;
        std::fs::write(&tmp, text).with_context(|| format!("cannot write {}", tmp.display()))?;
        std::fs::rename(&tmp, &path).with_context(|| format!("cannot write {}", path.display()))
    }
}
