//! The `starling` binary.

use anyhow::Context;
use clap::Parser;
use starling_bootstrap::ticket::Ticket;
use starling_node::cli::{
    CheckpointCommand, Cli, Command, GroupCommand, JobCommand, NodeCommand, RolloutCommand, RunArgs, StoreCommand,
};
use starling_node::commands::client::AdminClient;
use starling_node::commands::{checkpoint, group, job, node, rollout, sim, status, store};
use starling_node::data_dir::DataDir;
use starling_node::settings::RunSettings;
use starling_node::units::parse_time;
use starling_node::{BadInput, bench, demo, pretrain, run};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Simulated nodes fail by design, thousands a minute: their log is for who asks for it.
    let quiet = matches!(cli.command, Command::Sim(_));
    let usual = if quiet { "off" } else { "info,openraft=error,libp2p=warn,quinn=warn,netlink_proto=warn" };
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("STARLING_LOG").unwrap_or_else(|_unset| usual.into()),
        )
        .with_writer(std::io::stderr)
        .init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(r) => r,
        Err(e) => return fail(&anyhow::Error::new(e).context("cannot start the runtime")),
    };
    let result = runtime.block_on(Box::pin(execute(cli)));
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    match result {
        Ok(code) => code,
        Err(e) => fail(&e),
    }
}

/// One line on standard error; 2 for what the user gave, 1 for everything else.
fn fail(e: &anyhow::Error) -> ExitCode {
    eprintln!("starling: {e:#}");
    if e.chain().any(|c| c.is::<BadInput>()) { ExitCode::from(2) } else { ExitCode::FAILURE }
}

async fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    let json = cli.json;
    let data = || DataDir::open(cli.data.as_deref());
    let client = || AdminClient::of(&data()?);
    match cli.command {
        Command::Init => node::init(&data()?, json)?,
        Command::Ticket => node::ticket(&client()?, json).await?,
        Command::Join(args) => {
            let ticket = Ticket::parse(&args.ticket).map_err(BadInput::wrap)?;
            run_node(&data()?, &args.run, Some(ticket)).await?;
        }
        Command::Node(NodeCommand::Run(args)) => run_node(&data()?, &args, None).await?,
        Command::Node(NodeCommand::List) => node::list(&client()?, json).await?,
        Command::Node(NodeCommand::Drain) => node::drain(&client()?, json).await?,
        Command::Store(StoreCommand::Stat) => store::stat(&data()?, json).await?,
        Command::Store(StoreCommand::Fsck) => return tokio::task::block_in_place(|| store::fsck(&data()?, json)),
        Command::Store(StoreCommand::Gc { rollouts_kept, orphans }) => {
            let kept = parse_time(&rollouts_kept).context("--rollouts-kept").map_err(BadInput::wrap)?;
            tokio::task::block_in_place(|| store::gc(&data()?, kept, orphans, json))?;
        }
        Command::Status => status::status(&client()?, json).await?,
        Command::Job(JobCommand::Submit { file }) => job::submit(&client()?, &file, json).await?,
        Command::Job(JobCommand::List) => job::list(&client()?, json).await?,
        Command::Job(JobCommand::Stop { job: id }) => job::stop(&client()?, &id, json).await?,
        Command::Group(GroupCommand::Reopen { model }) => group::reopen(&client()?, &model, json).await?,
        Command::Rollout(RolloutCommand::List { job, limit }) => rollout::list(&client()?, &job, limit, json).await?,
        Command::Rollout(RolloutCommand::Show { id }) => rollout::show(&client()?, &id, json).await?,
        Command::Checkpoint(CheckpointCommand::Export { model, out, adapter }) => {
            checkpoint::export_command(&client()?, &model, &out, adapter, json).await?;
        }
        Command::Checkpoint(CheckpointCommand::List) => checkpoint::list(&client()?, json).await?,
        Command::Pretrain(args) => tokio::task::block_in_place(|| pretrain::pretrain(&args, json))?,
        Command::Bench(args) => bench::bench(&args, json).await?,
        Command::Sim(args) => return tokio::task::block_in_place(|| sim::sim(&args, json)),
        Command::Demo(args) => return demo::demo(&args, json).await,
    }
    Ok(ExitCode::SUCCESS)
}

async fn run_node(data: &DataDir, args: &RunArgs, ticket: Option<Ticket>) -> anyhow::Result<()> {
    let settings = RunSettings::new(args, Path::new(data.path())).map_err(BadInput::wrap)?;
    run::run(data.clone(), settings, ticket).await
}
