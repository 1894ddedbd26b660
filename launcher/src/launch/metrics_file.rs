//! The file of `--metrics-sd`, which tells Prometheus where the daemons of a job serve their
//! metrics (`file_sd`). It exists while the job runs.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use serde_json::json;

use crate::{
    error::{CommandError, print_line},
    run_file::write_whole,
};

/// Where a daemon serves its metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonMetrics {
    /// The host, as the user named it.
    pub host: String,
    /// The address of the host.
    pub host_address: IpAddr,
    /// The address of the metrics.
    pub metrics: SocketAddr,
}

/// The file of a job, which is removed when this is dropped.
#[derive(Debug)]
pub(super) struct MetricsFile {
    path: PathBuf,
    job: String,
    /// The user knows that metrics can't be read from elsewhere.
    has_hinted: bool,
}

impl MetricsFile {
    /// Creates the folder if it does not exist, and in it a file without targets. So an error is
    /// known before the job starts.
    pub(super) fn create(folder: &Path, job: &str) -> Result<Self, CommandError> {
        let path = path(folder, job);
        let made = fs::create_dir_all(folder);
        let file = Self { path, job: job.to_owned(), has_hinted: false };
        made.and_then(|()| file.write(&[])).map_err(|error| {
            let at = file.path.display();
            CommandError::failed(format!("--metrics-sd: {at} can't be written: {error}"))
                .hint("name a folder in which you may create files; it need not exist")
        })?;
        Ok(file)
    }

    fn write(&self, daemons: &[DaemonMetrics]) -> io::Result<()> {
        write_whole(&self.path, 0o666, content(&self.job, daemons).as_bytes())
    }

    /// Lists the daemons, in each epoch. If that fails, the job goes on.
    pub(super) fn list(&mut self, daemons: &[DaemonMetrics]) {
        if let Err(error) = self.write(daemons) {
            let at = self.path.display();
            print_line(format!("gradwire: --metrics-sd: {at} can't be written: {error}"));
        }
        if let Some(host) =
            hidden(daemons).filter(|_| !std::mem::replace(&mut self.has_hinted, true))
        {
            print_line(format!(
                "gradwire: --metrics-sd: only programs on host {host} can read its metrics; set \
                 metrics.listen=0.0.0.0:9401-9499 to let Prometheus on another host read them"
            ));
        }
    }
}

/// The file of a job in a folder.
pub(super) fn path(folder: &Path, job: &str) -> PathBuf {
    folder.join(format!("gradwire-{job}.json"))
}

impl Drop for MetricsFile {
    fn drop(&mut self) {
        // If it is gone already, all is well.
        let _ = fs::remove_file(&self.path);
    }
}

/// A host that others can reach, but whose metrics they can't.
fn hidden(daemons: &[DaemonMetrics]) -> Option<&str> {
    let is_hidden = |daemon: &&DaemonMetrics| {
        daemon.metrics.ip().is_loopback() && !daemon.host_address.is_loopback()
    };
    daemons.iter().find(is_hidden).map(|daemon| daemon.host.as_str())
}

fn content(job: &str, daemons: &[DaemonMetrics]) -> String {
    let group = |(node, daemon): (usize, &DaemonMetrics)| {
        let labels = json!({"gradwire_job": job, "host": daemon.host, "node": node.to_string()});
        json!({"targets": [daemon.metrics], "labels": labels})
    };
    let groups: Vec<_> = daemons.iter().enumerate().map(group).collect();
    format!("{:#}\n", serde_json::Value::Array(groups))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon(host: &str, address: [u8; 4], metrics: &str) -> DaemonMetrics {
        let metrics = metrics.parse().unwrap();
        DaemonMetrics { host: host.to_owned(), host_address: address.into(), metrics }
    }

    #[test]
    fn it_lists_daemons_while_the_job_runs() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("new");
        let mut file = MetricsFile::create(&at, "j1").unwrap();
        let read = || {
            let text = fs::read_to_string(at.join("gradwire-j1.json")).unwrap();
            serde_json::from_str::<serde_json::Value>(&text).unwrap()
        };
        assert_eq!(read(), json!([]));
        file.list(&[daemon("a \"b\"", [127, 0, 0, 1], "127.0.0.1:9401")]);
        let labels = json!({"gradwire_job": "j1", "host": "a \"b\"", "node": "0"});
        assert_eq!(read(), json!([{"targets": ["127.0.0.1:9401"], "labels": labels}]));
        drop(file);
        assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_can_not_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = MetricsFile::create(&file, "j1").unwrap_err();
        assert!(error.hint.contains("name a folder"), "{error}");
        let error = error.to_string();
        assert!(error.contains("--metrics-sd: ") && error.contains("gradwire-j1"), "{error}");
    }

    #[test]
    fn metrics_on_loopback_are_hidden() {
        let local = daemon("a", [127, 0, 0, 2], "127.0.0.1:9401");
        let open = daemon("b", [10, 0, 0, 1], "10.0.0.1:9401");
        let closed = daemon("c", [10, 0, 0, 2], "127.0.0.1:9401");
        assert_eq!(hidden(&[local.clone(), open.clone()]), None);
        assert_eq!(hidden(&[local, open, closed]), Some("c"));
    }
}
