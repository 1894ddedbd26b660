//! `gradwire algorithms`: lists the algorithms, or counts their messages on a cluster.

use std::fmt::Write;

use clap::Args;
use gradwire_collectives::{
    Algorithm, Kind, MAX_LINE_MBIT, Schedule, Spec, Topology,
    algorithms::{ALIASES, About, CHUNK, has_servers, in_short},
    generate,
    verify::{cross_tier_elements, verify},
};
use gradwire_launcher::error::CommandError;
use serde_json::{Value, json};

use crate::cluster::{self, Collective, Racks, aligned};

/// Elements per node of the counted piece: enough that rounding of block sizes does not matter, and
/// few enough that no share is cut into several blocks.
const ELEMENTS_PER_NODE: u64 = 1 << 12;

/// The algorithms to list or count.
#[derive(Debug, Args)]
pub struct Options {
    /// Only this algorithm, such as circulant(radix=4).
    pub name: Option<String>,
    /// Verify and count the schedules for N nodes.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    pub nodes: Option<u32>,
    /// Racks: their number, or nodes of each: 4,4,2.
    ///
    /// Racks may be in groups, and groups in larger groups.
    ///
    /// For example, 2x4 means two groups of four racks.
    #[arg(long, value_name = "R", requires = "nodes")]
    pub racks: Option<Racks>,
    /// Number of servers: nodes without ranks.
    #[arg(long, value_name = "K", requires = "nodes", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(..=128))]
    pub servers: u32,
    /// Line rates of nodes, then servers: 1,1,4.
    ///
    /// In any unit. The algorithm `servers` gives faster ones more work.
    #[arg(long, value_name = "RATE,…", requires = "nodes", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LINE_MBIT)))]
    pub lines: Vec<u32>,
    /// The collective to count.
    #[arg(long, requires = "nodes", default_value_t = Collective::Allreduce)]
    pub collective: Collective,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// The same topology with these line rates, if any are given.
fn with_lines(topology: Topology, lines: &[u32]) -> Result<Topology, CommandError> {
    let (nodes, given) = (topology.participants() as usize, lines.len());
    if ![0, nodes].contains(&given) {
        let what = format!("--lines has {given} rates, but there are {nodes} nodes and servers");
        return Err(CommandError::usage(what).hint("give one for each, servers last"));
    }
    Ok(topology.with_lines(lines))
}

/// The counts of an algorithm's schedules on a cluster.
struct Counted {
    spec: Spec,
    messages: u64,
    chain: u64,
    /// In pieces.
    busiest: f64,
    /// In pieces that leave the groups of each tier, the racks first.
    across: Vec<f64>,
}

/// Generates the schedules of all nodes, verifies them and counts.
fn count(spec: Spec, kind: Kind, topology: &Topology) -> Result<Counted, CommandError> {
    let without = topology.without_servers();
    let topology = if has_servers(kind, &spec) { topology } else { &without };
    let nodes = topology.participants();
    let elements = u64::from(nodes) * ELEMENTS_PER_NODE;
    let make = |me| generate(kind, spec, topology, me, elements);
    let schedules: Vec<Schedule> = (0..nodes).map(make).collect();
    let report = verify(&schedules, kind).map_err(|error| {
        CommandError::failed(format!("the schedules of {spec} for {nodes} nodes: {error}"))
            .hint("this is a bug in Gradwire: please report it")
    })?;
    let pieces = |sent: u64| sent as f64 / elements as f64;
    Ok(Counted {
        spec,
        messages: report.messages,
        chain: report.longest_chain,
        busiest: pieces(report.most_elements_sent),
        across: (1..=topology.tiers().len())
            .map(|tier| pieces(cross_tier_elements(&schedules, topology, tier)))
            .collect(),
    })
}

/// The output of the command.
///
/// # Errors
/// [`CommandError`] for an unknown algorithm, or one that does not fit the number of nodes.
pub fn show(options: &Options) -> Result<String, CommandError> {
    let named = options.name.as_deref().map(Spec::parse).transpose();
    let named = named.map_err(CommandError::usage)?;
    let specs = match named {
        Some(spec) => vec![spec],
        None => Algorithm::ALL.iter().copied().map(Spec::usual).collect(),
    };
    let Some(nodes) = options.nodes else {
        return Ok(match named {
            _ if options.json => written(&json!({ "algorithms": described(&specs) })),
            Some(spec) => in_full(spec),
            None => table(&specs),
        });
    };
    let topology = cluster::topology(nodes, options.servers, options.racks.as_ref())?;
    let topology = with_lines(topology, &options.lines)?;
    let kind = options.collective.kind();
    let mut counted = Vec::new();
    for spec in specs {
        spec.fits(nodes).map_err(CommandError::usage)?;
        counted.push(count(spec, kind, &topology)?);
    }
    Ok(if options.json {
        let rows: Vec<Value> = counted.iter().map(Counted::as_json).collect();
        written(&json!({
            "collective": options.collective.to_string(),
            "nodes": nodes,
            "servers": options.servers,
            "racks": cluster::racks(&topology),
            "tiers": cluster::tiers(&topology),
            "schedules": rows,
        }))
    } else {
        counts(&counted, options.collective, &topology)
    })
}

impl Counted {
    fn as_json(&self) -> Value {
        json!({
            "algorithm": self.spec.to_string(),
            "verified": true,
            "chain": self.chain,
            "messages": self.messages,
            "busiest_node_sends": self.busiest,
            "across_racks": self.across[0],
            "across_tiers": self.across,
        })
    }
}

fn parameters(algorithm: Algorithm) -> String {
    let all = algorithm.parameters().iter();
    all.map(|parameter| in_short(parameter.name, parameter.values)).collect::<Vec<_>>().join("; ")
}

/// The symbols of the costs.
const SYMBOLS: &str = "M nodes, S bytes, α for a message, β for a byte sent,\nγ for a byte \
                       reduced; r racks of w nodes, l tiers of groups.";

fn table(specs: &[Spec]) -> String {
    let rows = |head: [&str; 2], of: fn(Algorithm, &About) -> String| {
        let row = |algorithm: Algorithm| {
            vec![algorithm.name().to_owned(), of(algorithm, &algorithm.about())]
        };
        let head = head.map(str::to_owned).to_vec();
        let rows = specs.iter().map(Spec::algorithm).map(row);
        // Rows without a second column are left out.
        let rows = rows.filter(|row: &Vec<String>| !row[1].is_empty());
        let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
        aligned(&rows)
    };
    let uses = rows(["algorithm", "for"], |_, about| about.when.to_owned());
    let parameters = rows(["algorithm", "parameters"], |algorithm, _| parameters(algorithm));
    let costs = rows(["algorithm", "cost"], |_, about| about.cost.to_owned());
    let papers = rows(["algorithm", "paper"], |_, about| about.paper());
    let aliases: Vec<&str> = ALIASES.iter().map(|(alias, ..)| *alias).collect();
    let common = in_short(CHUNK.name, CHUNK.values);
    format!(
        "{uses}\n{parameters}\nAll also have {common}: {}.\n\nThe costs are for an allreduce: \
         {SYMBOLS}\n\n{costs}\n{papers}\n\
         Other names: {}.\n\nDetails of one: gradwire algorithms NAME. Counts on a cluster: \
         --nodes N --racks R\n",
        CHUNK.about,
        aliases.join(", ")
    )
}

fn in_full(spec: Spec) -> String {
    let algorithm = spec.algorithm();
    let About { idea, cost, when, source } = algorithm.about();
    let mut text = format!("{algorithm}: {idea}\n");
    // Writing to a string can't fail.
    for (alias, _, what) in ALIASES.iter().filter(|(_, of, _)| *of == algorithm) {
        let _ = writeln!(text, "  also    {alias}: {what}");
    }
    for (what, value) in [("for", when), ("cost", cost), ("source", source)] {
        let _ = writeln!(text, "  {what:<7} {value}");
    }
    for parameter in algorithm.parameters().iter().chain([&CHUNK]) {
        let short = in_short(parameter.name, parameter.values);
        let _ = writeln!(text, "  {short}: {}", parameter.about);
    }
    text + &format!(
        "The cost is for an allreduce: {SYMBOLS}\n\
         To use it: --set negotiation.algorithm=\"{spec}\"\n"
    )
}

fn counts(counted: &[Counted], collective: Collective, topology: &Topology) -> String {
    let mut head = ["algorithm", "chain", "messages", "busiest sends", "across racks"]
        .map(str::to_owned)
        .to_vec();
    let above = cluster::tiers(topology).split_off(1);
    head.extend(above.iter().map(|groups| format!("across {groups} groups")));
    let rows = counted.iter().map(|one| {
        let mut row = vec![one.spec.to_string(), one.chain.to_string(), one.messages.to_string()];
        row.extend([one.busiest].iter().chain(&one.across).map(|pieces| format!("{pieces:.2}")));
        row
    });
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    format!(
        "{collective} on {}: all schedules are verified.\nChain: the longest chain of dependent \
         messages. The last columns are in pieces.\n\n{}",
        cluster::in_words(topology),
        aligned(&rows)
    )
}

fn described(specs: &[Spec]) -> Vec<Value> {
    let one = |spec: &Spec| {
        let algorithm = spec.algorithm();
        let About { idea, cost, when, source } = algorithm.about();
        let parameters: Vec<Value> = algorithm
            .parameters()
            .iter()
            .chain([&CHUNK])
            .map(|parameter| {
                json!({
                    "name": parameter.name,
                    "about": parameter.about,
                    "values": parameter.values.to_string(),
                })
            })
            .collect();
        json!({
            "name": algorithm.name(), "idea": idea, "cost": cost, "for": when, "source": source,
            "parameters": parameters,
        })
    };
    specs.iter().map(one).collect()
}

fn written(value: &Value) -> String {
    format!("{value:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(name: Option<&str>, nodes: Option<u32>, racks: Option<&str>) -> Options {
        Options {
            name: name.map(str::to_owned),
            nodes,
            racks: racks.map(|racks| racks.parse().unwrap()),
            servers: 0,
            lines: Vec::new(),
            collective: Collective::Allreduce,
            json: false,
        }
    }

    fn row<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(name));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).split_whitespace().collect()
    }

    /// Table 1.10 of the literature's costs: 32 nodes in 4 racks.
    #[test]
    fn counts_are_those_of_the_closed_forms() {
        let text = show(&options(None, Some(32), Some("4"))).unwrap();
        assert!(text.contains("32 nodes in 4 racks of 8, 8, 8, 8"), "{text}");
        assert_eq!(row(&text, "ring")[1..], ["62", "1984", "1.94", "7.75"]);
        let across = |name| row(&text, name)[4];
        for name in ["hierarchical", "halving-doubling", "torus", "blueconnect", "circulant"] {
            assert_eq!(across(name), "6.00", "{name}");
        }
        assert_eq!(row(&text, "hierarchical")[1], "4");
        let linear = row(&text, "linear");
        assert_eq!((linear[1], linear[4]), ("2", "48.00"));
    }

    /// The least possible crosses every tier, and the chain has two messages for each.
    #[test]
    fn tiers_are_counted_one_by_one() {
        let text = show(&options(None, Some(32), Some("2x4"))).unwrap();
        assert!(
            text.contains("32 nodes in 8 racks of 4, 4, 4, 4, 4, 4, 4, 4, in 2 groups"),
            "{text}"
        );
        assert!(text.contains("across racks  across 2 groups"), "{text}");
        assert_eq!(row(&text, "hierarchical")[4..], ["14.00", "2.00"]);
        assert_eq!(row(&text, "hierarchical")[1], "6");
        assert_eq!(row(&text, "circulant")[4..], ["14.00", "2.00"]);
        assert_eq!(row(&text, "direct")[4..], ["56.00", "32.00"]);
        let json = Options { json: true, ..options(Some("hierarchical"), Some(16), Some("2x2x2")) };
        let json: Value = serde_json::from_str(&show(&json).unwrap()).unwrap();
        assert_eq!(json["tiers"], json!([8, 4, 2]));
        assert_eq!(json["schedules"][0]["across_tiers"], json!([14.0, 6.0, 2.0]));
        assert_eq!(json["schedules"][0]["across_racks"], 14.0);
    }

    /// BytePS: with as many servers as nodes each of them sends the piece once.
    #[test]
    fn servers_are_counted_where_they_take_part() {
        let of = |servers| Options { servers, ..options(None, Some(8), None) };
        let text = show(&of(8)).unwrap();
        assert!(text.contains("allreduce on 8 nodes and 8 servers in 1 rack"), "{text}");
        let servers = row(&text, "servers");
        assert_eq!((servers[1], servers[2], servers[3]), ("2", "128", "1.00"));
        assert_eq!(row(&text, "direct"), row(&show(&of(0)).unwrap(), "direct"));
        let four = show(&Options { racks: Some("6,6".parse().unwrap()), ..of(4) }).unwrap();
        assert!(four.contains("8 nodes and 4 servers in 2 racks of 6, 6"), "{four}");
        assert_eq!(row(&four, "servers")[3], "1.28");
    }

    /// A line that is three times as fast takes work from the others: it sends twice as much as in
    /// a ring, and no other node sends more than its own piece.
    #[test]
    fn faster_lines_do_more() {
        let of = |lines: &[u32]| Options { lines: lines.to_vec(), ..options(None, Some(4), None) };
        let text = show(&of(&[1, 1, 1, 3])).unwrap();
        assert!(
            text.contains("4 nodes in 1 rack, with lines of relative rates 1, 1, 1, 3"),
            "{text}"
        );
        assert_eq!((row(&text, "servers")[3], row(&text, "direct")[3]), ("3.00", "1.50"));
        let error = show(&of(&[1, 2])).unwrap_err().to_string();
        assert!(error.contains("--lines has 2 rates, but there are 4 nodes"), "{error}");
    }

    #[test]
    fn racks_may_be_unequal_but_must_fit() {
        let text = show(&options(Some("Direct"), Some(3), Some("2,1"))).unwrap();
        assert!(text.contains("3 nodes in 2 racks of 2, 1"), "{text}");
        for (name, nodes, racks, said) in [
            ("ring", 3, "2,2", "the racks have 4 nodes, but there are 3"),
            ("ring", 3, "4", "3 nodes can't be in 4 racks"),
            ("ring", 5, "2x3", "5 nodes can't be in 6 racks"),
            ("torus(dims=2x2)", 3, "1", "torus(dims=2x2) is for 4 nodes, and there are 3"),
            ("rng", 3, "1", "unknown algorithm \"rng\""),
        ] {
            let error = show(&options(Some(name), Some(nodes), Some(racks))).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
        for wrong in ["", "0", "2,0", "-1", "2,", "x", "2x", "2x0", "2x2,2", "1x1x1x1x1x1x1x1x1"] {
            assert!(wrong.parse::<Racks>().is_err(), "{wrong}");
        }
    }

    /// Names of the literature are found.
    #[test]
    fn other_names_lead_to_the_same() {
        for (alias, of, _) in ALIASES {
            let text = show(&options(Some(alias), None, None)).unwrap();
            assert!(text.starts_with(&format!("{of}: ")), "{text}");
            assert!(text.contains(&format!("also    {alias}: ")), "{text}");
        }
        let text = show(&options(Some("ParameterHub"), Some(32), Some("4"))).unwrap();
        assert_eq!(row(&text, "parameterhub")[1..], ["4", "1984", "1.94", "6.00"]);
        let text = show(&options(Some("blink"), Some(8), None)).unwrap();
        assert_eq!(row(&text, "blink")[1..], ["2", "112", "1.75", "0.00"]);
    }

    #[test]
    fn all_is_shown_as_text_and_as_json() {
        let text = show(&options(None, None, None)).unwrap();
        let one = show(&options(Some("circulant(radix=4)"), None, None)).unwrap();
        assert!(one.contains("radix=2 (2–64): into how many parts"), "{one}");
        assert!([&text, &one].iter().all(|text| text.contains("chunk=BYTES (4K–4M)")), "{text}");
        assert!(one.contains("negotiation.algorithm=\"circulant(radix=4)\""), "{one}");
        let json = Options { json: true, ..options(None, None, None) };
        let json: Value = serde_json::from_str(&show(&json).unwrap()).unwrap();
        for (at, algorithm) in Algorithm::ALL.iter().enumerate() {
            let rows = text.lines().filter(|line| line.starts_with(&format!("{algorithm} ")));
            let rows: Vec<&str> = rows.collect();
            let about = algorithm.about();
            let mut ends = vec![about.when.to_owned(), parameters(*algorithm)];
            ends.extend([about.cost.to_owned(), about.paper()]);
            ends.retain(|end| !end.is_empty());
            assert_eq!(rows.len(), ends.len(), "{algorithm}: {text}");
            assert!(rows.iter().zip(&ends).all(|(row, end)| row.ends_with(end)), "{text}");
            assert_eq!(json["algorithms"][at]["name"], algorithm.name());
            assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        }
        let counted = Options { json: true, ..options(Some("ring"), Some(4), Some("2")) };
        let counted: Value = serde_json::from_str(&show(&counted).unwrap()).unwrap();
        assert_eq!(counted["racks"], json!([2, 2]));
        assert_eq!(counted["schedules"][0]["busiest_node_sends"], 1.5);
    }
}
