//! Speed of the demo's model; run by hand, on a quiet machine:
//! `cargo test --release -p starling-engine --test speed -- --ignored --nocapture`.
#![expect(clippy::print_stdout, reason = "the numbers are the purpose")]

use starling_engine::bench::{demo_config, generation_tokens_per_s, training_tokens_per_s};
use starling_engine::{Device, InferenceOptions, TrainerConfig, Weights};

/// Processor time of this process so far, in milliseconds: unlike wall time, it leaves other processes out.
fn cpu_ms() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    fields.iter().skip(11).take(2).filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() * 10.0
}

#[test]
#[ignore = "measures speed, asserts nothing"]
fn the_demo_model_generates_and_trains_at_these_speeds() {
    let cfg = demo_config();
    let weights = Weights::random(&cfg, &Device::Cpu, 1).unwrap();
    println!("parameters: {}", cfg.parameter_count());
    for threads in [1, 2] {
        for max_batch in [1, 16, 64, 128] {
            let opts = InferenceOptions { max_batch, threads, ..InferenceOptions::default() };
            let cpu = cpu_ms();
            let n = generation_tokens_per_s(&cfg, &weights, &Device::Cpu, &opts, max_batch * 8, 8, 64).unwrap();
            let cpu = (cpu_ms() - cpu) / 512.0;
            #[expect(clippy::cast_precision_loss, reason = "small")]
            let ms = 1e3 * max_batch as f64 / n;
            println!(
                "generate: {threads} threads, batch {max_batch}: {n:.0} tokens/s, {ms:.2} ms per step ({cpu:.2} cpu)"
            );
        }
        let opts = InferenceOptions { threads, ..InferenceOptions::default() };
        let n = generation_tokens_per_s(&cfg, &weights, &Device::Cpu, &opts, 512, 40, 1).unwrap() * 40.0;
        println!("prefill: {threads} threads, different prompts of 40: {n:.0} tokens/s");
        let tc = TrainerConfig { threads, ..TrainerConfig::default() };
        for samples in [256, 512] {
            let cpu = cpu_ms();
            let n = training_tokens_per_s(&cfg, &weights, &Device::Cpu, &tc, samples, 40, 5).unwrap();
            let cpu = (cpu_ms() - cpu) / 6.0;
            #[expect(clippy::cast_precision_loss, reason = "small")]
            let ms = 1e3 * (samples * 40) as f64 / n;
            println!(
                "train: {threads} threads, {samples} samples of 40: {n:.0} tokens/s, {ms:.0} ms per step ({cpu:.0} cpu)"
            );
        }
    }
}
