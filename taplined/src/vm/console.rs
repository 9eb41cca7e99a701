//! The console of a running machine: the recent output of its guest's serial port, and its output from now on, for
//! any number of viewers, each of which may type.
//!
//! It knows nothing about machines and HTTP. Invariants: a guest that writes endlessly costs a bounded number of
//! wake-ups and a bounded amount of memory; a viewer that does not read delays neither the guest nor other viewers.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream as BlockingStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::background;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

/// Bytes of output kept per machine.
pub const KEPT: usize = 64 << 10;

/// Maximum number of viewers.
const VIEWERS_MAX: usize = 16;

/// The pause between two reads of output. A person does not notice it, and it bounds the cost of a guest that floods
/// its console.
const PAUSE: Duration = Duration::from_millis(2);

/// Maximum bytes read at once.
const PIECE: usize = 16 << 10;

/// Maximum pieces of input queued for the guest.
const TYPED_MAX: usize = 16;

/// The console of a machine.
#[derive(Debug)]
pub struct Console {
    output: Arc<Mutex<Output>>,
    /// The number of bytes written so far. Closed when the console is.
    written: watch::Receiver<u64>,
    typed: mpsc::Sender<Vec<u8>>,
    viewers: Arc<Semaphore>,
}

/// A viewer's slot at the console.
#[derive(Debug)]
pub struct Seat(#[expect(dead_code, reason = "held while there is a viewer")] OwnedSemaphorePermit);

/// The recent output of a guest.
#[derive(Debug, Default)]
struct Output {
    kept: VecDeque<u8>,
    /// The number of bytes written so far.
    end: u64,
}

impl Output {
    fn append(&mut self, bytes: &[u8]) -> u64 {
        self.kept.extend(bytes);
        let beyond = self.kept.len().saturating_sub(KEPT);
        self.kept.drain(..beyond);
        self.end += bytes.len() as u64;
        self.end
    }

    /// The kept output from `position` on, the number of bytes before it that are no longer kept, and the end
    /// position.
    fn since(&self, position: u64) -> (Vec<u8>, u64, u64) {
        let begin = self.end - self.kept.len() as u64;
        let lost = begin.saturating_sub(position);
        let skipped = usize::try_from(position.saturating_sub(begin)).unwrap_or(usize::MAX);
        (self.kept.iter().skip(skipped).copied().collect(), lost, self.end)
    }
}

impl Console {
    /// Follows the console of a machine, to which `stream` is connected, until the machine ends.
    pub fn follow(stream: BlockingStream) -> io::Result<Console> {
        stream.set_nonblocking(true)?;
        let stream = UnixStream::from_std(stream)?;
        let (typed, to_type) = mpsc::channel(TYPED_MAX);
        let (writing, written) = watch::channel(0);
        let output = Arc::new(Mutex::default());
        background::spawn(run(stream, output.clone(), writing, to_type));
        Ok(Console { output, written, typed, viewers: Arc::new(Semaphore::new(VIEWERS_MAX)) })
    }

    /// The last bytes of output, at most `len`.
    pub fn recent(&self, len: usize) -> Vec<u8> {
        let output = lock(&self.output);
        output.kept.iter().skip(output.kept.len().saturating_sub(len)).copied().collect()
    }

    /// A slot for one more viewer; `None` if there are too many.
    pub fn seat(&self) -> Option<Seat> {
        self.viewers.clone().try_acquire_owned().ok().map(Seat)
    }

    /// Shows the output to a viewer, beginning with the last `recent` bytes, and passes on its input, until either
    /// side ends.
    pub async fn show<S: AsyncRead + AsyncWrite>(&self, viewer: S, recent: usize, _seat: Seat) -> io::Result<()> {
        let (mut from, mut to) = tokio::io::split(viewer);
        tokio::select! {
            shown = self.write_to(&mut to, recent) => {
                shown?;
                to.shutdown().await
            }
            typed = self.type_from(&mut from) => typed,
        }
    }

    async fn write_to(&self, to: &mut (impl AsyncWrite + Unpin), recent: usize) -> io::Result<()> {
        let mut written = self.written.clone();
        let mut position = *written.borrow_and_update();
        position = position.saturating_sub(self.recent(recent).len() as u64);
        loop {
            let (bytes, lost, end) = lock(&self.output).since(position);
            if lost > 0 {
                to.write_all(format!("\r\n[{lost} bytes of output left out]\r\n").as_bytes()).await?;
            }
            to.write_all(&bytes).await?;
            to.flush().await?;
            position = end;
            if written.wait_for(|written| *written > position).await.is_err() {
                return Ok(());
            }
        }
    }

    async fn type_from(&self, from: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
        let mut piece = vec![0; PIECE];
        loop {
            let len = from.read(&mut piece).await?;
            if len == 0 || self.typed.send(piece[..len].to_vec()).await.is_err() {
                return Ok(());
            }
        }
    }
}

fn lock(output: &Mutex<Output>) -> MutexGuard<'_, Output> {
    output.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the output and passes on the input until the machine ends. Then `writing` is closed, which notifies the
/// viewers.
async fn run(
    stream: UnixStream,
    output: Arc<Mutex<Output>>,
    writing: watch::Sender<u64>,
    mut to_type: mpsc::Receiver<Vec<u8>>,
) {
    let (mut from, mut to) = stream.into_split();
    let keep = async {
        let mut piece = vec![0; PIECE];
        while let Ok(len @ 1..) = from.read(&mut piece).await {
            let end = lock(&output).append(&piece[..len]);
            writing.send_replace(end);
            tokio::time::sleep(PAUSE).await;
        }
    };
    let pass_on = async {
        // A guest that does not read its input blocks the input of all viewers.
        while let Some(typed) = to_type.recv().await {
            if to.write_all(&typed).await.is_err() {
                break;
            }
        }
        // Its output is still shown.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = keep => {}
        () = pass_on => {}
    }
}

#[cfg(test)]
mod test {
    use std::io::{Read, Write};

    use super::*;

    fn at_console() -> (Console, BlockingStream) {
        let (ours, guests) = BlockingStream::pair().unwrap();
        (Console::follow(ours).unwrap(), guests)
    }

    async fn read(viewer: &mut (impl AsyncRead + Unpin), len: usize) -> String {
        let mut bytes = vec![0; len];
        viewer.read_exact(&mut bytes).await.unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn only_the_end_of_the_output_is_kept() {
        let mut output = Output::default();
        output.append(b"boot\n");
        assert_eq!(output.since(0), (b"boot\n".to_vec(), 0, 5));
        assert_eq!(output.since(5), (Vec::new(), 0, 5));
        output.append(&[b'x'; KEPT]);
        let (bytes, lost, end) = output.since(2);
        assert_eq!((bytes.len(), lost, end), (KEPT, 3, 5 + KEPT as u64));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_viewer_sees_earlier_and_later_output_and_may_type() {
        let (console, mut guest) = at_console();
        let console = Arc::new(console);
        guest.write_all(b"booting").unwrap();
        console.written.clone().wait_for(|written| *written == 7).await.unwrap();
        let mut viewers = Vec::new();
        for recent in [KEPT, 3, 0] {
            let (near, far) = tokio::io::duplex(1024);
            let (at, seat) = (console.clone(), console.seat().unwrap());
            viewers.push((near, tokio::spawn(async move { at.show(far, recent, seat).await })));
        }
        assert_eq!(read(&mut viewers[0].0, 7).await, "booting");
        assert_eq!(read(&mut viewers[1].0, 3).await, "ing");
        for (viewer, _) in &mut viewers {
            viewer.write_all(b"x").await.unwrap();
        }
        let mut typed = [0; 3];
        guest.read_exact(&mut typed).unwrap();
        assert_eq!(&typed, b"xxx");
        // The last viewer is connected once it has typed.
        guest.write_all(b"login:").unwrap();
        drop(guest);
        for (mut viewer, shown) in viewers {
            assert_eq!(read(&mut viewer, 6).await, "login:");
            assert_eq!(viewer.read(&mut [0; 1]).await.unwrap(), 0);
            shown.await.unwrap().unwrap();
        }
        assert_eq!(console.recent(6), b"login:");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_slow_viewer_delays_nothing_and_sees_how_much_it_missed() {
        let (console, mut guest) = at_console();
        let console = Arc::new(console);
        let (mut near, far) = tokio::io::duplex(16);
        let (at, seat) = (console.clone(), console.seat().unwrap());
        let shown = tokio::spawn(async move { at.show(far, KEPT, seat).await });
        let all = 4 * KEPT as u64;
        let flood = std::thread::spawn(move || {
            guest.write_all(b"first").unwrap();
            guest.write_all(&vec![b'x'; 4 * KEPT]).unwrap();
            guest
        });
        console.written.clone().wait_for(|written| *written == all + 5).await.unwrap();
        drop(flood.join().unwrap());
        let mut seen = String::new();
        near.read_to_string(&mut seen).await.unwrap();
        assert!(seen.contains(" bytes of output left out]") && seen.ends_with('x'), "{}", seen.len());
        shown.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn the_number_of_viewers_is_limited() {
        let (console, _guest) = at_console();
        let mut seats: Vec<Seat> = (0..VIEWERS_MAX).map(|_| console.seat().unwrap()).collect();
        assert!(console.seat().is_none());
        seats.pop();
        assert!(console.seat().is_some());
    }
}
