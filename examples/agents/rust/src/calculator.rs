//! The tool: one operation on two integers.

/// Computes `a+b`, `a-b` or `a*b`; spaces are ignored, numbers may be negative. `None` for anything else.
pub(crate) fn calc(x: &str) -> Option<String> {
    let x: String = x.chars().filter(|c| *c != ' ').collect();
    // The operator is the first sign that has a digit before it.
    let at = x.find(['+', '-', '*']).filter(|at| *at > 0).or_else(|| Some(x.get(1..)?.find(['+', '-', '*'])? + 1))?;
    let (left, right) = (number(&x[..at])?, number(&x[at + 1..])?);
    let result = match &x[at..=at] {
        "+" => left.checked_add(right),
        "-" => left.checked_sub(right),
        _ => left.checked_mul(right),
    };
    Some(result?.to_string())
}

/// Digits with an optional minus; Rust's own parser would also take a plus.
fn number(text: &str) -> Option<i64> {
    text.strip_prefix('-').unwrap_or(text).starts_with(|c: char| c.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::calc;

    #[test]
    fn one_operation_on_two_integers() {
        for (x, expected) in
            [("34*56", "1904"), ("12 + 34", "46"), ("91-1904", "-1813"), ("-5*-3", "15"), ("-5-3", "-8"), ("5--3", "8")]
        {
            assert_eq!(calc(x).as_deref(), Some(expected), "{x}");
        }
    }

    #[test]
    fn anything_else_is_an_error() {
        for x in [
            "",
            "-",
            "12",
            "-12",
            "12+",
            "+12",
            "12+34*56",
            "12/4",
            "1.5+2",
            "a+b",
            "12+é",
            "é+1",
            "1++2",
            "9223372036854775807*2",
        ] {
            assert_eq!(calc(x), None, "{x}");
        }
    }
}
