//! Networks that can really be cut: a namespace for each node, joined by a bridge in a namespace of its own.
//!
//! Nothing of it is seen outside: addresses, links and packet filters are all inside the namespaces. They are named
//! after this process and removed when the [`Network`] is dropped; what a dead process left is removed by the next one.
//! Needs root, `ip`, `tc` and `nft`: [`Network::why_not`] says what is missing.

use anyhow::{Context, bail, ensure};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Begins the name of every namespace, before the process's id.
const PREFIX: &str = "starling-test-";
/// The network device of a node.
const DEVICE: &str = "eth0";

/// A node's place: a network namespace with one address.
#[derive(Clone, Debug)]
pub struct Space {
    name: String,
    address: Ipv4Addr,
}

impl Space {
    /// Its address on the network.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The namespace, to be entered by [`enter`].
    pub(crate) fn open(&self) -> anyhow::Result<File> {
        let path = Path::new("/run/netns").join(&self.name);
        File::open(&path).with_context(|| path.display().to_string())
    }

    /// Runs a program in the namespace to its end, with `input`.
    fn run(&self, program: &str, arguments: &[&str], input: &str) -> anyhow::Result<()> {
        run("ip", &[&["netns", "exec", &self.name, program], arguments].concat(), input)
    }
}

/// Moves the calling thread into a namespace. After a `fork` it does what is allowed there: one system call.
pub(crate) fn enter(space: RawFd) -> std::io::Result<()> {
    // SAFETY: setns has no memory effects; a wrong descriptor is an error.
    match unsafe { libc::setns(space, libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// A number of nodes' places on one network. Node `i` is the one of [`crate::TestMesh`].
#[derive(Debug)]
pub struct Network {
    bridge: String,
    spaces: Vec<Space>,
}

impl Network {
    /// Why this machine cannot do it; `None` when it can. Tries everything that is used.
    #[must_use]
    pub fn why_not() -> Option<String> {
        // SAFETY: geteuid only returns a number.
        if unsafe { libc::geteuid() } != 0 {
            return Some("network namespaces need root".into());
        }
        let tried = Self::new(2).and_then(|net| {
            net.lose(0, 1)?;
            net.throttle(0, Some("1mbit"))?;
            net.separate(&[&[0], &[1]])
        });
        tried.err().map(|e| format!("{e:#}"))
    }

    /// `nodes` namespaces with the addresses 10.77.0.1, 10.77.0.2 and so on, all connected.
    ///
    /// # Errors
    /// When the machine cannot do it; nothing is left then.
    pub fn new(nodes: u8) -> anyhow::Result<Self> {
        remove_leftovers();
        let pid = std::process::id();
        // One process may have several networks.
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut net = Self { bridge: format!("{PREFIX}{pid}-{number}-lan"), spaces: Vec::new() };
        let lan = net.bridge.clone();
        run("ip", &["netns", "add", &lan], "")?;
        run("ip", &["-n", &lan, "link", "add", "br0", "type", "bridge"], "")?;
        run("ip", &["-n", &lan, "link", "set", "br0", "up"], "")?;
        for i in 1..=nodes {
            let space = Space { name: format!("{PREFIX}{pid}-{number}-{i}"), address: Ipv4Addr::new(10, 77, 0, i) };
            let (name, port, address) = (space.name.clone(), format!("port{i}"), format!("{}/24", space.address));
            net.spaces.push(space);
            run("ip", &["netns", "add", &name], "")?;
            // Made inside, so that not even for a moment a device of this machine's own network changes.
            let pair = ["link", "add", &port, "type", "veth", "peer", "name", DEVICE, "netns", &name];
            run("ip", &[&["-n", &lan], &pair[..]].concat(), "")?;
            run("ip", &["-n", &lan, "link", "set", &port, "master", "br0", "up"], "")?;
            run("ip", &["-n", &name, "addr", "add", &address, "dev", DEVICE], "")?;
            run("ip", &["-n", &name, "link", "set", "lo", "up"], "")?;
            run("ip", &["-n", &name, "link", "set", DEVICE, "up"], "")?;
        }
        Ok(net)
    }

    /// The place of node `i`.
    #[must_use]
    pub fn space(&self, i: usize) -> &Space {
        &self.spaces[i]
    }

    /// Replaces the packet filter of node `i`: nothing comes in from the nodes `from`, nothing goes out to those in `to`.
    ///
    /// # Errors
    /// When `nft` refuses.
    pub fn cut(&self, i: usize, from: &[usize], to: &[usize]) -> anyhow::Result<()> {
        let drop = |field: &str, nodes: &[usize]| {
            let mut rules = String::new();
            for node in nodes {
                // A text cannot fail to be written to.
                let _ = writeln!(rules, "ip {field} {} drop", self.spaces[*node].address);
            }
            rules
        };
        self.filter(i, &drop("saddr", from), &drop("daddr", to))
    }

    /// Cuts every link between nodes of different `groups`, in both directions; within a group all links are whole.
    /// A node in several groups reaches all of theirs.
    ///
    /// # Errors
    /// When `nft` refuses.
    pub fn separate(&self, groups: &[&[usize]]) -> anyhow::Result<()> {
        for i in 0..self.spaces.len() {
            let together = |j: &usize| groups.iter().any(|g| g.contains(&i) && g.contains(j));
            let apart: Vec<usize> = (0..self.spaces.len()).filter(|j| *j != i && !together(j)).collect();
            self.cut(i, &apart, &apart)?;
        }
        Ok(())
    }

    /// Node `i` loses `percent` of what it sends.
    ///
    /// # Errors
    /// When `nft` refuses: not every kernel has `numgen`.
    pub fn lose(&self, i: usize, percent: u32) -> anyhow::Result<()> {
        self.filter(i, "", &format!("oifname {DEVICE} numgen random mod 100 < {percent} drop\n"))
    }

    /// Bounds what node `i` sends, in `tc`'s words ("1mbit"); `None` takes the bound away.
    ///
    /// # Errors
    /// When `tc` refuses: not every kernel has `tbf`.
    pub fn throttle(&self, i: usize, rate: Option<&str>) -> anyhow::Result<()> {
        let root = ["qdisc", "replace", "dev", DEVICE, "root"];
        match rate {
            // 16 KiB at once, and what would wait longer than 200 ms is dropped: a small home router.
            Some(rate) => {
                let bucket = ["tbf", "rate", rate, "burst", "16kb", "latency", "200ms"];
                self.spaces[i].run("tc", &[&root[..], &bucket].concat(), "")
            }
            None => self.spaces[i].run("tc", &["qdisc", "del", "dev", DEVICE, "root"], ""),
        }
    }

    /// Pulls the cable of node `i`, or puts it back.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn plug(&self, i: usize, plugged: bool) -> anyhow::Result<()> {
        let state = if plugged { "up" } else { "down" };
        run("ip", &["-n", &self.spaces[i].name, "link", "set", DEVICE, state], "")
    }

    /// Takes away all packet filters.
    ///
    /// # Errors
    /// When `nft` refuses.
    pub fn heal(&self) -> anyhow::Result<()> {
        (0..self.spaces.len()).try_for_each(|i| self.filter(i, "", ""))
    }

    fn filter(&self, i: usize, input: &str, output: &str) -> anyhow::Result<()> {
        let rules = format!(
            "flush ruleset\ntable inet cuts {{\n\
             chain input {{ type filter hook input priority 0; policy accept;\n{input}}}\n\
             chain output {{ type filter hook output priority 0; policy accept;\n{output}}}\n}}\n"
        );
        self.spaces[i].run("nft", &["-f", "-"], &rules)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in self.spaces.iter().map(|s| &s.name).chain([&self.bridge]) {
            // Of a half-made network some are missing.
            let _ = run("ip", &["netns", "del", name], "");
        }
    }
}

/// Removes the namespaces of processes that are gone.
fn remove_leftovers() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !PathBuf::from(format!("/proc/{pid}")).exists()) {
            let _ = run("ip", &["netns", "del", &name], "");
        }
    }
}

/// Runs a program to its end; what it says is the error.
fn run(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<()> {
    let shown = || format!("{program} {}", arguments.join(" "));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(shown)?;
    // Dropped at the end of the line, which closes it.
    child.stdin.take().context("a pipe")?.write_all(input.as_bytes()).or_else(|e| match e.kind() {
        // It ended without reading: its status says why.
        std::io::ErrorKind::BrokenPipe => Ok(()),
        _ => Err(e),
    })?;
    let output = child.wait_with_output().with_context(shown)?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("`{}` failed ({}): {}", shown(), output.status, said.trim());
    }
    ensure!(input.is_empty() || !said.contains("Error"), "`{}`: {}", shown(), said.trim());
    Ok(())
}
