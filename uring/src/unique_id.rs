//! An id that distinguishes a file or a device from earlier ones with the same number.
//!
//! Inode numbers and device numbers are reused; birth times are missing on some file systems and can be equal on
//! others. File handles have a generation, and disks a sequence number, for exactly this purpose. The contents do not
//! matter: a file that is overwritten in place stays the same file.

use std::ffi::c_int;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::time::UNIX_EPOCH;

/// The maximum size of a handle in bytes (MAX_HANDLE_SZ).
const HANDLE_MAX: usize = 128;
/// The maximum size of an id in bytes.
pub const UNIQUE_ID_MAX: usize = HANDLE_MAX + 24;

/// `struct file_handle` of name_to_handle_at(2), with room for the largest.
#[repr(C)]
struct FileHandle {
    len: u32,
    kind: c_int,
    bytes: [u8; HANDLE_MAX],
}

/// Requests a handle that need not be usable for opening the file (fcntl.h, since Linux 6.5).
const AT_HANDLE_FID: c_int = 0x200;
/// `_IOR(0x12, 128, __u64)` of linux/fs.h: a sequence number unique to this disk since boot (since Linux 5.15).
const BLKGETDISKSEQ: libc::c_ulong = libc::_IOR::<u64>(0x12, 128);

/// The id of an open file, unique within this boot. Where the kernel or the file system provides no generation, it is
/// made of the numbers and the birth time, which may be reused.
pub fn unique_id(file: &File) -> io::Result<Vec<u8>> {
    let metadata = file.metadata()?;
    let mut id = Vec::with_capacity(UNIQUE_ID_MAX);
    if metadata.file_type().is_block_device() {
        id.extend(metadata.rdev().to_be_bytes());
        id.extend(disk_sequence(file).unwrap_or(0).to_be_bytes());
        return Ok(id);
    }
    id.extend(metadata.dev().to_be_bytes());
    id.extend(id_in_file_system(file)?);
    Ok(id)
}

/// The id of an open file among all files that its file system has ever had. It survives a reboot, after which the file
/// system may have another device number.
pub fn id_in_file_system(file: &File) -> io::Result<Vec<u8>> {
    let metadata = file.metadata()?;
    let mut id = metadata.ino().to_be_bytes().to_vec();
    match handle(file, libc::AT_EMPTY_PATH | AT_HANDLE_FID).or_else(|| handle(file, libc::AT_EMPTY_PATH)) {
        Some(FileHandle { len, kind, bytes }) => {
            id.extend(kind.to_be_bytes());
            id.extend(bytes.iter().take(usize::try_from(len).unwrap_or(HANDLE_MAX)));
        }
        None => id.extend(birth_time(&metadata).to_be_bytes()),
    }
    Ok(id)
}

fn birth_time(metadata: &Metadata) -> u64 {
    let born = metadata.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
    born.and_then(|born| u64::try_from(born.as_nanos()).ok()).unwrap_or(0)
}

fn handle(file: &File, flags: c_int) -> Option<FileHandle> {
    let room = u32::try_from(HANDLE_MAX).unwrap_or(0);
    let mut handle = FileHandle { len: room, kind: 0, bytes: [0; HANDLE_MAX] };
    let mut mount: c_int = 0;
    // SAFETY: the path is an empty string; during the call the kernel writes at most `len` bytes after the header of
    // `handle`, which has room for them, and one number to `mount`.
    let result = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_raw_fd(),
            c"".as_ptr(),
            &raw mut handle,
            &raw mut mount,
            flags,
        )
    };
    (result == 0).then_some(handle)
}

fn disk_sequence(device: &File) -> Option<u64> {
    let mut number: u64 = 0;
    // SAFETY: the kernel writes one u64 during the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), BLKGETDISKSEQ, &raw mut number) };
    (result == 0).then_some(number)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_renamed_file_keeps_its_id_and_a_new_file_has_another() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("image");
        let first = File::create(&path).unwrap();
        let id = unique_id(&first).unwrap();
        std::fs::hard_link(&path, room.path().join("other")).unwrap();
        std::fs::rename(&path, room.path().join("renamed")).unwrap();
        assert_eq!(unique_id(&File::open(room.path().join("other")).unwrap()).unwrap(), id);
        std::fs::remove_file(room.path().join("other")).unwrap();
        std::fs::remove_file(room.path().join("renamed")).unwrap();
        drop(first);
        let second = File::create(&path).unwrap();
        assert_ne!(unique_id(&second).unwrap(), id);
    }
}
