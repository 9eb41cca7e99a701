//! The archive of a machine: a tar file with its description, then its disks, then their digests.
//!
//! It knows members and bytes, and no daemon. Whatever belongs to a host is not in an archive, and never taken from
//! one, which may be of any origin: networks, files, kernels, passwords in a seed, when a machine is started.

use std::collections::BTreeMap;
use std::io::{self, Read};

use api::{Description, Driver, ImageFormat, LogicalBlockSize, Mode, Name, Problem, Size};
use ring::digest::{self, Context, Digest};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::transfer::{PIECE, Source};

/// The first member.
pub const DESCRIPTION: &str = "tapline-vm.json";
/// The last member: the digests of all others, as sha256sum(1) writes and checks them.
pub const DIGESTS: &str = "SHA256SUMS";
/// What a description says that it is, and the last version that is understood.
pub const FORMAT: &str = "tapline-vm";
pub const VERSION: u32 = 1;

/// The unit of a tar file, in bytes.
const BLOCK: usize = 512;
/// Bytes of the longest description or list of digests.
pub const TEXT_MAX: u64 = 4 << 20;

/// A machine with its disks.
#[derive(Debug, Serialize, Deserialize)]
pub struct Machine {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    pub name: Name,
    pub description: Description,
    pub hardware: Hardware,
    /// Its disks, by position.
    pub disks: Vec<Disk>,
}

/// The hardware of an archived machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hardware {
    pub driver: Driver,
    pub memory: Size,
    pub vcpus: u8,
    /// Keys of [`KEYS`], and a network card that needs no network of the host.
    pub platform: BTreeMap<String, String>,
}

/// The platform keys that mean the same on every host, and refer to nothing there.
const KEYS: [&str; 6] = ["usb", "usb_tablet", "vga", "hpet", "type", "tsc_mode"];

/// The platform keys that an archive may have, and the names of the others.
pub fn portable(platform: BTreeMap<String, String>) -> (BTreeMap<String, String>, Vec<String>) {
    let (mut kept, mut others) = (BTreeMap::new(), Vec::new());
    for (key, value) in platform {
        match key.as_str() {
            known if KEYS.contains(&known) => drop(kept.insert(key, value)),
            // Without its address, which the machine has on the other host.
            "nic" if value.split('/').next() == Some("user") => drop(kept.insert(key, "user".into())),
            _ => others.push(key),
        }
    }
    (kept, others)
}

/// A disk of an archived machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct Disk {
    /// The member with its image.
    pub file: String,
    /// The image's format.
    pub format: ImageFormat,
    pub name: Name,
    pub description: Description,
    pub logical_block_size: Option<LogicalBlockSize>,
    pub position: u8,
    pub mode: Mode,
    pub bootable: bool,
    pub queues: u16,
}

/// Writes the header of a member.
pub async fn write_header(to: &mut (impl AsyncWrite + Unpin), name: &str, size: u64) -> Result<(), Problem> {
    let failed = |error| Problem::failed(format_args!("write {name} to the archive"), error);
    let mut header = tar::Header::new_gnu();
    header.set_path(name).map_err(failed)?;
    header.set_size(size);
    header.set_mode(0o600);
    header.set_mtime(u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0));
    header.set_cksum();
    to.write_all(header.as_bytes()).await.map_err(failed)
}

/// Fills the last block of a member of this size.
pub async fn pad(to: &mut (impl AsyncWrite + Unpin), size: u64) -> Result<(), Problem> {
    let rest = usize::try_from(size.next_multiple_of(BLOCK as u64) - size).unwrap_or(0);
    let zeroes = [0; BLOCK];
    let padded = to.write_all(zeroes.get(..rest).unwrap_or_default()).await;
    padded.map_err(|error| Problem::failed("write the archive", error))
}

/// Writes a member that is a text; returns its digest.
pub async fn write_text(to: &mut (impl AsyncWrite + Unpin), name: &str, text: &str) -> Result<Digest, Problem> {
    write_header(to, name, text.len() as u64).await?;
    to.write_all(text.as_bytes()).await.map_err(|error| Problem::failed("write the archive", error))?;
    pad(to, text.len() as u64).await?;
    Ok(digest::digest(&digest::SHA256, text.as_bytes()))
}

/// Ends the archive.
pub async fn finish(to: &mut (impl AsyncWrite + Unpin)) -> Result<(), Problem> {
    let failed = |error| Problem::failed("write the end of the archive", error);
    to.write_all(&[0; 2 * BLOCK]).await.map_err(failed)?;
    to.flush().await.map_err(failed)
}

/// A digest in hexadecimal digits.
pub fn hex(digest: &Digest) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A part of an archive that is read.
enum Part {
    Member(String, u64),
    Piece(Vec<u8>),
}

/// The members of an archive, in their order; read by a thread of its own.
pub struct Members {
    parts: mpsc::Receiver<io::Result<Part>>,
}

/// A member; [`Source::next`] reads it.
pub struct Member<'a> {
    members: &'a mut Members,
    /// Its name, without directories.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    left: u64,
    sha256: Context,
    sha1: Context,
}

impl Members {
    /// Begins to read an archive.
    pub fn of(archive: impl Read + Send + 'static) -> Members {
        let (sender, parts) = mpsc::channel(1);
        std::thread::spawn(move || {
            if let Err(error) = send_all(archive, &sender) {
                sender.blocking_send(Err(error)).ok();
            }
        });
        Members { parts }
    }

    /// The next member. What was not read of the one before is skipped.
    pub async fn next(&mut self) -> Result<Option<Member<'_>>, Problem> {
        loop {
            match self.part().await? {
                None => return Ok(None),
                Some(Part::Piece(_)) => {}
                Some(Part::Member(name, size)) => {
                    let [sha256, sha1] = [&digest::SHA256, &digest::SHA1_FOR_LEGACY_USE_ONLY].map(Context::new);
                    return Ok(Some(Member { members: self, name, size, left: size, sha256, sha1 }));
                }
            }
        }
    }

    async fn part(&mut self) -> Result<Option<Part>, Problem> {
        self.parts.recv().await.transpose().map_err(|error| {
            Problem::failed("read the archive", error).advise(
                "it must be a tar file that is whole and not compressed: an OVA, or what 'tapline vm export' has \
                 written",
            )
        })
    }
}

fn send_all(archive: impl Read, to: &mpsc::Sender<io::Result<Part>>) -> io::Result<()> {
    let gone = |_| io::Error::other("its reader is gone");
    for entry in tar::Archive::new(archive).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        if entry.header().entry_type().is_dir() {
            continue;
        }
        if !entry.header().entry_type().is_file() {
            return Err(io::Error::other(format!("{} is neither a file nor a directory", path.display())));
        }
        // Its data is without its holes, and the list of them is in front of it.
        let is_sparse = |key: io::Result<&str>| key.is_ok_and(|key| key.starts_with("GNU.sparse."));
        let mut extensions = entry.pax_extensions()?.into_iter().flatten().flatten();
        if extensions.any(|extension| is_sparse(extension.key().map_err(io::Error::other))) {
            return Err(io::Error::other(format!(
                "{} is a sparse file (tar -S), which is not supported",
                path.display()
            )));
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let mut left = entry.size();
        to.blocking_send(Ok(Part::Member(name, left))).map_err(gone)?;
        while left > 0 {
            let mut piece = Vec::new();
            let wanted = left.min(PIECE as u64);
            entry.by_ref().take(wanted).read_to_end(&mut piece)?;
            if piece.len() as u64 != wanted {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("it ends in {}", path.display())));
            }
            left -= wanted;
            to.blocking_send(Ok(Part::Piece(piece))).map_err(gone)?;
        }
    }
    Ok(())
}

impl Source for Member<'_> {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Problem> {
        if self.left == 0 {
            return Ok(None);
        }
        match self.members.part().await? {
            Some(Part::Piece(piece)) => {
                self.left = self.left.saturating_sub(piece.len() as u64);
                self.sha256.update(&piece);
                self.sha1.update(&piece);
                Ok(Some(piece))
            }
            _ => Err(Problem::failed("read the archive", format_args!("it ends in {}", self.name))),
        }
    }
}

impl Member<'_> {
    /// Reads a member that is a text.
    pub async fn text(&mut self) -> Result<String, Problem> {
        let failed = |why: &str| Problem::failed(format_args!("read {} in the archive", self.name), why);
        if self.size > TEXT_MAX {
            return Err(failed("it is too long"));
        }
        let mut bytes = Vec::new();
        while let Some(piece) = self.next().await? {
            bytes.extend(piece);
        }
        String::from_utf8(bytes).map_err(|_| Problem::failed("read the archive", "its description is not UTF-8"))
    }

    /// The digests of all that was read: SHA-256 and SHA-1, in hexadecimal digits.
    pub fn digests(self) -> [String; 2] {
        [hex(&self.sha256.finish()), hex(&self.sha1.finish())]
    }
}

#[cfg(test)]
mod test {
    use super::*;

    async fn archive() -> Vec<u8> {
        let mut bytes = Vec::new();
        write_text(&mut bytes, DESCRIPTION, "{}").await.unwrap();
        write_header(&mut bytes, "disk-0.raw", 700).await.unwrap();
        bytes.extend([7; 700]);
        pad(&mut bytes, 700).await.unwrap();
        finish(&mut bytes).await.unwrap();
        bytes
    }

    #[tokio::test]
    async fn members_are_read_back_with_their_digests() {
        let mut members = Members::of(io::Cursor::new(archive().await));
        let mut first = members.next().await.unwrap().unwrap();
        let text = first.text().await.unwrap();
        assert_eq!((first.name.as_str(), text.as_str()), (DESCRIPTION, "{}"));
        let mut second = members.next().await.unwrap().unwrap();
        assert_eq!((second.name.as_str(), second.size), ("disk-0.raw", 700));
        while second.next().await.unwrap().is_some() {}
        assert_eq!(second.digests()[0], hex(&digest::digest(&digest::SHA256, &[7; 700])));
        assert!(members.next().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_member_that_is_cut_off_is_an_error() {
        let whole = archive().await;
        for len in [100, 1024 + 512, 1024 + 512 + 300] {
            let mut members = Members::of(io::Cursor::new(whole[..len].to_vec()));
            let read = async {
                while let Some(mut member) = members.next().await? {
                    while member.next().await?.is_some() {}
                }
                Ok::<_, Problem>(())
            };
            assert!(read.await.is_err(), "{len}");
        }
    }

    #[test]
    fn what_belongs_to_a_host_is_not_portable() {
        let of = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let platform = of(&[
            ("usb", "true"),
            ("nic", "user/52:54:00:00:00:01"),
            ("dvd", "file:/etc/shadow"),
            ("hvm_serial", "file:/a"),
        ]);
        assert_eq!(
            portable(platform),
            (of(&[("usb", "true"), ("nic", "user")]), vec!["dvd".to_owned(), "hvm_serial".into()])
        );
        assert_eq!(portable(of(&[("nic", "tap:tap0/52:54:00:00:00:01")])).1, ["nic"]);
    }

    #[tokio::test]
    async fn a_sparse_member_is_refused() {
        let mut bytes = Vec::new();
        let record = "22 GNU.sparse.major=1\n";
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(tar::EntryType::XHeader);
        header.set_path("x").unwrap();
        header.set_size(record.len() as u64);
        header.set_cksum();
        bytes.extend(header.as_bytes());
        bytes.extend(record.as_bytes());
        pad(&mut bytes, record.len() as u64).await.unwrap();
        write_text(&mut bytes, "disk-0.raw", "data").await.unwrap();
        let problem = Members::of(io::Cursor::new(bytes)).next().await.err().unwrap();
        assert!(problem.detail.contains("sparse"), "{problem}");
    }

    #[tokio::test]
    async fn something_else_is_no_archive() {
        let mut members = Members::of(io::Cursor::new([0x1f; 4096].to_vec()));
        let problem = members.next().await.err().unwrap();
        assert!(problem.advice.unwrap().contains("OVA"));
    }
}
