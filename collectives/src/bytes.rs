//! Parsing and printing of sizes in rules and specs.

/// A number of bytes: `65536`, `64K` or `64KiB`.
pub(crate) fn parse(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return None,
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse::<u64>().ok()?.checked_mul(1 << shift)).flatten()
}

/// Prints the exact number, in the largest unit that divides it.
pub(crate) fn written(bytes: u64) -> String {
    let shift =
        [30, 20, 10].into_iter().find(|&shift| bytes != 0 && bytes.is_multiple_of(1 << shift));
    match shift {
        Some(30) => format!("{}G", bytes >> 30),
        Some(20) => format!("{}M", bytes >> 20),
        Some(_) => format!("{}K", bytes >> 10),
        None => bytes.to_string(),
    }
}
