//! Lists in the notation of Slurm, read without its program `scontrol`, which containers lack.
//! Pure; see "hostlist expressions" and `SLURM_TASKS_PER_NODE` in the manual of `srun`.

/// The variable with the hosts of a job.
pub(crate) const NODES: &str = "SLURM_JOB_NODELIST";

/// The most entries of a list (TRUST).
const MAX: usize = 65_536;

/// The hosts of an expression such as `a,n[01-03,7]-ib`, in order. `None`: it can't be read.
pub(crate) fn hosts(list: &str) -> Option<Vec<String>> {
    let mut all = Vec::new();
    for item in outside_brackets(list)? {
        let more = expand(item)?;
        if all.len() + more.len() > MAX {
            return None;
        }
        all.extend(more);
    }
    (!all.is_empty()).then_some(all)
}

/// The parts between the commas that are not in brackets.
fn outside_brackets(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut from, mut inside) = (Vec::new(), 0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            '[' | ']' => return None,
            ',' if !inside => {
                parts.push(&list[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[from..]);
    (!inside && parts.iter().all(|part| !part.is_empty())).then_some(parts)
}

/// The hosts of one part; it may have several brackets, which multiply.
fn expand(item: &str) -> Option<Vec<String>> {
    let Some((before, rest)) = item.split_once('[') else { return Some(vec![item.to_owned()]) };
    let (ranges, after) = rest.split_once(']')?;
    let (numbers, ends) = (numbers(ranges)?, expand(after)?);
    if numbers.len().checked_mul(ends.len())? > MAX {
        return None;
    }
    let of_number =
        |number: &String| ends.iter().map(|end| format!("{before}{number}{end}")).collect();
    Some(numbers.iter().flat_map(|number| -> Vec<String> { of_number(number) }).collect())
}

/// The numbers of ranges such as `01-03,7`. Zeros in front stay.
fn numbers(ranges: &str) -> Option<Vec<String>> {
    let mut all = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !is_number(first) || !is_number(last) {
            return None;
        }
        let (from, to): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        let count = usize::try_from(to.checked_sub(from)?).ok()?;
        if all.len().checked_add(count)? >= MAX {
            return None;
        }
        let width = first.len();
        all.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Some(all)
}

/// The tasks of each host, from a text such as `2(x3),1`. `None`: it can't be read.
pub(crate) fn tasks(text: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for item in text.split(',') {
        let (each, hosts) = match item.split_once("(x") {
            None => (item, 1),
            Some((each, hosts)) => (each, hosts.strip_suffix(')')?.parse().ok()?),
        };
        let each: u32 = each.parse().ok()?;
        if hosts > MAX || all.len() + hosts > MAX {
            return None;
        }
        all.extend(std::iter::repeat_n(each, hosts));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_expanded() {
        for (list, expected) in [
            ("a", "a"),
            ("a,b-1", "a b-1"),
            ("n[1-3]", "n1 n2 n3"),
            ("n[008-010,7],m2", "n008 n009 n010 n7 m2"),
            ("r[1-2]n[3,5]-ib", "r1n3-ib r1n5-ib r2n3-ib r2n5-ib"),
        ] {
            assert_eq!(hosts(list).unwrap().join(" "), expected, "{list}");
        }
        for wrong in ["", "a,", "a[", "a]", "a[]", "a[1-]", "a[2-1]", "a[x]", "a[1[2]]"] {
            assert_eq!(hosts(wrong), None, "{wrong}");
        }
        assert_eq!(hosts("n[0-65535]").map(|all| all.len()), Some(65_536));
        assert_eq!(hosts("n[0-4294967296]"), None);
        assert_eq!(hosts("n[0-999]m[0-999]"), None);
    }

    #[test]
    fn tasks_are_expanded() {
        assert_eq!(tasks("4"), Some(vec![4]));
        assert_eq!(tasks("2(x3),1"), Some(vec![2, 2, 2, 1]));
        for wrong in ["", "2(x", "2(x3", "x", "2,,1", "1(x99999999)"] {
            assert_eq!(tasks(wrong), None, "{wrong}");
        }
    }
}
