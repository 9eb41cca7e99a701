//! NBD clients that fail the test on a wrong or late reply.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use testkit::nbd;

use super::wait_until;

/// The size of a write of a [`Writer`], and the number of these blocks in its disk.
pub const BLOCK: usize = 64 << 10;
const BLOCKS: u64 = (16 << 20) / BLOCK as u64;

/// A connection.
pub struct Client(nbd::Client);

impl Client {
    /// Connects to a plugged disk.
    pub fn connect(socket: &str) -> Client {
        Client(nbd::Client::connect(Path::new(socket)).unwrap())
    }

    /// Writes a block of `byte`; returns whether the connection still exists.
    pub fn try_write(&mut self, at: u64, len: usize, byte: u8) -> bool {
        let written = self.0.write(at, &vec![byte; len]);
        written.inspect_err(|error| assert_eq!(error.raw_os_error(), None, "it has failed: {error}")).is_ok()
    }

    #[track_caller]
    pub fn write(&mut self, at: u64, len: usize, byte: u8) {
        self.0.write(at, &vec![byte; len]).unwrap();
    }

    #[track_caller]
    pub fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        self.0.read(at, len).unwrap()
    }

    #[track_caller]
    pub fn flush(&mut self) {
        self.0.flush().unwrap();
    }
}

/// A client that writes block after block, with another byte in each round, and reads each back, until it is stopped.
pub struct Writer {
    end: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    pub thread: JoinHandle<Client>,
}

impl Writer {
    pub fn begin(mut client: Client) -> Writer {
        let (end, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, does) = (end.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            for count in 0.. {
                let (at, byte) = place(count);
                client.write(at, BLOCK, byte);
                if count % 16 == 0 {
                    client.flush();
                }
                assert_eq!(client.read(at, BLOCK), vec![byte; BLOCK], "block {count}");
                does.store(count + 1, Ordering::SeqCst);
                // Several clients run at the same time and share the CPU.
                std::thread::sleep(Duration::from_millis(1));
                if ends.load(Ordering::SeqCst) {
                    break;
                }
            }
            client
        });
        Writer { end, done, thread }
    }

    /// Waits until it has made progress, so it is served.
    pub fn makes_progress(&self) {
        let before = self.done.load(Ordering::SeqCst);
        wait_until("the client goes on", || self.done.load(Ordering::SeqCst) > before + 2 || self.thread.is_finished());
        assert!(!self.thread.is_finished(), "the client has failed");
    }

    /// Stops it and checks that everything written can be read.
    pub fn end(self) -> Client {
        self.end.store(true, Ordering::SeqCst);
        let mut client = self.thread.join().expect("the client has failed");
        let done = self.done.load(Ordering::SeqCst);
        for count in done.saturating_sub(BLOCKS)..done {
            let (at, byte) = place(count);
            assert_eq!(client.read(at, BLOCK), vec![byte; BLOCK], "block {count}, read again");
        }
        client
    }
}

/// The offset and byte of the write with this number; the byte is never 0.
fn place(count: u64) -> (u64, u8) {
    (count % BLOCKS * BLOCK as u64, u8::try_from(1 + count / BLOCKS % 255).unwrap())
}
