//! Writes an agent's reports to the launcher, and knows whether the launcher still reads them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use gradwire_services::launch::{Report, to_line};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::mpsc,
    task::JoinHandle,
    time::timeout,
};

/// How many reports may wait for the launcher (BOUND). When the queue is full, processes that write
/// output wait, so nothing is lost.
pub(super) const REPORTS: usize = 256;

/// How many bytes are written at a time. Each part that is taken shows that the launcher reads.
const PART: usize = 64 << 10;

/// Writes reports in order, or throws them away if the launcher is gone, which the other pipe
/// shows: then nothing waits for them. `moved` counts the parts that were written or thrown away.
pub(super) async fn write(
    mut queue: mpsc::Receiver<Report>,
    mut output: impl AsyncWrite + Unpin,
    moved: Arc<AtomicU64>,
) {
    let (mut batch, mut gone) = (Vec::with_capacity(REPORTS), false);
    // All waiting reports are written at once: a line is short, and a write is expensive.
    while queue.recv_many(&mut batch, REPORTS).await > 0 {
        let mut bytes = Vec::new();
        for report in batch.drain(..) {
            bytes.extend_from_slice(to_line(&report).as_bytes());
        }
        for part in bytes.chunks(PART) {
            gone = gone || send(&mut output, part).await.is_err();
            moved.fetch_add(1, Relaxed);
        }
    }
}

/// Writes all bytes at once.
pub(super) async fn send(
    output: &mut (impl AsyncWrite + Unpin),
    bytes: &[u8],
) -> std::io::Result<()> {
    output.write_all(bytes).await?;
    output.flush().await
}

/// Waits until the last report is written, as long as the launcher reads: it may take up to `limit`
/// for each part (WAIT).
pub(super) async fn all_written(mut writer: JoinHandle<()>, moved: &AtomicU64, limit: Duration) {
    let mut seen = moved.load(Relaxed);
    while timeout(limit, &mut writer).await.is_err() {
        let now = moved.load(Relaxed);
        if std::mem::replace(&mut seen, now) == now {
            return;
        }
    }
}
