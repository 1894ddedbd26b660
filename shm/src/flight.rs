//! The memory of a node's flight recording ([`gradwire_trace::flight`]), and its file.
//!
//! The daemon makes the memory. It is anonymous, so nothing remains of it when all who have it have
//! ended (CLEAN). A process that is to outlive the daemon opens it, too: it finds the memory among
//! the descriptors of the daemon's process. So the recording can be saved after the daemon has been
//! killed.
//!
//! A file is written under another name first, so it is never half a recording.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use gradwire_trace::flight::{Flight, Image, words};

use crate::segment::{HugePages, Segment, SegmentError};

/// The beginning of the name of the memory. The job's id follows.
const NAME: &str = "gradwire-flight-";

/// The end of the name of a file.
pub const EXTENSION: &str = "flight";

/// The recording of a node.
#[derive(Debug)]
pub struct FlightMemory {
    segment: Segment,
    words: usize,
    held: Held,
}

impl FlightMemory {
    /// Makes the memory, and begins the recording. `order` is the place of the node in the order of
    /// all nodes.
    ///
    /// # Errors
    /// [`SegmentError`] if memory is missing.
    pub fn create(job: &str, host: &str, order: u32, ranks: u32) -> Result<Self, SegmentError> {
        let words = words(ranks as usize);
        let name = format!("{NAME}{job}");
        let (segment, fd) = Segment::create(&name, 8 * words as u64, HugePages::Never)?;
        let memory = Self { segment, words, held: Held::new(fd, 8 * words as u64) };
        Flight::begin(memory.cells()?, ranks, job, host, order);
        Ok(memory)
    }

    fn cells(&self) -> Result<&[std::sync::atomic::AtomicU64], SegmentError> {
        let bytes = self.segment.bytes();
        self.segment.cells(0, self.words).ok_or(SegmentError::Size { bytes })
    }

    /// The recording.
    pub fn flight(&self) -> Flight<'_> {
        Flight::of(self.cells().expect("`create` has made as many words"))
    }

    /// Writes the recording to a file in this folder, which is made if it does not exist. Returns
    /// the path.
    ///
    /// # Errors
    /// If the folder or the file can't be written.
    pub fn save(&self, folder: &Path) -> io::Result<PathBuf> {
        self.flight().saved(gradwire_trace::time::now_ns());
        self.held.save(folder)
    }
}

/// The memory of a recording, for a process that saves it after the end of the daemon.
#[derive(Debug)]
pub struct Held {
    /// Its position is shared.
    file: Mutex<File>,
    bytes: u64,
}

impl Held {
    fn new(fd: OwnedFd, bytes: u64) -> Self {
        Self { file: Mutex::new(File::from(fd)), bytes }
    }

    /// The recording of the daemon with this process id; `None` if it has none, or if this process
    /// may not look at its descriptors.
    pub fn of_daemon(pid: u32) -> Option<Self> {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let found = descriptors.flatten().find(|entry| {
            let target = fs::read_link(entry.path());
            target.is_ok_and(|to| to.to_string_lossy().starts_with(&format!("/memfd:{NAME}")))
        })?;
        let file = File::open(found.path()).ok()?;
        // The file ends with the last page of the memory.
        let pages = file.metadata().ok()?.len().min(Image::MAX_BYTES);
        let mut start = [0; 16];
        (&file).read_exact(&mut start).ok()?;
        let (_, ranks) = start.split_at(8);
        let ranks = u64::from_le_bytes(ranks.try_into().ok()?);
        let bytes = 8 * words(usize::try_from(ranks.min(pages)).ok()?) as u64;
        (bytes <= pages).then(|| Self { file: Mutex::new(file), bytes })
    }

    /// Writes the recording to a file in this folder, which is made if it does not exist. Returns
    /// the path.
    ///
    /// # Errors
    /// If the folder or the file can't be written, or the memory has no recording.
    pub fn save(&self, folder: &Path) -> io::Result<PathBuf> {
        static SAVED: AtomicU32 = AtomicU32::new(0);
        let image = self.read()?;
        let parsed = Image::parse(&image).map_err(io::Error::other)?;
        fs::create_dir_all(folder)?;
        // The id of a job consists of letters, digits, '-' and '_', unless it is damaged (TRUST).
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let job: String = parsed.job.chars().filter(|c| is_plain(*c)).collect();
        let path = folder.join(format!("{job}.{}.{EXTENSION}", parsed.node));
        let number = SAVED.fetch_add(1, Relaxed);
        let draft = folder.join(format!(".{job}.{}.{}.{number}", parsed.node, std::process::id()));
        let written = write(&draft, &image).and_then(|()| fs::rename(&draft, &path));
        if let Err(error) = written {
            // A full disk needs the room.
            let _ = fs::remove_file(&draft);
            return Err(error);
        }
        Ok(path)
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let mut file = self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut image = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        (&mut *file).take(self.bytes).read_to_end(&mut image)?;
        Ok(image)
    }
}

fn write(path: &Path, image: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(image)?;
    // Some file systems report a full disk only now.
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use gradwire_trace::flight::Submitted;

    use super::*;

    fn recording() -> FlightMemory {
        let memory = FlightMemory::create("test-job", "host", 3, 2).unwrap();
        memory.flight().event(1, 0, "it began");
        memory
    }

    #[test]
    fn another_process_finds_the_recording() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("made/too");
        let memory = recording();
        let held = Held::of_daemon(std::process::id()).unwrap();
        memory.flight().event(2, 0, "it went on");
        drop(memory);
        let path = held.save(&at).unwrap();
        assert_eq!(path, at.join("test-job.3.flight"));
        let image = Image::parse(&fs::read(&path).unwrap()).unwrap();
        assert_eq!((image.events.len(), image.ranks.len(), image.saved_ns), (2, 2, 0));
        assert!(Held::of_daemon(u32::MAX).is_none());
        // A second file takes the place of the first one, and nothing else remains.
        held.save(&at).unwrap();
        assert_eq!(fs::read_dir(&at).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(recording().save(&file).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    /// How long it takes to record an operation from its submission to its end: `cargo test -p
    /// gradwire-shm --release -- --ignored --nocapture nanoseconds`.
    #[test]
    #[ignore = "it measures"]
    fn nanoseconds_of_an_operation() {
        const COUNT: u64 = 1 << 20;
        let memory = recording();
        let now = gradwire_trace::time::now_ns;
        for (what, is_whole) in [("submission", false), ("whole operation", true)] {
            let began = now();
            for ticket in 1..=COUNT {
                let flight = memory.flight();
                let at = now();
                let submitted = Submitted {
                    ticket,
                    name: "model.layers.31.self_attn.q_proj.weight",
                    site: "train.py:312 in step",
                    collective: 1,
                    dtype: 2,
                    reduce_op: 1,
                    process_set: 0,
                    root: 0,
                    receiver: 0,
                    bytes: 1 << 20,
                    tensors: 1,
                    dims: &[4096, 4096],
                };
                flight.submitted(0, at, &submitted);
                if is_whole {
                    flight.announced(0, ticket, at);
                    flight.ordered(0, ticket, at, Some(ticket));
                    flight.begun(0, ticket, at);
                    flight.ended(0, ticket, now(), gradwire_trace::flight::Outcome::Done);
                }
            }
            println!("{what}: {} ns", (now() - began) as f64 / COUNT as f64);
        }
    }
}
