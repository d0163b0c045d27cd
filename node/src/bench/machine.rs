//! The machine that was measured.

use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use sysinfo::System;

/// What numbers depend on.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Machine {
    cpu: String,
    cores: usize,
    memory_gib: u64,
    os: String,
    /// File system of the temporary directory, where the stores lie. On `tmpfs` an fsync costs nothing.
    disk: String,
    /// Processes that wanted to run in the last minute: what else the machine did.
    load: f64,
    /// Of Starling.
    version: &'static str,
}

impl Machine {
    pub(super) fn probe() -> Self {
        let mut system = System::new();
        system.refresh_memory();
        system.refresh_cpu_all();
        let cpu = system.cpus().first().map(|c| c.brand().trim().to_owned()).filter(|b| !b.is_empty());
        let os = System::long_os_version().unwrap_or_else(|| std::env::consts::OS.into());
        let kernel = System::kernel_version().unwrap_or_default();
        Self {
            cpu: cpu.unwrap_or_else(|| std::env::consts::ARCH.into()),
            cores: cores(),
            memory_gib: system.total_memory() >> 30,
            os: format!("{os}, {kernel}"),
            disk: file_system(&std::env::temp_dir()).unwrap_or_else(|| "unknown".into()),
            load: System::load_average().one,
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {} cores, {} GiB, {}, stores on {}, load {:.1}, starling {}",
            self.cpu, self.cores, self.memory_gib, self.os, self.disk, self.load, self.version
        )
    }
}

/// Threads of a measurement.
pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The kind of the mount that `dir` lies in, where `/proc/mounts` tells.
fn file_system(dir: &Path) -> Option<String> {
    kind_of_mount(&dir.canonicalize().ok()?, &std::fs::read_to_string("/proc/mounts").ok()?)
}

fn kind_of_mount(dir: &Path, mounts: &str) -> Option<String> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (point, kind) = (words.nth(1)?, words.next()?);
        Some((PathBuf::from(point), kind))
    });
    let around = mounts.filter(|(point, _)| dir.starts_with(point));
    // The last of equals hides the others.
    around.max_by_key(|(point, _)| point.components().count()).map(|(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_mount_counts() {
        let mounts = "/dev/vda / ext4 rw 0 0\nproc /proc proc rw 0 0\ntmp /tmp tmpfs rw 0 0\n";
        let kind = |dir: &str| kind_of_mount(Path::new(dir), mounts);
        assert_eq!(kind("/tmp/x").as_deref(), Some("tmpfs"));
        assert_eq!(kind("/tmpx").as_deref(), Some("ext4"));
        assert_eq!(kind_of_mount(Path::new("/x"), ""), None);
    }
}
