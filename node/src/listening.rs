//! Where the node listens: where it was told to, else where it listened before, so that old tickets keep their worth.

use crate::data_dir::DataDir;
use anyhow::Context;
use libp2p::Multiaddr;
use libp2p::multiaddr::Protocol;
use starling_mesh::{Mesh, MeshConfig, MeshError};
use std::sync::Arc;

/// Starts the mesh. `asked` is `--listen`: what it names is taken or refused, nothing else. Without it the ports of the
/// last run are tried; each that another program has by now is replaced by a new one, with a warning.
///
/// # Errors
/// When an address cannot be listened on, or the mesh cannot start otherwise.
pub async fn start(data: &DataDir, asked: &[Multiaddr], mut config: MeshConfig) -> anyhow::Result<Arc<Mesh>> {
    let defaults = if asked.is_empty() { Some(config.listen.clone()) } else { None };
    match &defaults {
        None => config.listen = asked.to_vec(),
        Some(defaults) => config.listen = with_known_ports(defaults, &data.listened()),
    }
    let mesh = loop {
        match (Mesh::start(config.clone()).await, &defaults) {
            (Ok(mesh), _) => break mesh,
            // Each turn puts one kept port back to "any", so there are no more turns than addresses.
            (Err(MeshError::Listen { address, reason }), Some(_)) if forget_port(&mut config.listen, &address) => {
                tracing::warn!(%address, %reason, "the port of the last run is taken: tickets that name it lead elsewhere");
            }
            (Err(error), _) => return Err(error).context("cannot start the mesh"),
        }
    };
    if defaults.is_some() {
        data.write_listened(&mesh.listening())?;
    }
    Ok(mesh)
}

/// `defaults` with the ports of those of `known` that are the same but for the port.
fn with_known_ports(defaults: &[Multiaddr], known: &[String]) -> Vec<Multiaddr> {
    let known: Vec<Multiaddr> = known.iter().filter_map(|a| a.parse().ok()).collect();
    let same = |a: &Multiaddr, b: &Multiaddr| any_port(a) == any_port(b);
    defaults.iter().map(|d| known.iter().find(|k| same(k, d)).unwrap_or(d).clone()).collect()
}

/// Puts the port of `address` in `listen` back to "any"; `false` when it is that already.
fn forget_port(listen: &mut [Multiaddr], address: &Multiaddr) -> bool {
    let any = any_port(address);
    match listen.iter_mut().find(|a| *a == address) {
        Some(found) if *found != any => {
            *found = any;
            true
        }
        _ => false,
    }
}

fn any_port(address: &Multiaddr) -> Multiaddr {
    let any = |part| match part {
        Protocol::Tcp(_) => Protocol::Tcp(0),
        Protocol::Udp(_) => Protocol::Udp(0),
        other => other,
    };
    address.iter().map(any).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use starling_bootstrap::Identity;
    use starling_protocol::Hash;

    /// With two addresses to listen on unless told otherwise.
    fn config() -> MeshConfig {
        let listen = ["/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/0"].map(|a| a.parse().unwrap()).to_vec();
        MeshConfig { listen, ..MeshConfig::new(Identity::from_seed([3; 32]), Hash::of(b"listening")) }
    }

    fn folder() -> (tempfile::TempDir, DataDir) {
        let folder = tempfile::tempdir().unwrap();
        let data = DataDir::open(Some(folder.path())).unwrap();
        (folder, data)
    }

    /// Starts, stops, and tells where it listened.
    async fn listened(data: &DataDir, asked: &[Multiaddr]) -> Vec<String> {
        let mesh = start(data, asked, config()).await.unwrap();
        let at = mesh.listening();
        mesh.shutdown().await;
        // quinn lets go of its socket a moment later, in a task of its own.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let port = |a: &String| a.trim_end_matches("/quic-v1").rsplit('/').next().unwrap().parse::<u16>().unwrap();
        for udp in at.iter().filter(|a| a.contains("/udp/")) {
            while std::net::UdpSocket::bind(("127.0.0.1", port(udp))).is_err() {
                assert!(std::time::Instant::now() < end, "{udp} is still taken");
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        }
        at
    }

    #[tokio::test]
    async fn a_node_listens_where_it_did_and_a_taken_port_is_replaced() {
        let (_folder, data) = folder();
        let first = listened(&data, &[]).await;
        assert_eq!(first.len(), 2, "{first:?}");
        assert_eq!(listened(&data, &[]).await, first);
        let tcp = first.iter().find(|a| a.contains("/tcp/")).unwrap();
        let port: u16 = tcp.rsplit('/').next().unwrap().parse().unwrap();
        let other = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
        let second = listened(&data, &[]).await;
        drop(other);
        assert!(!second.contains(tcp), "{second:?}");
        assert_eq!(
            second.iter().filter(|a| first.contains(a)).count(),
            1,
            "the other port stays: {first:?} {second:?}"
        );
        assert_eq!(listened(&data, &[]).await, second, "the new port is kept from now on");
    }

    #[tokio::test]
    async fn what_was_asked_for_wins_and_is_not_replaced() {
        let (_folder, data) = folder();
        let kept = listened(&data, &[]).await;
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let taken: Multiaddr = format!("/ip4/127.0.0.1/tcp/{}", other.local_addr().unwrap().port()).parse().unwrap();
        let error = start(&data, std::slice::from_ref(&taken), config()).await.unwrap_err();
        assert!(format!("{error:#}").contains(&taken.to_string()), "{error:#}");
        drop(other);
        assert_eq!(listened(&data, std::slice::from_ref(&taken)).await, [taken.to_string()]);
        assert_eq!(listened(&data, &[]).await, kept, "what was asked for once is not kept");
    }

    #[tokio::test]
    async fn a_damaged_file_costs_the_ports_only() {
        let (folder, data) = folder();
        std::fs::write(folder.path().join("listen.json"), "[1, 2").unwrap();
        assert_eq!(listened(&data, &[]).await.len(), 2);
        std::fs::write(folder.path().join("listen.json"), "[\"nonsense\", \"/ip4/9.9.9.9/tcp/1\"]").unwrap();
        let at = listened(&data, &[]).await;
        assert!(at.len() == 2 && at.iter().all(|a| a.starts_with("/ip4/127.0.0.1/")), "{at:?}");
    }
}
