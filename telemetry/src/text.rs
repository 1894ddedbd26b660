//! Parses series in Prometheus's text format: the exporter of the `metrics` crate has no other way
//! to read its counters and gauges. (The crate `prometheus-parse` also splits labels at commas
//! within their values.)

/// A series: name, labels and value.
#[derive(Debug, PartialEq)]
pub(crate) struct Sample<'a> {
    pub(crate) name: &'a str,
    pub(crate) labels: Vec<(String, String)>,
    pub(crate) value: f64,
}

/// The series in a text; other lines are skipped.
pub(crate) fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest, '}')?,
        None => (Vec::new(), rest),
    };
    Some(Sample { name, labels, value: rest.trim().parse().ok()? })
}

/// Parses labels without braces.
pub(crate) fn labels_of(written: &str) -> Vec<(String, String)> {
    labels(written, '\0').map(|(labels, _)| labels).unwrap_or_default()
}

/// Labels up to `end`, or up to the end of the text if it is `\0`; and the rest.
fn labels(mut text: &str, end: char) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        text = text.strip_prefix(',').unwrap_or(text);
        if let Some(rest) = text.strip_prefix(end) {
            return Some((labels, rest));
        }
        if text.is_empty() {
            return (end == '\0').then_some((labels, text));
        }
        let (name, rest) = text.split_once("=\"")?;
        let (value, rest) = value(rest)?;
        labels.push((name.to_owned(), value));
        text = rest;
    }
}

/// A value up to its closing quotation mark, and the rest.
fn value(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_and_labels_are_parsed() {
        let text = "# HELP a_total what: {x=\"1\"} 2\n# TYPE a_total counter\na_total 3\n\
                    b{job=\"j\",host=\"a \\\"b\\\", {c}\\\\\\n=\"} 0.5\n\
                    broken{a=\"b} 1\nc{} 1e9\n\n";
        let found: Vec<_> = samples(text).collect();
        let own = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            found,
            [
                Sample { name: "a_total", labels: vec![], value: 3.0 },
                Sample {
                    name: "b",
                    labels: vec![own("job", "j"), own("host", "a \"b\", {c}\\\n=")],
                    value: 0.5
                },
                Sample { name: "c", labels: vec![], value: 1e9 },
            ]
        );
        assert_eq!(labels_of(""), []);
        assert_eq!(labels_of("a=\"1\",b=\"}\""), [own("a", "1"), own("b", "}")]);
    }
}
