//! The node's ed25519 key: made once, kept in one file, never sent.

use ed25519_dalek::VerifyingKey;
use libp2p::identity::{KeyType, Keypair, PublicKey, ed25519};
use libp2p::{PeerId, multihash::Multihash};
use starling_protocol::NodeId;
use starling_protocol::signed::{SignedMessage, Signer, Verifier};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Name of the key file in the data directory.
pub const IDENTITY_FILE: &str = "identity.key";
/// First word of the key file; the seed follows in hexadecimal.
const MAGIC: &str = "starling-identity-1";
/// What libp2p writes before a raw ed25519 key: protobuf field 1 (type) = 1, field 2 (data) of 32 bytes.
const PROTOBUF_PREFIX: [u8; 4] = [0x08, 0x01, 0x12, 0x20];

/// Why there is no identity. Nothing was changed on disk, except with `Write`, where a temporary file may remain.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file cannot be read.
    #[error("cannot read the identity file {path}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file cannot be created.
    #[error("cannot write the identity file {path}")]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is there and is no identity. It is left alone: a node must not lose its name by accident.
    #[error(
        "the identity file {path} is malformed: expected `{MAGIC} <64 hexadecimal digits>`, {got}; restore it, or remove it to get a new identity"
    )]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What is wrong; never the key itself.
        got: String,
    },
}

/// A node's key pair.
#[derive(Clone)]
pub struct Identity {
    keypair: ed25519::Keypair,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.node_id().short()) // the secret never reaches a log
    }
}

impl Identity {
    /// A new random identity, not kept anywhere.
    #[must_use]
    pub fn generate() -> Self {
        Self { keypair: ed25519::Keypair::generate() }
    }

    /// The identity of a 32-byte secret: the same seed gives the same node.
    #[must_use]
    pub fn from_seed(mut seed: [u8; 32]) -> Self {
        #[expect(clippy::expect_used, reason = "any 32 bytes are an ed25519 secret (RFC 8032 §5.1.5)")]
        let secret = ed25519::SecretKey::try_from_bytes(&mut seed).expect("32 bytes are a secret");
        Self { keypair: secret.into() }
    }

    /// Reads `identity.key` in `data_dir`, or makes one (mode 0600, synced to disk before this returns).
    ///
    /// Two processes that start at once end with the same identity.
    ///
    /// # Errors
    /// [`IdentityError`], naming the file, when it cannot be read or written or is malformed.
    pub fn load_or_create(data_dir: &Path) -> Result<Self, IdentityError> {
        let path = data_dir.join(IDENTITY_FILE);
        if let Some(found) = Self::load(&path)? {
            return Ok(found);
        }
        let made = Self::generate();
        match made.create(data_dir, &path) {
            Ok(()) => Ok(made),
            // Somebody else was faster: theirs counts.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                Self::load(&path)?.ok_or(IdentityError::Write { path, source: e })
            }
            Err(source) => Err(IdentityError::Write { path, source }),
        }
    }

    fn load(path: &Path) -> Result<Option<Self>, IdentityError> {
        let text = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(IdentityError::Read { path: path.into(), source }),
        };
        warn_if_others_can_read(path);
        match parse(&text) {
            Ok(seed) => Ok(Some(Self::from_seed(seed))),
            Err(got) => Err(IdentityError::Malformed { path: path.into(), got }),
        }
    }

    /// Written under another name, synced, then linked to its own: the file is either absent or whole.
    fn create(&self, dir: &Path, path: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        let temporary = dir.join(format!("{IDENTITY_FILE}.{}.tmp", self.node_id().short()));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let written = options.open(&temporary).and_then(|mut file| {
            let seed = self.keypair.secret();
            writeln!(file, "{MAGIC} {}", data_encoding::HEXLOWER.encode(seed.as_ref()))?;
            file.sync_all()
        });
        // A link, unlike a rename, never replaces an identity that is already there.
        let linked = written.and_then(|()| fs::hard_link(&temporary, path));
        let _ = fs::remove_file(&temporary);
        linked?;
        File::open(dir)?.sync_all()
    }

    /// This node's name: its raw public key.
    #[must_use]
    pub fn node_id(&self) -> NodeId {
        NodeId(self.keypair.public().to_bytes())
    }

    /// The same, as libp2p names it.
    #[must_use]
    pub fn peer_id(&self) -> PeerId {
        self.keypair().public().to_peer_id()
    }

    /// The key pair for libp2p's transports.
    #[must_use]
    pub fn keypair(&self) -> Keypair {
        self.keypair.clone().into()
    }
}

impl Signer for Identity {
    fn node_id(&self) -> NodeId {
        Self::node_id(self)
    }
    fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.keypair.sign(message)
    }
}

/// Verifies the signatures of any node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ed25519Verifier;

impl Verifier for Ed25519Verifier {
    fn verify(&self, node: NodeId, message: &[u8], signature: &[u8]) -> bool {
        ed25519::PublicKey::try_from_bytes(&node.0).is_ok_and(|key| key.verify(message, signature))
    }

    fn verify_all(&self, signed: &[SignedMessage<'_>]) -> bool {
        // Below, the check of a batch costs as much as it saves.
        if signed.len() < 4 {
            return signed.iter().all(|s| self.verify(s.node, &s.message, s.signature));
        }
        // Mostly one gateway's: its key is read once.
        let mut keys: BTreeMap<NodeId, VerifyingKey> = BTreeMap::new();
        let mut batch = (Vec::new(), Vec::new(), Vec::new());
        for s in signed {
            let key = match keys.get(&s.node) {
                Some(key) => *key,
                None => {
                    let Ok(key) = VerifyingKey::from_bytes(&s.node.0) else { return false };
                    keys.insert(s.node, key);
                    key
                }
            };
            let Ok(signature) = ed25519_dalek::Signature::from_slice(s.signature) else { return false };
            batch.0.push(s.message.as_slice());
            batch.1.push(signature);
            batch.2.push(key);
        }
        ed25519_dalek::verify_batch(&batch.0, &batch.1, &batch.2).is_ok()
    }
}

/// The 32 bytes are no ed25519 public key, so no such node can exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{node} is not an ed25519 public key")]
pub struct NotANode {
    /// What was given.
    pub node: NodeId,
}

/// libp2p's name of a node.
///
/// # Errors
/// [`NotANode`] when the id is no point of the curve.
pub fn peer_id_of(node: NodeId) -> Result<PeerId, NotANode> {
    let key = ed25519::PublicKey::try_from_bytes(&node.0).ok().ok_or(NotANode { node })?;
    Ok(PublicKey::from(key).to_peer_id())
}

/// [`peer_id_of`] without the check that the id is a point of the curve: for ids that came from a connection.
#[must_use]
pub fn peer_id_of_known(node: NodeId) -> PeerId {
    let mut protobuf = [0; 36];
    protobuf[..4].copy_from_slice(&PROTOBUF_PREFIX);
    protobuf[4..].copy_from_slice(&node.0);
    #[expect(clippy::expect_used, reason = "36 bytes fit the 64 of a multihash; keys up to 42 bytes are inlined")]
    PeerId::from_multihash(Multihash::wrap(0, &protobuf).expect("36 bytes fit")).expect("an inlined key")
}

/// The node behind a peer id: ed25519 keys are inlined in it. `None` for keys of other kinds, which no node has.
#[must_use]
pub fn node_id_of(peer: &PeerId) -> Option<NodeId> {
    let hash: &Multihash<64> = peer.as_ref();
    let key = hash.digest().strip_prefix(&PROTOBUF_PREFIX)?;
    (hash.code() == 0).then_some(())?;
    Some(NodeId(key.try_into().ok()?))
}

/// The node of a public key, if it is an ed25519 one.
#[must_use]
pub fn node_id_of_key(key: &PublicKey) -> Option<NodeId> {
    (key.key_type() == KeyType::Ed25519).then(|| node_id_of(&key.to_peer_id()))?
}

fn parse(text: &[u8]) -> Result<[u8; 32], String> {
    let text = std::str::from_utf8(text).ok().ok_or_else(|| format!("got {} bytes that are no text", text.len()))?;
    let mut words = text.split_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some(MAGIC), Some(hex), None) => {
            let seed = data_encoding::HEXLOWER_PERMISSIVE.decode(hex.as_bytes()).map_err(|e| format!("got {e}"))?;
            seed.try_into().map_err(|s: Vec<u8>| format!("got {} bytes of key", s.len()))
        }
        (Some(MAGIC), None, _) => Err("got no key".into()),
        (Some(MAGIC), Some(_), Some(_)) => Err("got words after the key".into()),
        (Some(_), ..) => Err("got another first word".into()),
        (None, ..) => Err("got an empty file".into()),
    }
}

#[cfg(unix)]
fn warn_if_others_can_read(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    if let Ok(meta) = fs::metadata(path)
        && meta.permissions().mode() & 0o077 != 0
    {
        let mode = meta.permissions().mode() & 0o777;
        tracing::warn!(path = %path.display(), "other users can read this node's secret key (mode {mode:o}); run: chmod 600");
    }
}

#[cfg(not(unix))]
fn warn_if_others_can_read(_: &Path) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_a_restart_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let first = Identity::load_or_create(&dir.path().join("data")).unwrap();
        let second = Identity::load_or_create(&dir.path().join("data")).unwrap();
        assert_eq!(first.node_id(), second.node_id());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let meta = fs::metadata(dir.path().join("data").join(IDENTITY_FILE)).unwrap();
            assert_eq!(meta.permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::read_dir(dir.path().join("data")).unwrap().count(), 1, "no temporary file remains");
    }

    #[test]
    fn a_malformed_file_is_refused_by_name_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(IDENTITY_FILE);
        for bad in ["", "hello", "starling-identity-1", "starling-identity-1 00ff", "starling-identity-1 zz", "\u{0}"] {
            fs::write(&path, bad).unwrap();
            let err = Identity::load_or_create(dir.path()).unwrap_err().to_string();
            assert!(err.contains("identity.key") && err.contains("malformed"), "{err}");
            assert_eq!(fs::read_to_string(&path).unwrap(), bad);
        }
    }

    #[test]
    fn creation_never_replaces_an_identity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(IDENTITY_FILE);
        let first = Identity::from_seed([1; 32]);
        first.create(dir.path(), &path).unwrap();
        let err = Identity::from_seed([2; 32]).create(dir.path(), &path).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(Identity::load_or_create(dir.path()).unwrap().node_id(), first.node_id());
    }

    #[test]
    fn node_ids_and_peer_ids_map_both_ways() {
        for seed in 0..50 {
            let id = Identity::from_seed([seed; 32]);
            assert_eq!(peer_id_of(id.node_id()).unwrap(), id.peer_id());
            assert_eq!(peer_id_of_known(id.node_id()), id.peer_id());
            assert_eq!(node_id_of(&id.peer_id()), Some(id.node_id()));
            assert_eq!(node_id_of_key(&id.keypair().public()), Some(id.node_id()));
        }
        assert_eq!(node_id_of(&PeerId::random()), None);
    }

    #[test]
    fn many_signatures_are_good_together_only_if_each_is() {
        let keys: Vec<Identity> = (0..3).map(|i| Identity::from_seed([i; 32])).collect();
        let signed: Vec<(NodeId, Vec<u8>, Vec<u8>)> = (0..20_u8)
            .map(|i| {
                let key = &keys[usize::from(i) % keys.len()];
                let message = vec![i; usize::from(i)];
                (key.node_id(), message.clone(), key.sign(&message))
            })
            .collect();
        let verify = |signed: &[(NodeId, Vec<u8>, Vec<u8>)]| {
            let all: Vec<_> = signed
                .iter()
                .map(|(node, message, signature)| SignedMessage { node: *node, message: message.clone(), signature })
                .collect();
            Ed25519Verifier.verify_all(&all)
        };
        for n in 0..signed.len() {
            assert!(verify(&signed[..n]), "{n} signatures");
        }
        for at in 0..signed.len() {
            let mut another_message = signed.clone();
            another_message[at].1.push(0);
            let mut anothers = signed.clone();
            anothers[at].0 = keys[(at + 1) % keys.len()].node_id();
            let mut broken = signed.clone();
            broken[at].2[40] ^= 1;
            let mut short = signed.clone();
            short[at].2.pop();
            let mut no_key = signed.clone();
            no_key[at].0 = NodeId([0xff; 32]);
            for (what, wrong) in [
                ("message", another_message),
                ("signer", anothers),
                ("signature", broken),
                ("length", short),
                ("key", no_key),
            ] {
                assert!(!verify(&wrong), "{what} of {at}");
                assert!(!verify(&wrong[at..=at]), "{what} of {at} alone");
            }
        }
    }

    #[test]
    fn the_key_of_rfc_8032_test_1_gives_its_public_key_and_signature() {
        // RFC 8032 §7.1, TEST 1.
        let seed: NodeId = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60".parse().unwrap();
        let id = Identity::from_seed(seed.0);
        let public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
        assert_eq!(id.node_id().to_string(), public);
        let signature = id.sign(b"");
        assert!(data_encoding::HEXLOWER.encode(&signature).starts_with("e5564300c360ac729086e2cc806e828a84877f1e"));
        assert!(Ed25519Verifier.verify(id.node_id(), b"", &signature));
        assert!(!Ed25519Verifier.verify(id.node_id(), b"x", &signature));
        assert!(!Ed25519Verifier.verify(id.node_id(), b"", &signature[..63]));
        assert!(!Ed25519Verifier.verify(NodeId([2; 32]), b"", &signature));
    }
}
