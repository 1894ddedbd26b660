//! `--dry-run`: shows what would be started, and starts nothing.

use std::{collections::HashMap, fmt::Write, net::IpAddr};

use gradwire_services::launch::{HERE, Text};
use gradwire_settings::Settings;

use super::plan::{Places, Plan, count};
use crate::reach::remote;

/// The plan as text. Values that only a running job has are shown as `<value>`, as is the secret.
pub fn describe(plan: &Plan, settings: &Settings, local: &[bool]) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        // Writing to a string can't fail.
        let _ = writeln!(text, "{line}");
    };
    let servers = match plan.servers() {
        0 => String::new(),
        servers => format!(" and {}", count(servers, "server")),
    };
    let hosts = plan.nodes.len() - plan.servers();
    line(format!(
        "job {}: {} on {}{servers}",
        plan.job,
        count(plan.size(), "rank"),
        count(hosts, "host")
    ));
    let command: Vec<_> = [&plan.program].into_iter().chain(&plan.args).map(quote).collect();
    let unknown = IpAddr::from([0, 0, 0, 0]);
    let places = Places {
        addresses: vec![unknown; plan.nodes.len()],
        master_port: 0,
        daemon_metrics: vec!["<daemon's metrics>".to_owned(); plan.nodes.len()],
    };
    let later: HashMap<&str, &str> = [
        ("GRADWIRE_SECRET", "<secret>"),
        ("MASTER_ADDR", "<first host's address>"),
        ("MASTER_PORT", "<free port>"),
        ("GRADWIRE_ADDRESS", "<this host's address>"),
        ("GRADWIRE_COORDINATOR", "<first daemon's address>"),
    ]
    .into();
    let shown = |variables: super::plan::Variables| -> String {
        let pairs: Vec<_> = variables
            .iter()
            .map(|(name, value)| {
                let known = value == HERE;
                let later = later.get(name.as_str()).filter(|_| !known);
                format!("{name}={}", later.unwrap_or(&&**value))
            })
            .collect();
        pairs.join(" ")
    };
    for (i, node) in plan.nodes.iter().enumerate() {
        let agent = if local.get(i) == Some(&true) {
            "gradwire agent".to_owned()
        } else {
            let (program, there) = remote(&node.host, settings);
            format!("{} {} agent", program.join(" "), there.join(" "))
        };
        line(format!("\nhost {} ({agent})", node.host));
        let coordinator = (i > 0).then_some((unknown, 0).into());
        let daemon = plan.daemon_variables(i, unknown, coordinator);
        line(format!("  daemon: {}", shown(daemon)));
        for rank in node.first_rank..node.first_rank + node.ranks() {
            line(format!("  rank {rank}: {}", command.join(" ")));
            line(format!("    {}", shown(plan.rank_variables(i, rank, &places))));
        }
    }
    text
}

/// A word, quoted for a shell.
fn quote(word: &Text) -> String {
    let word = word.to_string();
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_./=:,+@%".contains(&b);
    if !word.is_empty() && word.bytes().all(plain) {
        return word;
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use gradwire_settings::Layers;

    use super::*;
    use crate::launch::hosts::parse_list;

    #[test]
    fn all_but_the_secret_is_shown() {
        let nodes = Plan::nodes(&parse_list("a:2,b:1").unwrap(), None).unwrap();
        let loaded = Settings::load(&Layers::default()).unwrap();
        let args = vec!["-c".to_owned(), "echo it's".to_owned()];
        let plan = Plan::new(nodes, "sh", args, &loaded).unwrap();
        let text = describe(&plan, &loaded.settings, &[true, false]);
        assert!(!text.contains(&plan.secret.to_hex()), "TRUST");
        let nodes = Plan::nodes(&parse_list("a:1").unwrap(), None).unwrap();
        let one = Plan::new(nodes, "sh", ["x"], &loaded).unwrap();
        assert!(describe(&one, &loaded.settings, &[true]).contains(": 1 rank on 1 host\n"));
        for expected in [
            "3 ranks on 2 hosts",
            "host a (gradwire agent)",
            "host b (ssh -o BatchMode=yes",
            " b sh -c 'p=/",
            "exec $p \"$@\"' gradwire agent)",
            "rank 2: sh -c 'echo it'\\''s'",
            "GRADWIRE_SECRET=<secret>",
            "GRADWIRE_CROSS_SIZE=2",
        ] {
            assert!(text.contains(expected), "no {expected} in {text}");
        }
    }
}
