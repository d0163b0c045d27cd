//! One number from which everything random in a test follows.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// A test's seed: that of `TEST_SEED`, or a new one. It is printed when it is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Seed(pub u64);

impl Seed {
    /// Draws it.
    #[must_use]
    pub fn draw() -> Self {
        let given = std::env::var("TEST_SEED").ok().and_then(|s| s.trim().parse().ok());
        let seed = given.unwrap_or_else(|| rand::random::<u64>() % 1_000_000);
        eprintln!("seed {seed}: run this again with TEST_SEED={seed}");
        Self(seed)
    }

    /// The generator.
    #[must_use]
    pub fn rng(self) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(self.0)
    }
}
