//! A single non-blocking write.
//!
//! It knows nothing about lines. Standard error is often shared: with a shell, with other programs, with our own
//! standard output. So O_NONBLOCK, which would apply to everyone who shares the description, is never set; each call
//! requests non-blocking behaviour by itself.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};
use rustix::net::{SendFlags, send};

/// PIPE_BUF: what a pipe accepts either completely or not at all (pipe(7)), and the minimum space when it reports that
/// there is some.
const CHUNK: usize = 4096;

/// At the current position: pwritev2(2) takes −1 as the offset of the descriptor.
const HERE: u64 = u64::MAX;

/// Writes part of `bytes`, or fails with [`io::ErrorKind::WouldBlock`] if it would have to wait for a reader.
pub fn write(to: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let to = to.as_fd();
    let bytes = bytes.get(..CHUNK).unwrap_or(bytes);
    let written = match FileType::from_raw_mode(fstat(to)?.st_mode) {
        FileType::Socket => send(to, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
        FileType::Fifo => match pwritev2(to, &[IoSlice::new(bytes)], HERE, ReadWriteFlags::NOWAIT) {
            // Pipes support that since Linux 6.5.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::PERM) => write_if_ready(to, bytes),
            written => written,
        },
        FileType::CharacterDevice => write_if_ready(to, bytes),
        // Anything other than a pipe, terminal or socket has no reader to wait for.
        _ => rustix::io::write(to, bytes),
    };
    Ok(written?)
}

/// Between the poll and the write another writer may use up the space; then this blocks after all.
fn write_if_ready(to: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    let mut asked = [PollFd::new(&to, PollFlags::OUT)];
    match poll(&mut asked, Some(&Timespec::default())) {
        Ok(0) => Err(Errno::AGAIN),
        Ok(_) => rustix::io::write(&to, bytes),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    fn pipe() -> (File, File) {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        (reader.into(), writer.into())
    }

    fn fill(to: impl AsFd, mut write: impl FnMut(&dyn AsFd, &[u8]) -> io::Result<usize>) -> usize {
        let mut filled = 0;
        loop {
            match write(&to, &[b'x'; 1000]) {
                Ok(written) => filled += written,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    return filled;
                }
            }
            assert!(filled < 64 << 20, "the pipe never fills up");
        }
    }

    #[test]
    fn writing_to_an_unread_pipe_fills_it_and_never_blocks() {
        let (mut reader, writer) = pipe();
        let filled = fill(&writer, |to, bytes| write(to.as_fd(), bytes));
        assert!(filled >= CHUNK);
        assert_eq!(write(&writer, &[b'y'; 1000]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let mut read = vec![0; filled];
        reader.read_exact(&mut read).unwrap();
        assert_eq!(write(&writer, b"more\n").unwrap(), 5);
    }

    #[test]
    fn an_unread_pipe_never_blocks_on_kernels_that_need_a_poll_first() {
        let (_reader, writer) = pipe();
        assert!(fill(&writer, |to, bytes| Ok(write_if_ready(to.as_fd(), bytes)?)) >= CHUNK);
    }

    #[test]
    fn writing_to_an_unread_socket_fills_it_and_never_blocks() {
        let (_reader, writer) = UnixStream::pair().unwrap();
        assert!(fill(&writer, |to, bytes| write(to.as_fd(), bytes)) > 0);
    }

    #[test]
    fn a_closed_pipe_and_a_full_device_are_errors() {
        let (reader, writer) = pipe();
        drop(reader);
        assert_eq!(write(&writer, b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        assert_eq!(write(&full, b"x").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn other_users_of_the_pipe_still_block() {
        let (_reader, writer) = pipe();
        let shared = writer.try_clone().unwrap();
        write(&writer, b"x").unwrap();
        let flags = rustix::fs::fcntl_getfl(&shared).unwrap();
        assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
    }
}
