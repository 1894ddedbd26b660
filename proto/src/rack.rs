//! Rack labels: the path from the outermost group of nodes to the rack, such as `pod1/r3`.

/// The longest host name or rack label, in bytes (BOUND).
pub const MAX_LABEL_BYTES: usize = 255;

/// The most names in a rack label: the most tiers of groups of nodes (BOUND).
pub const MAX_TIERS: usize = 8;

/// A text is not a rack label. The error text says what is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "1 to {MAX_TIERS} names with '/' between them, from the outermost group to the rack, such as \
     r3 or pod1/r3: at most {MAX_LABEL_BYTES} bytes, no empty name, no control characters"
)]
pub struct InvalidRackLabel;

/// Checks a rack label (TRUST). An empty label means no rack.
pub fn check_rack_label(label: &str) -> Result<(), InvalidRackLabel> {
    let fits = label.len() <= MAX_LABEL_BYTES
        && !label.chars().any(char::is_control)
        && label.split('/').count() <= MAX_TIERS
        && label.split('/').all(|name| !name.trim().is_empty());
    if fits || label.is_empty() { Ok(()) } else { Err(InvalidRackLabel) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_paths_without_empty_names() {
        let longest = "x".repeat(MAX_LABEL_BYTES);
        for label in ["", "r3", "pod1/r3", "eu west/a:1/2", "1/2/3/4/5/6/7/8", &longest] {
            assert_eq!(check_rack_label(label), Ok(()), "{label}");
        }
        let longer = longest + "x";
        for label in ["/", "/a", "a/", "a//b", "a/ /b", "1/2/3/4/5/6/7/8/9", "a\nb", &longer] {
            assert_eq!(check_rack_label(label), Err(InvalidRackLabel), "{label}");
        }
        let accepted = InvalidRackLabel.to_string();
        assert!(accepted.starts_with("1 to 8 names") && accepted.contains("255 bytes"));
    }
}
