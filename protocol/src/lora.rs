//! Low-rank adapters: which matrices get one, how large, and how they are scaled.
//!
//! Hu et al., arXiv:2106.09685: a frozen matrix `W [out, in]` is used as `W + (alpha / rank) · B · A`, with `A [rank, in]`
//! and `B [out, rank]` trained in its place.

use crate::job::{JobError, need};
use serde::{Deserialize, Serialize};

/// A linear layer of a decoder by its Hugging Face name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoraTarget {
    /// Queries.
    QProj,
    /// Keys.
    KProj,
    /// Values.
    VProj,
    /// Attention's output.
    OProj,
    /// Gate of SwiGLU.
    GateProj,
    /// Its other half.
    UpProj,
    /// The way back.
    DownProj,
}

impl LoraTarget {
    /// Every linear layer of a decoder layer, in the order of its tensors.
    pub const ALL: [Self; 7] =
        [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

    /// Its name in `job.toml`, in tensors and in PEFT's `target_modules`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
        }
    }
}

/// Adapters of one rank on some layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraSpec {
    /// Rows of `A` and columns of `B`, 1 to 512. 8 to 64 is usual; memory and arithmetic of the adapters grow with it.
    pub rank: u32,
    /// `B · A` counts `alpha / rank` times; above 0.
    pub alpha: f64,
    /// Which layers; each at most once.
    pub targets: Vec<LoraTarget>,
}

impl LoraSpec {
    /// The factor of `B · A`.
    ///
    /// ```
    /// use starling_protocol::lora::{LoraSpec, LoraTarget};
    /// let spec = LoraSpec { rank: 16, alpha: 32.0, targets: LoraTarget::ALL.to_vec() };
    /// assert_eq!(spec.scale(), 2.0);
    /// ```
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.alpha / f64::from(self.rank)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`JobError`] for the first field that cannot be.
    pub fn validate(&self) -> Result<(), JobError> {
        need((1..=512).contains(&self.rank), "trainer.lora.rank", "1 to 512", self.rank)?;
        need(self.alpha > 0.0 && self.alpha.is_finite(), "trainer.lora.alpha", "a finite number above 0", self.alpha)?;
        need(!self.targets.is_empty(), "trainer.lora.targets", "at least one layer", "none")?;
        for (i, target) in self.targets.iter().enumerate() {
            let first = !self.targets[..i].contains(target);
            need(first, "trainer.lora.targets", "each layer once", target.name())?;
        }
        Ok(())
    }
}
