//! The label of a rack: the path to it, from the outermost group of nodes to the rack, such as
//! `pod1/r3`.

/// The longest name of a host or label of a rack, in bytes (BOUND).
pub const MAX_LABEL_BYTES: usize = 255;

/// The most names in the label of a rack: the most tiers of groups of nodes (BOUND).
pub const MAX_TIERS: usize = 8;

/// A text is not the label of a rack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "1 to {MAX_TIERS} names with '/' between them, from the outermost group to the rack, such as \
     r3 or pod1/r3: at most {MAX_LABEL_BYTES} bytes, no empty name, no control characters"
)]
pub struct NoRackLabel;

/// Checks the label of a rack (TRUST). An empty one means no rack.
///
/// # Errors
/// [`NoRackLabel`] says what is accepted.
pub fn check_rack_label(label: &str) -> Result<(), NoRackLabel> {
    let fits = label.len() <= MAX_LABEL_BYTES
        && !label.chars().any(char::is_control)
        && label.split('/').count() <= MAX_TIERS
        && label.split('/').all(|name| !name.trim().is_empty());
    if fits || label.is_empty() { Ok(()) } else { Err(NoRackLabel) }
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
            assert_eq!(check_rack_label(label), Err(NoRackLabel), "{label}");
        }
        let accepted = NoRackLabel.to_string();
        assert!(accepted.starts_with("1 to 8 names") && accepted.contains("255 bytes"));
    }
}
