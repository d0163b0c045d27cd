//! Sizes and times as people type them: `20GiB`, `36h`.

use anyhow::bail;
use std::time::Duration;

/// Bytes of `512MiB`, `20GiB`, `1.5TiB` or a bare number.
///
/// # Errors
/// Says what was expected and what came.
pub fn parse_bytes(text: &str) -> anyhow::Result<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let (number, shift) =
        units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift))).unwrap_or((text, 0));
    match number.trim().parse::<f64>() {
        // Within what an f64 counts exactly, so nothing is lost.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be in range")]
        Ok(n)
            if n >= 0.0 && n * f64::from(1u32 << shift.min(30)) * f64::from(1u32 << (shift - shift.min(30))) < 9e15 =>
        {
            Ok((n * f64::from(1u32 << shift.min(30)) * f64::from(1u32 << (shift - shift.min(30)))) as u64)
        }
        _ => bail!("expected a size such as 512MiB, 20GiB or 1.5TiB, got {text:?}"),
    }
}

/// A time such as `250ms`, `90s`, `15m`, `36h` or `7d`.
///
/// # Errors
/// Says what was expected and what came.
pub fn parse_time(text: &str) -> anyhow::Result<Duration> {
    // The first that fits counts: `ms` ends as `s` does.
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    let found = units.iter().find_map(|(unit, ms)| Some((text.strip_suffix(unit)?, *ms)));
    match found.map(|(n, ms)| (n.trim().parse::<u32>(), ms)) {
        Some((Ok(n), ms)) => Ok(Duration::from_millis(u64::from(n) * ms)),
        _ => bail!("expected a time such as 250ms, 90s, 15m, 36h or 7d, got {text:?}"),
    }
}

/// `bytes` for people, with one digit behind the point.
#[must_use]
pub fn show_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = usize::try_from(bytes.max(1).ilog2() / 10).unwrap_or(0).min(units.len() - 1);
    if at == 0 {
        return format!("{bytes} B");
    }
    // A tenth of a unit is what people need of it.
    let tenths = u128::from(bytes) * 10 / (1 << (10 * at));
    format!("{}.{} {}", tenths / 10, tenths % 10, units[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        assert_eq!(parse_bytes("20GiB").unwrap(), 20 << 30);
        assert_eq!(parse_bytes("1.5 TiB").unwrap(), 3 << 39);
        assert_eq!(parse_bytes("7").unwrap(), 7);
        for bad in ["", "GiB", "-1MiB", "20GB", "1e30", "nan", "inf"] {
            let err = parse_bytes(bad).unwrap_err().to_string();
            assert!(err.starts_with("expected a size") && err.contains(bad), "{err}");
        }
        assert_eq!((show_bytes(0), show_bytes(1536)), ("0 B".into(), "1.5 KiB".into()));
        assert_eq!(show_bytes(u64::MAX), "16777215.9 TiB");
    }

    #[test]
    fn times_are_read() {
        assert_eq!(parse_time("36h").unwrap(), Duration::from_secs(129_600));
        assert_eq!(parse_time("250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(parse_time("2s").unwrap(), Duration::from_secs(2));
        for bad in ["", "h", "1.5h", "-1s", "7", "99999999999d"] {
            assert!(parse_time(bad).unwrap_err().to_string().starts_with("expected a time"), "{bad}");
        }
    }
}
