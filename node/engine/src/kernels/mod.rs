//! CPU kernels over plain `f32` slices: the arithmetic of the fused operators, of decoding and of the optimizer.
//!
//! Every kernel is written once as a portable loop and compiled for three instruction sets; the best one
//! the processor offers is taken at run time. A result for one row never depends on which other rows are
//! computed along with it, so a sequence gets the same bits in any batch.

pub(crate) mod attention;
pub(crate) mod attention_grad;
pub(crate) mod elementwise;
#[cfg(test)]
mod gradient_tests;
pub(crate) mod logprob;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod q8;
pub(crate) mod rope;

/// The instruction sets that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SimdLevel {
    /// Whatever the compilation target guarantees.
    Baseline,
    /// AVX2 with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

#[cfg(test)]
thread_local! {
    /// A lower level that a test asks for, on its own thread.
    static FORCED: std::cell::Cell<Option<SimdLevel>> = const { std::cell::Cell::new(None) };
}

/// Runs `f` once for every instruction set that this processor has.
#[cfg(test)]
pub(crate) fn at_every_level(mut f: impl FnMut(SimdLevel)) {
    let best = simd_level();
    let mut levels = vec![SimdLevel::Baseline];
    #[cfg(target_arch = "x86_64")]
    levels.extend([SimdLevel::Avx2, SimdLevel::Avx512].into_iter().filter(|l| *l == best || best == SimdLevel::Avx512));
    for level in levels {
        FORCED.with(|c| c.set(Some(level)));
        f(level);
    }
    FORCED.with(|c| c.set(None));
    assert_eq!(simd_level(), best);
}

/// The best instruction set of this processor, probed once.
#[inline]
pub(crate) fn simd_level() -> SimdLevel {
    #[cfg(test)]
    if let Some(level) = FORCED.with(std::cell::Cell::get) {
        return level;
    }
    #[cfg(target_arch = "x86_64")]
    {
        static LEVEL: std::sync::OnceLock<SimdLevel> = std::sync::OnceLock::new();
        *LEVEL.get_or_init(|| {
            let fma = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
            let v4 = std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512dq")
                && std::is_x86_feature_detected!("avx512vl");
            match (fma, v4) {
                (true, true) => SimdLevel::Avx512,
                (true, false) => SimdLevel::Avx2,
                (false, _) => SimdLevel::Baseline,
            }
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        SimdLevel::Baseline
    }
}

/// Whether the compilation target has a fused multiply-add without any probing.
pub(crate) const BASELINE_FMA: bool = cfg!(target_arch = "aarch64") || cfg!(target_feature = "fma");

/// Compiles the generic body `$body::<FMA>` for each instruction set and picks one at run time.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[inline]
        #[expect(clippy::allow_attributes_without_reason, clippy::allow_attributes, reason = "generated code")]
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                #[allow(clippy::too_many_arguments)]
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                match $crate::kernels::simd_level() {
                    // SAFETY: simd_level returns Avx512 only where the processor has every feature named above.
                    $crate::kernels::SimdLevel::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: simd_level returns Avx2 only where the processor has AVX2 and FMA.
                    $crate::kernels::SimdLevel::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::kernels::SimdLevel::Baseline => {}
                }
            }
            $body::<{ $crate::kernels::BASELINE_FMA }>($($arg),*)
        }
    };
}
pub(crate) use simd_fn;
