//! The command line: what can be typed. Each command's work is in `commands`.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Trains LLM agents by reinforcement learning on a peer-to-peer mesh.
#[derive(Debug, Parser)]
#[command(name = "starling", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// The node's folder: identity, store, admin token.
    #[arg(long, global = true, env = "STARLING_DATA", value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Print facts as JSON on standard output.
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make the node's folder with its identity.
    #[command(after_help = "Example:\n  starling init --data ~/.starling")]
    Init,
    /// Print an invite ticket of the running node.
    #[command(after_help = "Example:\n  starling ticket > ticket.txt")]
    Ticket,
    /// Join a mesh and run until interrupted.
    #[command(
        after_help = "Examples:\n  starling join starling1abc… --role server\n  starling join starling1abc… --role client --agent ./my_agent.py --slots 16"
    )]
    Join(Box<JoinArgs>),
    /// Run a node, or list the nodes of the mesh.
    #[command(subcommand)]
    Node(NodeCommand),
    /// What this node does, what it knows, and what it waits for.
    #[command(after_help = "Example:\n  starling status --json")]
    Status,
    /// Submit, list and stop training jobs.
    #[command(subcommand)]
    Job(JobCommand),
    /// Help a model's group that has lost its quorum for good.
    #[command(subcommand)]
    Group(GroupCommand),
    /// List and show rollouts in this node's store.
    #[command(subcommand)]
    Rollout(RolloutCommand),
    /// What is in this node's store, whether it is intact, and deleting what is of no use.
    #[command(subcommand)]
    Store(StoreCommand),
    /// Save a model's committed weights as a Hugging Face folder.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Train the embedded byte-level model by supervision.
    #[command(after_help = "Example:\n  starling pretrain --out node/embedded --seed 1")]
    Pretrain(PretrainArgs),
    /// Measure, and print a table or JSON.
    #[command(after_help = "Examples:\n  starling bench episodes --json\n  starling bench failover --runs 20")]
    Bench(BenchArgs),
    /// Simulate a mesh under faults in virtual time, and check every promise after every event.
    #[command(
        after_help = "Examples:\n  starling sim --list\n  starling sim split --seeds 7 --report report\n  starling sim --seeds 1..200\n  starling sim my_scenario.toml --seeds 1..20 --json"
    )]
    Sim(SimArgs),
    /// A mesh of five processes trains the embedded model, loses its leader and heals.
    #[command(after_help = "Example:\n  starling demo --steps 70 --seed 1 --report report")]
    Demo(DemoArgs),
}

/// How a node runs.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// What the node does; several with commas: server, client, witness.
    #[arg(long, value_delimiter = ',', default_value = "server")]
    pub role: Vec<String>,
    /// Where peers reach it, as a multiaddr; may be given several times. Default: TCP on loopback, any port.
    #[arg(long, value_name = "MULTIADDR")]
    pub listen: Vec<String>,
    /// Where agents and this command line reach it. Beyond loopback it is refused unless --http-token is given.
    #[arg(long, default_value = "127.0.0.1:10086", value_name = "ADDR:PORT")]
    pub http: String,
    /// Bearer token that every HTTP caller outside an episode must bring.
    #[arg(long, env = "STARLING_HTTP_TOKEN", hide_env_values = true)]
    pub http_token: Option<String>,
    /// Client role: the agent's program, with arguments, e.g. "python3 agent.py".
    #[arg(long, value_name = "COMMAND")]
    pub agent: Option<String>,
    /// One process an episode, or long-lived workers.
    #[arg(long, value_enum, default_value_t = AgentModeArg::PerEpisode)]
    pub agent_mode: AgentModeArg,
    /// Client role: episodes at once.
    #[arg(long, default_value_t = 8)]
    pub slots: usize,
    /// Client role: seconds that one episode may take.
    #[arg(long, default_value_t = 120)]
    pub time_limit: u64,
    /// Client role: only tasks of these models; default: every model with a running job.
    #[arg(long, value_delimiter = ',')]
    pub models: Vec<String>,
    /// Server role: a model to bring to the mesh unless it has it: a Hugging Face folder or a .gguf file, its name before a
    /// `=`, else the folder's or file's. May be given several times.
    #[arg(long, value_name = "[NAME=]PATH")]
    pub model: Vec<String>,
    /// How generation holds weights: f32 as they are trained, or q8_0, which takes a quarter of the memory and of the time to
    /// read it, and samples from slightly other weights than those that are trained.
    #[arg(long, default_value = "f32", value_name = "FORMAT")]
    pub weight_format: String,
    /// Threads of generation and training. Default: the number of cores.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Most bytes that the store may take up, e.g. 20GiB. Then the node takes nothing more to hold, and serves what it
    /// has. Default: what the disk has, less 128 MiB.
    #[arg(long, value_name = "SIZE")]
    pub store_quota: Option<String>,
    /// How long rollouts are kept after a step consumed them, e.g. 36h.
    #[arg(long, default_value = "1d", value_name = "TIME")]
    pub rollouts_kept: String,
    /// How often an optimizer leader shows that it is there. A message between two servers must be answered in three
    /// quarters of it. Must be equal on all nodes.
    #[arg(long, default_value = "250ms", value_name = "TIME")]
    pub heartbeat: String,
    /// How long a leader may be silent before another may be elected; at least four heartbeats. Must be equal on all
    /// nodes.
    #[arg(long, default_value = "2s", value_name = "TIME")]
    pub election_timeout: String,
    /// How long the majority of a model's voters must be gone before this node agrees to go on without it in a new
    /// generation, e.g. 30m; or never. Longer than any partition that is to heal by itself: a part that opened a
    /// generation wins over a part that trained on.
    #[arg(long, default_value = "15m", value_name = "TIME|never")]
    pub generation_after: String,
    /// Look for peers on the local network by mDNS.
    #[arg(long)]
    pub mdns: bool,
}

/// How agents are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AgentModeArg {
    /// A process per episode.
    PerEpisode,
    /// Long-lived workers, one episode at a time.
    Worker,
}

/// `join`.
#[derive(Debug, Args)]
pub struct JoinArgs {
    /// An invite ticket, as `starling ticket` prints it.
    pub ticket: String,
    /// How to run.
    #[command(flatten)]
    pub run: RunArgs,
}

/// `node`.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// Run the first node of a new mesh, or a known node again.
    #[command(after_help = "Example:\n  starling node run --role server")]
    Run(Box<RunArgs>),
    /// The nodes that the running node knows.
    #[command(after_help = "Example:\n  starling node list --json")]
    List,
    /// Hand what the running node holds to others; returns when it may be stopped.
    ///
    /// It takes no new claims, generations, rollouts or weights from then on, commits the step that it trains, and gives
    /// its leadership and its votes to others. Refused when no other node can take over.
    #[command(after_help = "Example:\n  starling node drain --data ~/.starling")]
    Drain,
}

/// `store`.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Counts and sizes; of a running node too.
    #[command(after_help = "Example:\n  starling store stat --json")]
    Stat,
    /// Read and check everything in a stopped node's store; set aside what is corrupt.
    ///
    /// Exit code 1 when something is missing or broken that the store alone cannot mend.
    #[command(after_help = "Example:\n  starling store fsck --data ~/.starling")]
    Fsck,
    /// Delete from a stopped node's store what is of no use, and give the space back.
    #[command(after_help = "Example:\n  starling store gc --rollouts-kept 1h")]
    Gc {
        /// Delete rollouts that a step consumed longer ago than this.
        #[arg(long, default_value = "1d", value_name = "TIME")]
        rollouts_kept: String,
        /// Also delete chunks that no model in this store names. Not while a step may be under way: its weights lie here
        /// before it is in the log.
        #[arg(long)]
        orphans: bool,
    },
}

/// `job`.
#[derive(Debug, Subcommand)]
pub enum JobCommand {
    /// Submit a job to the mesh.
    #[command(after_help = "Example:\n  starling job submit job.toml")]
    Submit {
        /// The job file.
        file: PathBuf,
    },
    /// Jobs of all models that this node hosts.
    #[command(after_help = "Example:\n  starling job list --json")]
    List,
    /// Stop a job.
    #[command(after_help = "Example:\n  starling job stop 0123456789abcdef0123456789abcdef")]
    Stop {
        /// Its id.
        job: String,
    },
}

/// `group`.
#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Go on without the lost majority now: open a new generation of the model from its last committed step.
    ///
    /// The running node opens it and takes the other survivors in. Refused while a majority of the voters is alive, and
    /// when another survivor has newer steps: it is named, and is to do it. What the lost nodes committed and no
    /// survivor has is given up; if they come back, they join the new generation.
    #[command(after_help = "Example:\n  starling group reopen starling-byte --data ~/.starling")]
    Reopen {
        /// The model's name.
        model: String,
    },
}

/// `rollout`.
#[derive(Debug, Subcommand)]
pub enum RolloutCommand {
    /// Rollouts of a job in this node's store.
    #[command(after_help = "Example:\n  starling rollout list 0123456789abcdef0123456789abcdef")]
    List {
        /// The job's id.
        job: String,
        /// At most this many.
        #[arg(long, default_value_t = 50)]
        limit: u32,
    },
    /// One rollout: task, reward, turns, tokens.
    #[command(after_help = "Example:\n  starling rollout show <64 hex digits> --json")]
    Show {
        /// The rollout's id.
        id: String,
    },
}

/// `checkpoint`.
#[derive(Debug, Subcommand)]
pub enum CheckpointCommand {
    /// Write the newest committed version into a folder that `transformers` loads.
    #[command(after_help = "Example:\n  starling checkpoint export starling-byte --out ./trained")]
    Export {
        /// The model's name.
        model: String,
        /// The folder, which must not exist or be empty.
        #[arg(long)]
        out: PathBuf,
        /// Write the adapters of a job with `[trainer.lora]` instead, as PEFT loads them: `adapter_config.json` and
        /// `adapter_model.safetensors`. They belong on the weights that the job started from.
        #[arg(long)]
        adapter: bool,
    },
    /// Committed versions of the models that this node hosts.
    #[command(after_help = "Example:\n  starling checkpoint list")]
    List,
}

/// `pretrain`.
#[derive(Debug, Args)]
pub struct PretrainArgs {
    /// Where the Hugging Face folder goes.
    #[arg(long)]
    pub out: PathBuf,
    /// Seed of weights and data order.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Optimizer steps.
    #[arg(long)]
    pub steps: Option<u64>,
    /// Folder with the task sets.
    #[arg(long, default_value = "tasks")]
    pub tasks: PathBuf,
    /// Threads. The result is the same bits for the same number of threads.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Also print the reward on the held-out tasks, greedy and sampled.
    #[arg(long)]
    pub evaluate: bool,
}

/// `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Which; `all` runs every one but `train`.
    #[arg(value_enum)]
    pub name: BenchName,
    /// Runs of each measurement; the median counts.
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// The program that `weights` measures beside us. Default: where `make bench` builds it, if it did.
    #[arg(long, env = "STARLING_PEER_IROH_BLOBS", value_name = "FILE")]
    pub iroh_blobs: Option<PathBuf>,
    /// Of `generate`: a Hugging Face folder or a .gguf file.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Of `generate`: threads of the engine. Default: the number of cores.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Of `generate`: how the engine holds weights, f32 or q8_0.
    #[arg(long, default_value = "f32", value_name = "FORMAT")]
    pub weight_format: String,
    /// Of `generate`: the command that runs llama.cpp on the same weights, "python3 tests/peers/llama-cpp/serve.py MODEL.gguf
    /// THREADS". Default: ours stands alone.
    #[arg(long, env = "STARLING_PEER_LLAMA_CPP", value_name = "COMMAND")]
    pub llama_cpp: Option<String>,
    /// A Python with torch, which `train` measures beside us.
    #[arg(long, env = "STARLING_PEER_TORCH", value_name = "PYTHON")]
    pub torch: Option<PathBuf>,
}

/// Benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchName {
    /// Episodes through begin, one chat, durable end, with a null engine.
    Episodes,
    /// What the gateway adds to a chat call.
    Gateway,
    /// What a call between two nodes costs, over TCP and over QUIC.
    Calls,
    /// Rollouts replicated durably to two holders.
    Replicate,
    /// Generated tokens per second.
    Generation,
    /// Generation with the model of `--model`, beside llama.cpp.
    Generate,
    /// Trained tokens per second.
    Training,
    /// Weights from one, two and four holders.
    Weights,
    /// From the kill of a leader to the next one and its first step, beside etcd.
    Failover,
    /// Seconds of one optimizer step on SmolLM2-135M, in full, by adapters, and on a shared prompt.
    Train,
    /// All of them but `train`.
    All,
}

/// `sim`.
#[derive(Debug, Args)]
pub struct SimArgs {
    /// A scenario file, or the name of a scenario of the library. Default: the whole library, seeds dealt in turn.
    pub scenario: Option<String>,
    /// Seeds, as A..B with both ends, or one.
    #[arg(long, default_value = "1", value_name = "A..B")]
    pub seeds: String,
    /// Run every seed on every scenario rather than dealing them.
    #[arg(long)]
    pub every: bool,
    /// Write a page to step through the run; needs one scenario and one seed.
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Run each seed again, and compare the traces.
    #[arg(long)]
    pub twice: bool,
    /// Go on after a violation.
    #[arg(long)]
    pub keep_going: bool,
    /// Runs at a time. Default: the number of cores.
    #[arg(long)]
    pub threads: Option<usize>,
    /// List the library.
    #[arg(long, conflicts_with_all = ["scenario", "report"])]
    pub list: bool,
    /// Print a scenario of the library: a start for one of your own.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["scenario", "report"])]
    pub show: Option<String>,
}

/// `demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Optimizer steps.
    #[arg(long)]
    pub steps: Option<u64>,
    /// Seed of tasks and sampling.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where the report goes.
    #[arg(long, default_value = "report")]
    pub report: PathBuf,
}
