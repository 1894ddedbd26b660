//! What users give the tasks of another launcher: where they meet, and the secret of their job.

use std::{
    collections::HashMap,
    fs::File,
    io::{ErrorKind, Read as _},
    net::SocketAddr,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    time::Duration,
};

use gradwire_proto::Secret;
use rustix::fs::OFlags;
use tokio::time::{Instant, sleep};

use crate::{error::CommandError, launch::places};

const SECRET: &str = "GRADWIRE_SECRET";
const SECRET_FILE: &str = "GRADWIRE_SECRET_FILE";
pub(super) const RENDEZVOUS: &str = "GRADWIRE_RENDEZVOUS";

/// The largest port of a rendezvous: the next one is for the store of PyTorch.
const MAX_PORT: u16 = u16::MAX - 1;

/// The pause between two look-ups of a name.
const PAUSE: Duration = Duration::from_millis(500);

/// The most bytes of a file with a secret: 64 digits and white space.
const MAX_SECRET: u64 = 256;

/// The secret in the environment, or in the file that it names; `None`: there is none.
///
/// # Errors
/// [`CommandError`] if it can't be read, is invalid, or others can read the file.
pub(super) fn secret(variables: &HashMap<String, String>) -> Result<Option<Secret>, CommandError> {
    if let Some(given) = variables.get(SECRET) {
        let bad = |error| CommandError::usage(format!("{SECRET}: {error}"));
        return Secret::from_hex(given.trim()).map(Some).map_err(bad);
    }
    let Some(path) = variables.get(SECRET_FILE).filter(|path| !path.is_empty()) else {
        return Ok(None);
    };
    let bad = |why: String| CommandError::usage(format!("{SECRET_FILE}={path}: {why}"));
    // Without waiting for a writer, if it is a pipe.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let opened = File::options().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::NotFound => format!("make it once: gradwire secret {path}"),
            _ => String::new(),
        };
        bad(error.to_string()).hint(hint)
    })?;
    let about = file.metadata().map_err(|error| bad(error.to_string()))?;
    if !about.is_file() {
        return Err(bad("it is not a regular file".to_owned()));
    }
    // The files of a secret of Kubernetes belong to root, and their group is that of the pod.
    let readers = if about.uid() == rustix::process::getuid().as_raw() { 0o077 } else { 0o007 };
    if about.mode() & readers != 0 {
        return Err(bad("others can read it".to_owned()).hint(format!("chmod 600 {path}")));
    }
    let mut text = String::new();
    let read = file.take(MAX_SECRET).read_to_string(&mut text);
    read.map_err(|error| bad(error.to_string()))?;
    Secret::from_hex(text.trim()).map(Some).map_err(|error| bad(error.to_string()))
}

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rendezvous {
    /// A name or an address.
    pub(super) host: String,
    pub(super) port: u16,
}

/// What `GRADWIRE_RENDEZVOUS` says: `host:port`, with an IPv6 address in brackets.
///
/// # Errors
/// [`CommandError`] for anything else.
pub(super) fn rendezvous(
    variables: &HashMap<String, String>,
) -> Result<Option<Rendezvous>, CommandError> {
    let Some(text) = variables.get(RENDEZVOUS).map(|text| text.trim()).filter(|t| !t.is_empty())
    else {
        return Ok(None);
    };
    let parse = || {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| (1..=MAX_PORT).contains(port))?;
        let host = match host.strip_prefix('[') {
            Some(address) => address.strip_suffix(']')?,
            None if host.contains(':') => return None,
            None => host,
        };
        (!host.is_empty()).then(|| Rendezvous { host: host.to_owned(), port })
    };
    let what = format!("{RENDEZVOUS}={text}: expected HOST:PORT, such as node1:29400");
    parse().map(Some).ok_or_else(|| CommandError::usage(what))
}

impl Rendezvous {
    /// Its address, looked up until it has one or `limit` has passed: names may appear late.
    ///
    /// # Errors
    /// [`CommandError`] at the end of this time.
    pub(super) async fn address(&self, limit: Duration) -> Result<SocketAddr, CommandError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(address) = places::resolve(&self.host).await {
                return Ok((address, self.port).into());
            }
            if Instant::now() >= deadline {
                let what = format!("no address for host {}, where rank 0 is to be", self.host);
                let hint = format!("set {RENDEZVOUS}=HOST:PORT to an address of that host");
                return Err(CommandError::failed(what).hint(hint));
            }
            sleep(PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn variables(name: &str, value: &str) -> HashMap<String, String> {
        HashMap::from([(name.to_owned(), value.to_owned())])
    }

    #[test]
    fn a_secret_file_must_be_private() {
        let path = std::env::temp_dir().join(format!("gradwire-secret-{}", std::process::id()));
        let given = variables(SECRET_FILE, path.to_str().unwrap());
        let error = secret(&given).unwrap_err().to_string();
        assert!(error.contains("GRADWIRE_SECRET_FILE=") && error.contains("No such"), "{error}");
        let right = Secret::generate();
        fs::write(&path, format!("{}\n", right.to_hex())).unwrap();
        let mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        mode(0o640);
        let error = secret(&given).unwrap_err().to_string();
        assert!(error.contains("others can read it\nhint: chmod 600"), "{error}");
        mode(0o600);
        assert_eq!(secret(&given).unwrap(), Some(right));
        fs::write(&path, "cafe").unwrap();
        let error = secret(&given).unwrap_err().to_string();
        assert!(error.contains("64") && !error.contains("cafe"), "{error}");
        fs::remove_file(&path).unwrap();
        assert_eq!(secret(&HashMap::new()).unwrap(), None);
        assert!(secret(&variables(SECRET, "x")).is_err());
    }

    #[test]
    fn a_rendezvous_is_a_host_and_a_port() {
        let read = |text: &str| rendezvous(&variables(RENDEZVOUS, text));
        for (text, host, port) in
            [("node1:29400", "node1", 29400), ("10.0.0.1:1", "10.0.0.1", 1), ("[::1]:5", "::1", 5)]
        {
            let expected = Rendezvous { host: host.to_owned(), port };
            assert_eq!(read(text).unwrap(), Some(expected), "{text}");
        }
        for wrong in ["node1", "node1:", ":1", "node1:0", "node1:65535", "::1:5", "[::1:5"] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains("expected HOST:PORT"), "{wrong}: {error}");
        }
        assert_eq!(read(" ").unwrap(), None);
    }

    #[tokio::test]
    async fn a_name_without_an_address_is_an_error() {
        let nowhere = Rendezvous { host: "no-such-host.invalid".to_owned(), port: 1 };
        let error = nowhere.address(Duration::ZERO).await.unwrap_err().to_string();
        assert!(error.contains("no-such-host.invalid"), "{error}");
        let here = Rendezvous { host: "127.0.0.1".to_owned(), port: 1 };
        assert_eq!(here.address(Duration::ZERO).await.unwrap(), ([127, 0, 0, 1], 1).into());
    }
}
