//! A disk on standard output: raw, or a fixed VHD, which is the same followed by a footer. Zeroes are written too.
//!
//! Reports of the command go to standard error. A failure cannot remove what has been written: the reading program must
//! check the exit code.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;

use control::{ImageName, Kind};
use disk::Creation;
use disk::size::{in_memory, on_disk};
use rustix::event::{PollFd, PollFlags, poll};

use crate::jobs::stream::{Chunk, PIECE};
use crate::process::failure::Failure;

/// Standard output.
pub struct Output {
    file: File,
    zeroes: Vec<u8>,
    /// The number of bytes of the disk that have been written.
    at: u64,
}

impl Output {
    /// Opens standard output for the disk `name`.
    pub fn open(name: &ImageName) -> Result<Output, Failure> {
        let stdout = io::stdout();
        if stdout.is_terminal() {
            let refused = Failure::new(format!("write {name} to standard output"), "it is a terminal");
            return Err(refused.advise("send it to a file or a program: > FILE, | PROGRAM").of_kind(Kind::Invalid));
        }
        let file = File::from(stdout.as_fd().try_clone_to_owned().map_err(failed)?);
        Ok(Output { file, zeroes: vec![0; in_memory(PIECE)], at: 0 })
    }

    /// Writes the next piece of the disk.
    pub fn write(&mut self, chunk: &Chunk) -> Result<(), Failure> {
        match &chunk.bytes {
            Some(bytes) => self.write_all(&bytes.to_vec())?,
            None => self.write_zeroes(chunk.span.len)?,
        }
        self.at += chunk.span.len;
        Ok(())
    }

    /// Writes zeroes up to the disk's size, then the metadata of the image.
    pub fn finish(mut self, len: u64, image: &Creation) -> Result<(), Failure> {
        self.write_zeroes(len.saturating_sub(self.at))?;
        for write in &image.writes {
            self.write_all(&write.bytes)?;
        }
        Ok(())
    }

    fn write_zeroes(&mut self, mut len: u64) -> Result<(), Failure> {
        let zeroes = std::mem::take(&mut self.zeroes);
        while len > 0 {
            let some = zeroes.get(..in_memory(len)).unwrap_or(&zeroes);
            self.write_all(some)?;
            len -= on_disk(some.len());
        }
        self.zeroes = zeroes;
        Ok(())
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> Result<(), Failure> {
        while !bytes.is_empty() {
            match self.file.write(bytes) {
                Ok(0) => return Err(failed(ErrorKind::WriteZero.into())),
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another program that shares it with us has made it non-blocking.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    poll(&mut [PollFd::new(&self.file, PollFlags::OUT)], None).map_err(|errno| failed(errno.into()))?;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

fn failed(error: io::Error) -> Failure {
    let advice = match error.kind() {
        ErrorKind::BrokenPipe => "the program that reads it has ended early; what it has read is not the whole disk",
        _ => "what has been written is not the whole disk",
    };
    Failure::new("write the disk to standard output", error).advise(advice)
}
