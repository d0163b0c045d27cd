use starling_engine::bench::*;
use starling_engine::*;
#[test]
#[ignore]
fn prof_train() {
    let cfg = demo_config();
    let w = Weights::random(&cfg, &Device::Cpu, 1).unwrap();
    let tc = TrainerConfig { threads: 1, micro_batch_tokens: std::env::var("MB").map_or(512, |s| s.parse().unwrap()), ..Default::default() };
    training_tokens_per_s(&cfg, &w, &Device::Cpu, &tc, 256, 40, 4).unwrap();
}
#[test]
#[ignore]
fn prof_gen() {
    let cfg = demo_config();
    let w = Weights::random(&cfg, &Device::Cpu, 1).unwrap();
    let opts = InferenceOptions { max_batch: 64, threads: 1, ..Default::default() };
    generation_tokens_per_s(&cfg, &w, &Device::Cpu, &opts, 1024, 8, 64).unwrap();
}
