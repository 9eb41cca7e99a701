//! Sends memory to a socket: the kernel copies it, and nothing else does.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::Segments;
use crate::segments::PartList;

/// The most address ranges of one system call (UIO_MAXIOV).
const PARTS_MAX: usize = 1024;

/// Something to be sent.
#[derive(Debug)]
pub enum Piece<'a> {
    /// Bytes of ours.
    Bytes(&'a [u8]),
    /// Memory that its owner may change meanwhile: what is sent of it is one snapshot of each byte.
    Memory(Segments),
}

/// Sends the beginning of these pieces, as much as the socket accepts at once, and returns how many bytes that is. A
/// peer that is gone is an error and no signal.
pub fn send(socket: BorrowedFd<'_>, pieces: &[Piece<'_>]) -> io::Result<usize> {
    let mut list = PartList::default();
    for piece in pieces {
        let mut push = |base, len| if len == 0 { Some(()) } else { list.push(base, len) };
        let fits = match piece {
            Piece::Bytes(bytes) => push(bytes.as_ptr().cast_mut(), bytes.len()),
            Piece::Memory(memory) => memory.parts().iter().try_for_each(|part| push(part.base(), part.len())),
        };
        if fits.is_none() {
            break;
        }
    }
    let parts = list.into_parts();
    // SAFETY: all fields of the structure may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len().min(PARTS_MAX);
    // SAFETY: the parts have the layout of `struct iovec`; each lies in memory that `pieces` borrows or keeps mapped
    // for the time of the call, which only reads it.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod test {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn pieces_arrive_in_order_and_as_far_as_the_socket_takes_them() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let memory = Segments::joined(vec![Segments::copy_of(b"cd"), Segments::copy_of(b"ef")]);
        let pieces = [Piece::Bytes(b"ab"), Piece::Memory(memory), Piece::Bytes(b""), Piece::Memory(Segments::empty())];
        assert_eq!(send(ours.as_fd(), &pieces).unwrap(), 6);
        let mut received = [0; 6];
        theirs.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"abcdef");
        ours.set_nonblocking(true).unwrap();
        let much = [Piece::Memory(Segments::zeroed(64 << 20))];
        assert!(send(ours.as_fd(), &much).unwrap() < 64 << 20);
        assert_eq!(send(ours.as_fd(), &much).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(theirs);
        assert_eq!(send(ours.as_fd(), &much).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn more_ranges_than_a_call_takes_are_sent_in_part() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let pieces: Vec<_> = (0..2 * PARTS_MAX).map(|_| Piece::Bytes(b"x")).collect();
        assert_eq!(send(ours.as_fd(), &pieces).unwrap(), PARTS_MAX);
    }
}
