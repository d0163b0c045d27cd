//! Faults: what happens, to whom, when and for how long.

use super::select::Select;
use std::time::Duration;

/// One fault of a scenario or of a plan drawn from a seed.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// When it begins, from the start of the safety phase.
    pub at: Duration,
    /// When it ends by itself; to the end of the safety phase if `None`.
    pub lasts: Option<Duration>,
    /// What.
    pub kind: FaultKind,
}

/// How long volunteers stay. All have the same mean; they differ in how uneven sessions are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Session {
    /// Memoryless.
    #[default]
    Exponential,
    /// Weibull with shape 0.5: many short sessions, some very long, as measured in volunteer computing
    /// (Javadi et al., "Mining for statistical models of availability in large-scale distributed systems", 2009).
    Weibull,
    /// Pareto with shape 1.5: heavier still, as in peer-to-peer file sharing (Stutzbach and Rejaie,
    /// "Understanding churn in peer-to-peer networks", 2006).
    Pareto,
}

/// What happens.
#[derive(Clone, Debug, PartialEq)]
pub enum FaultKind {
    /// No message passes between the sides.
    Split {
        /// At least two.
        sides: Vec<Vec<Select>>,
    },
    /// The mesh falls into islands of about equal size, drawn from the seed.
    Islands {
        /// How many.
        count: u32,
    },
    /// Nothing passes from these to those; the other direction works.
    OneWay {
        /// Senders.
        from: Vec<Select>,
        /// Receivers.
        to: Vec<Select>,
    },
    /// Two sides that only the bridge can reach both of.
    Bridge {
        /// The node in between.
        node: Select,
        /// Exactly two.
        sides: Vec<Vec<Select>>,
    },
    /// A split that comes and goes.
    Flapping {
        /// At least two.
        sides: Vec<Vec<Select>>,
        /// Cut for half of it, healed for the other.
        period: Duration,
    },
    /// Cut off from all others.
    Isolate {
        /// Whom.
        nodes: Vec<Select>,
    },
    /// Links are worse than usual.
    Degrade {
        /// Of these nodes, in both directions.
        nodes: Vec<Select>,
        /// Loss, 0 to 1.
        loss: f64,
        /// Added to each hop.
        latency: Duration,
        /// KiB/s; 0 for no limit.
        bandwidth_kib_s: u64,
    },
    /// The process dies, and comes back after `away` if that is said.
    Crash {
        /// Whom.
        nodes: Vec<Select>,
        /// The machine dies with it: what was not synced is lost.
        power_loss: bool,
        /// The disk is lost too.
        disk_lost: bool,
        /// The node's key is not lost with the disk: it comes back as itself, with nothing that it promised.
        key_kept: bool,
        /// Back after this time; never if `None`.
        away: Option<Duration>,
    },
    /// Nodes leave and come back again and again, each on its own schedule.
    Churn {
        /// Whom.
        nodes: Vec<Select>,
        /// How sessions are distributed.
        session: Session,
        /// Mean time in the mesh.
        mean: Duration,
        /// Mean time away, memoryless.
        away: Duration,
    },
    /// A share of them dies at once, and comes back if `away` is said.
    MassLeave {
        /// Of whom.
        nodes: Vec<Select>,
        /// 0 to 1.
        share: f64,
        /// Back after this time; never if `None`.
        away: Option<Duration>,
    },
    /// Absent nodes start.
    Join {
        /// Whom.
        nodes: Vec<Select>,
    },
    /// Every use of the disk takes longer.
    DiskSlow {
        /// Whose.
        nodes: Vec<Select>,
        /// By this time.
        delay: Duration,
    },
    /// Bulk writes fail.
    DiskFull {
        /// Whose.
        nodes: Vec<Select>,
    },
    /// All writes fail.
    DiskFails {
        /// Whose.
        nodes: Vec<Select>,
    },
    /// Bits flip in stored rollouts and blobs.
    DiskCorrupt {
        /// Whose.
        nodes: Vec<Select>,
        /// How many values.
        values: u32,
    },
    /// The wall clock jumps.
    ClockJump {
        /// Whose.
        nodes: Vec<Select>,
        /// Milliseconds, forwards or back.
        by_ms: i64,
    },
    /// The wall clock runs at another rate.
    ClockSkew {
        /// Whose.
        nodes: Vec<Select>,
        /// 1 is right.
        rate: f64,
    },
    /// The device is slower.
    SlowDevice {
        /// Whose.
        nodes: Vec<Select>,
        /// Times as slow.
        factor: f64,
    },
}

impl FaultKind {
    /// Its name in a scenario file.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Split { .. } => "split",
            Self::Islands { .. } => "islands",
            Self::OneWay { .. } => "one_way",
            Self::Bridge { .. } => "bridge",
            Self::Flapping { .. } => "flapping",
            Self::Isolate { .. } => "isolate",
            Self::Degrade { .. } => "degrade",
            Self::Crash { .. } => "crash",
            Self::Churn { .. } => "churn",
            Self::MassLeave { .. } => "mass_leave",
            Self::Join { .. } => "join",
            Self::DiskSlow { .. } => "disk_slow",
            Self::DiskFull { .. } => "disk_full",
            Self::DiskFails { .. } => "disk_fails",
            Self::DiskCorrupt { .. } => "disk_corrupt",
            Self::ClockJump { .. } => "clock_jump",
            Self::ClockSkew { .. } => "clock_skew",
            Self::SlowDevice { .. } => "slow_device",
        }
    }
}
