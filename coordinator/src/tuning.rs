//! Keeps measured times in a file of `tuning.directory` for the next job on the same cluster.
//!
//! The file's name is a fingerprint of the cluster: its hosts, racks and slots, and the settings
//! that affect times. The file is read when the world is complete, and replaced when the job ends.
//! A file that is damaged, too large or from another cluster is ignored with a warning (TRUST).

use std::{
    fmt::Write as _,
    fs,
    io::{self, Read as _, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
};

use gradwire_collectives::{Kind, Spec, Topology};
use gradwire_settings::Settings;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::model::{
    command::Node,
    learned::{Learned, Memory, Sizes, Time},
};

/// The largest file (BOUND).
const MAX_FILE: u64 = 1 << 20;

/// The version of the file's format. Since version 2, the size of quantized pieces counts elements.
const FORMAT: u32 = 2;

/// The most entries with sizes in a file.
const MAX_SIZES: usize = 64;

/// The largest exponent of a size, and the most pieces of a pipeline, in a file.
const MAX_SIZE: u32 = 40;
const MAX_PIECES: u32 = 1 << 16;

/// The longest time of a piece in a file: a day.
const MAX_MICROS: u64 = 24 * 3600 * 1_000_000;

/// Where the times of a job are kept, and the settings that affect them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tuning {
    directory: PathBuf,
    settings: String,
}

/// The file of one cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TuningFile {
    path: PathBuf,
    cluster: String,
    nodes: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: u32,
    cluster: String,
    classes: Vec<Class>,
    /// The times of sizes of pieces and chunks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sizes: Vec<SizesTime>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SizesTime {
    piece_bytes: u64,
    credit: u32,
    chunk_bytes: u64,
    permille: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Class {
    collective: String,
    root: u32,
    racks: Vec<u32>,
    /// The tiers above the racks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tiers: Vec<Vec<u32>>,
    /// The number of servers among the nodes.
    #[serde(default, skip_serializing_if = "is_default")]
    servers: u32,
    /// The rates of their lines, if they differ.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lines: Vec<u32>,
    /// Whether partial results travel in eight bits.
    #[serde(default, skip_serializing_if = "is_default")]
    quantized: bool,
    bytes_log2: u32,
    pieces: u32,
    times: Vec<Line>,
    /// The microseconds of a time of 1000, if known.
    #[serde(default, skip_serializing_if = "is_default")]
    micros: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    algorithm: String,
    permille: u32,
}

impl Tuning {
    /// The tuning by the settings; `None` if nothing is kept.
    pub(crate) fn of(settings: &Settings) -> Option<Self> {
        let Settings { tuning, data, negotiation, .. } = settings;
        if tuning.directory.is_empty() || !tuning.enabled || negotiation.strict {
            return None;
        }
        let settings = format!(
            "lanes {}, streams {}, chunk {}, compression {}, credit {}",
            data.lanes, data.streams, data.chunk_bytes, data.compression, negotiation.credit_pieces
        );
        Some(Self { directory: PathBuf::from(&tuning.directory), settings })
    }

    /// The file of a cluster.
    pub(crate) fn file(&self, nodes: &[Node]) -> TuningFile {
        let mut cluster = format!("gradwire {}; {}", env!("CARGO_PKG_VERSION"), self.settings);
        for Node { host, rack, slots, line_mbit, .. } in nodes {
            // Writing to a string can't fail.
            let _ = write!(cluster, "; {host} slots {slots} rack {rack:?} line {line_mbit}");
        }
        let digest = Sha256::digest(cluster.as_bytes());
        let name = digest.iter().take(8).fold(String::new(), |mut name, byte| {
            let _ = write!(name, "{byte:02x}");
            name
        });
        let path = self.directory.join(format!("{name}.json"));
        TuningFile { path, cluster, nodes: nodes.len() as u32 }
    }
}

impl TuningFile {
    /// The times of earlier jobs; empty if there is no valid file.
    pub(crate) fn read(&self) -> Memory {
        match self.content() {
            Ok(learned) => learned,
            Err(why) => {
                let file = self.path.display();
                tracing::warn!(%file, why, "ignoring the measured times of earlier jobs");
                Memory::default()
            }
        }
    }

    fn content(&self) -> Result<Memory, String> {
        let file = match fs::File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Memory::default());
            }
            Err(error) => return Err(error.to_string()),
        };
        let mut text = String::new();
        let read = file.take(MAX_FILE + 1).read_to_string(&mut text);
        if read.map_err(|error| error.to_string())? as u64 > MAX_FILE {
            return Err(format!("the file has more than {MAX_FILE} bytes"));
        }
        let content: Content = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        if content.format != FORMAT {
            return Err(format!("format {}, but this release needs {FORMAT}", content.format));
        }
        if content.cluster != self.cluster {
            return Err("the file is from another cluster".to_owned());
        }
        let classes = content.classes.into_iter().map(|class| class.checked(self.nodes));
        let sizes = content.sizes.into_iter().map(SizesTime::checked);
        Ok(Memory {
            classes: classes.collect::<Result<_, _>>()?,
            sizes: sizes.collect::<Result<_, _>>()?,
        })
    }

    /// Replaces the file. A failure is only logged.
    pub(crate) fn write(&self, learned: &Memory) {
        if let Err(error) = self.replace(learned) {
            let file = self.path.display();
            tracing::warn!(%file, %error, "measured times are not kept");
        }
    }

    fn replace(&self, memory: &Memory) -> io::Result<()> {
        let old = self.content().unwrap_or_default();
        let sizes = if memory.sizes.is_empty() { &old.sizes } else { &memory.sizes };
        let mut content = Content {
            format: FORMAT,
            cluster: self.cluster.clone(),
            classes: Vec::new(),
            sizes: sizes.iter().take(MAX_SIZES).map(SizesTime::of).collect(),
        };
        let learned = &memory.classes;
        let empty = serde_json::to_string(&content)?.len() as u64;
        let mut left = MAX_FILE.saturating_sub(empty);
        // Classes that did not occur in this job stay.
        let is_met = |old: &Learned| {
            let is_same = |new: &Learned| {
                (&new.topology, new.kind, new.quantized, new.size, new.pieces)
                    == (&old.topology, old.kind, old.quantized, old.size, old.pieces)
            };
            learned.iter().any(is_same)
        };
        let mut others = old.classes;
        others.retain(|old| !is_met(old));
        for class in learned.iter().chain(&others).filter_map(Class::of) {
            let bytes = serde_json::to_string(&class)?.len() as u64 + 1;
            if bytes <= left {
                left -= bytes;
                content.classes.push(class);
            }
        }
        let directory = self.path.parent().unwrap_or(&self.path);
        fs::create_dir_all(directory)?;
        // All users of a cluster may read it.
        let readable = fs::Permissions::from_mode(0o644);
        let mut file = tempfile::Builder::new().permissions(readable).tempfile_in(directory)?;
        file.write_all(serde_json::to_string(&content)?.as_bytes())?;
        file.persist(&self.path)?;
        Ok(())
    }
}

impl SizesTime {
    fn of(time: &Time<Sizes>) -> Self {
        let Sizes { piece, credit, chunk } = time.spec;
        Self { piece_bytes: piece, credit, chunk_bytes: chunk, permille: time.permille }
    }

    fn checked(self) -> Result<Time<Sizes>, String> {
        let Self { piece_bytes: piece, credit, chunk_bytes: chunk, permille } = self;
        let sizes = Sizes { piece, credit, chunk };
        if permille == 0 || !sizes.are_possible() {
            return Err("invalid sizes of pieces".to_owned());
        }
        Ok(Time { spec: sizes, permille })
    }
}

/// Whether a field has its default value, and is not written.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Class {
    /// The class to write; `None` if there is nothing to choose.
    fn of(learned: &Learned) -> Option<Self> {
        let root = learned.kind.root().unwrap_or(0);
        Kind::named(learned.kind.name(), root)?;
        let line = |time: &Time| Line { algorithm: time.spec.to_string(), permille: time.permille };
        Some(Self {
            collective: learned.kind.name().to_owned(),
            root,
            racks: learned.topology.racks().to_vec(),
            tiers: learned.topology.tiers()[1..].to_vec(),
            servers: learned.topology.servers(),
            lines: learned.topology.lines().to_vec(),
            quantized: learned.quantized,
            bytes_log2: learned.size,
            pieces: learned.pieces,
            times: learned.times.iter().map(line).collect(),
            micros: learned.micros,
        })
    }

    fn checked(self, nodes: u32) -> Result<Learned, String> {
        let Self { collective, root, racks, tiers, servers, lines, .. } = self;
        let Self { quantized, bytes_log2: size, pieces, times, micros, .. } = self;
        let participants = (racks.len() as u32).saturating_sub(servers);
        let kind = Kind::named(&collective, root);
        let fits = (2..=nodes).contains(&participants)
            && racks.len() <= nodes as usize
            && racks.iter().chain(tiers.iter().flatten()).all(|group| *group < nodes)
            && root < participants
            && (lines.is_empty() || lines.len() == racks.len())
            && size <= MAX_SIZE
            && (1..=MAX_PIECES).contains(&pieces)
            && micros <= MAX_MICROS;
        let topology = Topology::from_tiers(std::iter::once(racks).chain(tiers).collect());
        let Some((kind, topology)) = kind.zip(topology).filter(|_| fits) else {
            return Err("invalid class of pieces".to_owned());
        };
        let topology = topology.with_servers(servers).with_lines(&lines);
        let time = |line: Line| {
            let spec = Spec::parse(&line.algorithm).map_err(|error| error.to_string())?;
            if line.permille == 0 {
                return Err("invalid time".to_owned());
            }
            Ok(Time { spec, permille: line.permille })
        };
        let times = times.into_iter().map(time).collect::<Result<_, String>>()?;
        Ok(Learned { topology, kind, quantized, size, pieces, times, micros })
    }
}

/// Reads or writes a file on its own thread, which a hanging disk may block. Without a thread, the
/// work is skipped.
pub(crate) fn on_a_thread(work: impl FnOnce() + Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name("gw-tuning".to_owned()).spawn(work) {
        tracing::warn!(%error, "measured times are neither read nor kept: no thread");
    }
}

#[cfg(test)]
mod tests {
    use gradwire_collectives::Algorithm;
    use gradwire_proto::Rank;

    use super::*;

    fn node(host: &str) -> Node {
        Node {
            host: host.to_owned(),
            data_address: "10.0.0.1:1".to_owned(),
            metrics_address: None,
            first_rank: Rank(0),
            slots: 2,
            rack: String::new(),
            line_mbit: 0,
        }
    }

    fn settings(directory: &std::path::Path) -> Settings {
        let mut settings = Settings::default();
        settings.tuning.enabled = true;
        settings.tuning.directory = directory.display().to_string();
        settings
    }

    fn of(classes: Vec<Learned>) -> Memory {
        Memory { classes, sizes: Vec::new() }
    }

    fn learned(size: u32) -> Learned {
        let time = |algorithm: Algorithm, permille| Time { spec: algorithm.into(), permille };
        Learned {
            topology: Topology::flat(2),
            kind: Kind::Broadcast { root: 1 },
            quantized: false,
            size,
            pieces: 4,
            times: vec![time(Algorithm::Ring, 1250), time(Algorithm::Direct, 1000)],
            micros: 321,
        }
    }

    #[test]
    fn times_are_read_only_on_the_same_cluster() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("made/when/needed");
        let tuning = Tuning::of(&settings(&deep)).unwrap();
        let nodes = [node("a"), node("b")];
        let file = tuning.file(&nodes);
        assert_eq!(file.content(), Ok(Memory::default()), "a missing file is not an error");
        let quantized = Learned { quantized: true, ..learned(23) };
        let all = vec![learned(10), quantized];
        file.write(&of(all.clone()));
        assert_eq!(file.content(), Ok(of(all.clone())));
        // A job with other pieces keeps these.
        file.write(&of(vec![learned(12)]));
        let mut read = file.content().unwrap().classes;
        read.sort_by_key(|class| class.size);
        assert_eq!(read, [all[0].clone(), learned(12), all[1].clone()]);
        let other_slots = Node { slots: 3, ..node("b") };
        let other_rack = Node { rack: "r".to_owned(), ..node("b") };
        for other in [node("c"), other_slots, other_rack] {
            assert_ne!(tuning.file(&[node("a"), other]).path, file.path);
        }
        let mut other = settings(&deep);
        other.data.lanes = 7;
        assert_ne!(Tuning::of(&other).unwrap().file(&nodes).path, file.path);
        // Another cluster's file under this one's name.
        fs::copy(&file.path, tuning.file(&[node("c")]).path).unwrap();
        let foreign = tuning.file(&[node("c")]).content();
        assert_eq!(foreign, Err("the file is from another cluster".to_owned()));
        assert_eq!(fs::read_dir(&deep).unwrap().count(), 2, "no temporary file is left");
    }

    #[test]
    fn tiers_of_racks_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let nodes = ["a", "b", "c"].map(node);
        let file = Tuning::of(&settings(directory.path())).unwrap().file(&nodes);
        let with = |topology| vec![Learned { topology, ..learned(10) }];
        let racks = with(Topology::from_racks(vec![0, 1, 2]));
        file.write(&of(racks.clone()));
        let text = fs::read_to_string(&file.path).unwrap();
        assert!(!text.contains("tiers"), "a job without tiers does not write them");
        let tiers = with(Topology::from_labels(&["p/1", "p/2", "q/1"]));
        file.write(&of(tiers.clone()));
        let mut read = file.content().unwrap().classes;
        read.sort_by(|a, b| a.topology.cmp(&b.topology));
        assert_eq!(read, [racks, tiers].concat());
        let good = fs::read_to_string(&file.path).unwrap();
        assert!(good.contains("\"tiers\":[[0,0,1]]"), "{good}");
        for tiers in ["[[0,0,3]]", "[[0,0]]", "[[0,0,1],[0,1,1]]", "[[0],[0],[0],[0]]"] {
            fs::write(&file.path, good.replace("[[0,0,1]]", tiers)).unwrap();
            let error = file.content().unwrap_err();
            assert!(error.contains("invalid class of pieces"), "{error}");
        }
    }

    #[test]
    fn servers_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let nodes = ["a", "b", "c"].map(node);
        let file = Tuning::of(&settings(directory.path())).unwrap().file(&nodes);
        let topology = Topology::flat(3).with_servers(1);
        let learned = vec![Learned { topology, ..learned(10) }];
        file.write(&of(learned.clone()));
        assert_eq!(file.content().unwrap().classes, learned);
        let good = fs::read_to_string(&file.path).unwrap();
        assert!(good.contains("\"servers\":1"), "{good}");
        for servers in [2, 3, u32::MAX] {
            let wrong = good.replace("\"servers\":1", &format!("\"servers\":{servers}"));
            fs::write(&file.path, wrong).unwrap();
            let error = file.content().unwrap_err();
            assert!(error.contains("invalid class of pieces"), "{error}");
        }
    }

    #[test]
    fn times_are_kept_only_if_enabled() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(Tuning::of(&Settings::default()), None);
        let mut strict = settings(directory.path());
        strict.negotiation.strict = true;
        assert_eq!(Tuning::of(&strict), None);
        let mut disabled = settings(directory.path());
        disabled.tuning.enabled = false;
        assert_eq!(Tuning::of(&disabled), None);
    }

    #[test]
    fn damaged_files_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let file = Tuning::of(&settings(directory.path())).unwrap().file(&[node("a"), node("b")]);
        let sizes = Sizes { piece: 1 << 20, credit: 8, chunk: 65536 };
        let sizes = vec![Time { spec: sizes, permille: 1234 }];
        let memory = Memory { classes: vec![learned(10)], sizes };
        file.write(&memory);
        assert_eq!(file.content(), Ok(memory));
        let good = fs::read_to_string(&file.path).unwrap();
        assert!(file.content().is_ok());
        let cases = [
            (String::new(), "EOF"),
            (good[..good.len() / 2].to_owned(), "EOF"),
            (good.replace("\"format\":2", "\"format\":1"), "format 1, but"),
            (good.replace("\"direct\"", "\"zonk\""), "unknown algorithm \"zonk\""),
            (good.replace("1250", "0"), "invalid time"),
            (good.replace("1234", "0"), "invalid sizes of pieces"),
            (good.replace("65536", "1"), "invalid sizes of pieces"),
            (good.replace("1250", "-1"), "invalid value"),
            (good.replace("1250", "1e300"), "invalid type"),
            (good.replace("[0,0]", "[0,2]"), "invalid class of pieces"),
            (good.replace("[0,0]", "[0,0,0]"), "invalid class of pieces"),
            (good.replace("\"root\":1", "\"root\":2"), "invalid class of pieces"),
            (good.replace("\"bytes_log2\":10", "\"bytes_log2\":64"), "invalid class of pieces"),
            (good.replace("\"pieces\":4", "\"pieces\":0"), "invalid class of pieces"),
            (good.replace("\"pieces\"", "\"parts\""), "unknown field"),
            (good.replace("\"micros\":321", "\"micros\":86400000001"), "invalid class of pieces"),
            (good.replace("\"micros\":321", "\"micros\":-1"), "invalid value"),
            (good.clone() + &" ".repeat(1 << 20), "more than 1048576 bytes"),
        ];
        for (text, why) in cases {
            fs::write(&file.path, &text).unwrap();
            let error = file.content().unwrap_err();
            assert!(error.contains(why), "{error}");
            assert_eq!(file.read(), Memory::default());
        }
        fs::write(&file.path, [0xff, 0xfe]).unwrap();
        assert!(file.content().is_err());
        fs::remove_file(&file.path).unwrap();
        fs::create_dir(&file.path).unwrap();
        assert!(file.content().is_err());
        // The end of the job does not fail either.
        file.write(&of(vec![learned(10)]));
    }

    #[test]
    fn the_file_size_is_limited() {
        let directory = tempfile::tempdir().unwrap();
        let nodes: Vec<Node> = (0..64).map(|n| node(&format!("host-{n}"))).collect();
        let file = Tuning::of(&settings(directory.path())).unwrap().file(&nodes);
        let large = Learned { topology: Topology::flat(64), ..learned(10) };
        file.write(&of(vec![large; 20_000]));
        assert!(fs::metadata(&file.path).unwrap().len() <= MAX_FILE);
        let read = file.content().unwrap().classes.len();
        assert!(read > 1_000, "{read}");
    }
}
