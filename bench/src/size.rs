//! Sizes, series of sizes, and line rates on a command line. Pure.

/// The largest size of a tensor, in bytes.
pub const MAX_BYTES: u64 = 1 << 56;

/// Splits `12.5Gbit` into its number and its unit.
fn split(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()))
}

/// Parses bytes like nccl-tests: `4`, `64K`, `256M`, `1G` in powers of 1024. `KiB` and so on mean
/// the same.
///
/// # Errors
/// What is wrong, and what is allowed.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, unit) = split(text);
    let unit = match unit {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1_u64 << 30,
        _ => return Err("not a size: a whole number with K, M or G, such as 64K".to_owned()),
    };
    let number: u64 =
        digits.parse().map_err(|_| "not a size: a whole number with K, M or G".to_owned())?;
    let bytes = number.checked_mul(unit).filter(|bytes| (1..=MAX_BYTES).contains(bytes));
    bytes.ok_or_else(|| "must be from 1 byte to 2^56 bytes".to_owned())
}

/// Parses the rate of a line like `tc`: `100Mbit`, `1Gbit`, `2.5Gbit`, in powers of 1000. `25g`
/// means the same as `25Gbit`.
///
/// # Errors
/// What is wrong, and what is allowed.
pub fn parse_rate(text: &str) -> Result<Rate, String> {
    const WRONG: &str = "not a rate: a number of kbit, Mbit or Gbit, such as 10Gbit";
    let (digits, unit) = split(text);
    let unit = match unit.to_ascii_lowercase().as_str() {
        "k" | "kbit" => 1e3,
        "m" | "mbit" => 1e6,
        "g" | "gbit" => 1e9,
        _ => return Err(WRONG.to_owned()),
    };
    let bits = digits.parse::<f64>().map_err(|_| WRONG.to_owned())? * unit;
    if !(1e3..=1e15).contains(&bits) {
        return Err("must be from 1kbit to 1000000Gbit".to_owned());
    }
    Ok(Rate { bits_per_second: bits })
}

/// The rate of a line in one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Bits per second.
    pub bits_per_second: f64,
}

impl Rate {
    /// The shortest time for `bytes`, in seconds.
    pub fn seconds(self, bytes: f64) -> f64 {
        bytes * 8.0 / self.bits_per_second
    }
}

/// The sizes from `begin` to `end` bytes, each `factor` times the previous one. Sizes are rounded
/// down to whole elements of `element` bytes.
///
/// # Errors
/// What is wrong, and what is allowed.
pub fn series(begin: u64, end: u64, factor: u64, element: u64) -> Result<Vec<u64>, String> {
    if begin > end {
        return Err(format!("-b {begin} is more than -e {end}"));
    }
    if factor < 2 {
        return Err(format!("-f must be at least 2, not {factor}"));
    }
    if begin < element {
        return Err(format!("-b {begin} is less than one element, which has {element} bytes"));
    }
    let next = |bytes: &u64| bytes.checked_mul(factor);
    let sizes = std::iter::successors(Some(begin), next).take_while(|bytes| *bytes <= end);
    Ok(sizes.map(|bytes| bytes / element * element).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_nccl_tests() {
        for (text, bytes) in
            [("4", 4), ("64K", 65536), ("256M", 256 << 20), ("1G", 1 << 30), ("8MiB", 8 << 20)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["12X", "", "K", "1.5M", "-4", "4 K", "0", "99999999999999999999", "99999999G"]
        {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert!(parse_bytes("12X").unwrap_err().contains("64K"));
    }

    #[test]
    fn a_rate_is_in_bits_per_second() {
        assert_eq!(parse_rate("1Gbit").unwrap().seconds(125e6), 1.0);
        assert_eq!(parse_rate("2.5gbit").unwrap().bits_per_second, 2.5e9);
        assert_eq!(parse_rate("25g"), parse_rate("25000M"));
        for text in ["1", "Gbit", "1GB", "0Gbit", "1.2.3Mbit", "9999999999Gbit"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_series_goes_from_begin_to_end() {
        assert_eq!(series(4, 64, 4, 4), Ok(vec![4, 16, 64]));
        assert_eq!(series(4, 65, 4, 4), Ok(vec![4, 16, 64]));
        assert_eq!(series(10, 10, 2, 4), Ok(vec![8]));
        assert_eq!(series(MAX_BYTES, MAX_BYTES, 1 << 20, 1), Ok(vec![MAX_BYTES]));
        for (bad, expected) in [
            (series(8, 4, 2, 4), "-b 8 is more than -e 4"),
            (series(4, 8, 1, 4), "-f must be at least 2, not 1"),
            (series(4, 8, 0, 4), "-f must be at least 2, not 0"),
            (series(4, 8, 2, 8), "less than one element, which has 8 bytes"),
        ] {
            assert!(bad.clone().is_err_and(|text| text.contains(expected)), "{bad:?}");
        }
    }
}
