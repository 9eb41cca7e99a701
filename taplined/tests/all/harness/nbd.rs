//! A minimal NBD client: one connection with one request at a time. A wrong or late reply fails the test.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::wait_until;

/// The time limit for a reply; a disk that needs longer counts as lost.
const PATIENCE: Duration = Duration::from_secs(60);

const OPTION_GO: u32 = 7;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;

/// The size of a write of a [`Writer`], and the number of these blocks in its disk.
pub const BLOCK: usize = 64 << 10;
const BLOCKS: u64 = (16 << 20) / BLOCK as u64;

/// A connection.
pub struct Client {
    stream: UnixStream,
    handle: u64,
}

impl Client {
    /// Connects to a disk that is plugged.
    pub fn connect(socket: &str) -> Client {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // NBD protocol, "Fixed newstyle negotiation".
        let mut hello = [0; 18];
        stream.read_exact(&mut hello).unwrap();
        assert_eq!(&hello[..16], b"NBDMAGICIHAVEOPT");
        stream.write_all(&3_u32.to_be_bytes()).unwrap();
        stream.write_all(&[b"IHAVEOPT", &OPTION_GO.to_be_bytes()[..], &6_u32.to_be_bytes(), &[0; 6]].concat()).unwrap();
        loop {
            let mut head = [0; 20];
            stream.read_exact(&mut head).unwrap();
            let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
            let mut data = vec![0; u32::from_be_bytes(head[16..].try_into().unwrap()) as usize];
            stream.read_exact(&mut data).unwrap();
            assert!(kind < 1 << 31, "it is refused: {kind:#x}");
            // NBD_REP_ACK; other replies describe the export.
            if kind == 1 {
                return Client { stream, handle: 0 };
            }
        }
    }

    fn ask(&mut self, command: u16, at: u64, len: usize, data: &[u8]) -> std::io::Result<Vec<u8>> {
        self.handle += 1;
        let len = u32::try_from(len).unwrap();
        let head = [
            &0x2560_9513_u32.to_be_bytes()[..],
            &0_u16.to_be_bytes(),
            &command.to_be_bytes(),
            &self.handle.to_be_bytes(),
            &at.to_be_bytes(),
            &len.to_be_bytes(),
        ];
        self.stream.write_all(&[&head.concat(), data].concat())?;
        let mut answer = [0; 16];
        self.stream.read_exact(&mut answer)?;
        assert_eq!(answer[..4], 0x6744_6698_u32.to_be_bytes());
        assert_eq!(answer[4..8], [0; 4], "it has failed");
        assert_eq!(answer[8..], self.handle.to_be_bytes(), "another one is answered");
        let mut data = vec![0; if command == READ { len as usize } else { 0 }];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    /// Writes a block of `byte`; whether there is still a connection.
    pub fn try_write(&mut self, at: u64, len: usize, byte: u8) -> bool {
        self.ask(WRITE, at, len, &vec![byte; len]).is_ok()
    }

    #[track_caller]
    pub fn write(&mut self, at: u64, len: usize, byte: u8) {
        self.ask(WRITE, at, len, &vec![byte; len]).expect("the connection ends");
    }

    #[track_caller]
    pub fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        self.ask(READ, at, len, &[]).expect("the connection ends")
    }

    #[track_caller]
    pub fn flush(&mut self) {
        self.ask(FLUSH, 0, 0, &[]).expect("the connection ends");
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

    /// Waits until it has got further: it is served.
    pub fn goes_on(&self) {
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

/// Where the block goes that is written as this one, and its byte, which is never 0.
fn place(count: u64) -> (u64, u8) {
    (count % BLOCKS * BLOCK as u64, u8::try_from(1 + count / BLOCKS % 255).unwrap())
}
