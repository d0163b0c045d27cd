//! `starling bench`: what this machine does, beside what it could do at best. How to read it: `docs/benchmarks.md`.

mod calls;
mod delta;
mod engine;
mod episodes;
mod etcd;
mod failover;
mod gateway;
mod generate;
mod http;
mod iroh;
mod llama;
mod load;
mod machine;
mod replicate;
mod report;
mod tcp;
mod torch;
mod train;
mod trio;
mod weights;

use crate::cli::{BenchArgs, BenchName};
use crate::{BadInput, print};
use machine::Machine;
use report::{Report, Row};

/// Most runs of a measurement: 50 of the slowest one take five minutes.
const RUNS_MAX: usize = 50;

/// What `all` runs. `generate` and `train` need a model, which this program does not carry, and minutes.
const ALL: [BenchName; 8] = [
    BenchName::Episodes,
    BenchName::Gateway,
    BenchName::Calls,
    BenchName::Replicate,
    BenchName::Weights,
    BenchName::Failover,
    BenchName::Generation,
    BenchName::Training,
];

/// Runs a benchmark, or all of them one after the other, and prints medians.
///
/// # Errors
/// When what it measures fails, or `--runs` is out of range.
pub async fn bench(args: &BenchArgs, json: bool) -> anyhow::Result<()> {
    if !(1..=RUNS_MAX).contains(&args.runs) {
        return Err(BadInput::wrap(anyhow::anyhow!("--runs: expected 1 to {RUNS_MAX}, got {}", args.runs)));
    }
    let names = if args.name == BenchName::All { ALL.to_vec() } else { vec![args.name] };
    let machine = Machine::probe();
    let mut reports = Vec::with_capacity(names.len());
    for name in names {
        let bench = text_of(name);
        tracing::info!(bench, runs = args.runs, "measuring");
        let rows = Box::pin(measure(name, args)).await?;
        let report = Report { bench, machine: machine.clone(), rows };
        if !json {
            // One table at a time: people see what is done.
            print(false, &report, || report.table())?;
        }
        reports.push(report);
    }
    match reports.as_slice() {
        _ if !json => Ok(()),
        [one] => print(true, one, String::new),
        all => print(true, &all, String::new),
    }
}

fn text_of(name: BenchName) -> &'static str {
    match name {
        BenchName::Episodes => "episodes",
        BenchName::Gateway => "gateway",
        BenchName::Calls => "calls",
        BenchName::Replicate => "replicate",
        BenchName::Generation => "generation",
        BenchName::Generate => "generate",
        BenchName::Training => "training",
        BenchName::Train => "train",
        BenchName::Weights => "weights",
        BenchName::Failover => "failover",
        BenchName::All => "all",
    }
}

async fn measure(name: BenchName, args: &BenchArgs) -> anyhow::Result<Vec<Row>> {
    let runs = args.runs;
    match name {
        BenchName::Episodes => episodes::measure(runs).await,
        BenchName::Gateway => gateway::measure(runs).await,
        BenchName::Calls => calls::measure(runs).await,
        BenchName::Replicate => replicate::measure(runs).await,
        BenchName::Weights => weights::measure(runs, args.iroh_blobs.as_deref()).await,
        BenchName::Failover => failover::measure(runs).await,
        BenchName::Generation => tokio::task::block_in_place(|| engine::generation(runs)),
        BenchName::Generate => tokio::task::block_in_place(|| generate::measure(args)),
        BenchName::Training => tokio::task::block_in_place(|| engine::training(runs)),
        BenchName::Train => train::measure(runs, args.torch.as_deref()).await,
        BenchName::All => Ok(Vec::new()), // taken apart by the caller
    }
}
