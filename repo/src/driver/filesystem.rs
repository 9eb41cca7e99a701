//! A directory's file system: its type, where it is mounted, and whether it supports reflink.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use api::Problem;
use rustix::fs::{AtFlags, Mode, OFlags, StatVfsMountFlags, StatxFlags};
use rustix::io::Errno;

/// A mount, as reported by the kernel (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Its number.
    pub id: u64,
    /// Where it is.
    pub at: PathBuf,
    /// The file system's kind.
    pub kind: String,
    /// The mounted source: a device, or `server:/export`.
    pub source: String,
}

/// Bytes of a block that is shared for a trial: a multiple of every file system's block.
const TRIAL: usize = 64 << 10;

/// The mounts of this process, in mount order.
pub fn mounts() -> Result<Vec<Mount>, Problem> {
    let path = "/proc/self/mountinfo";
    let text = std::fs::read_to_string(path).map_err(|error| Problem::failed(format_args!("read {path}"), error))?;
    Ok(text.lines().filter_map(parse).collect())
}

/// The mount at a path, if there is one: the one on top.
pub fn mount_at(path: &Path) -> Result<Option<Mount>, Problem> {
    Ok(mounts()?.into_iter().rfind(|mount| mount.at == path))
}

/// A line: number, parent, device, root, mount point, options, any number of fields, `-`, kind, source, more options.
fn parse(line: &str) -> Option<Mount> {
    let (head, tail) = line.split_once(" - ")?;
    let mut head = head.split(' ');
    let id = head.next()?.parse().ok()?;
    let at = unescaped(head.nth(3)?).into();
    let mut tail = tail.split(' ');
    Some(Mount { id, at, kind: tail.next()?.into(), source: unescaped(tail.next()?) })
}

/// Blanks, tabs, line feeds and backslashes are written as three octal digits.
fn unescaped(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let digits = more.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.filter(|_| *first == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { more.get(3..).unwrap_or_default() } else { more };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The kind of file system that an open directory is on: as its mount says, which knows ext3 from ext4.
pub fn kind(directory: &File) -> Result<String, Problem> {
    let failed = |errno: Errno| Problem::failed("find a directory's file system", errno);
    let stat = rustix::fs::statx(directory, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).map_err(failed)?;
    let told = stat.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    let mount = mounts()?.into_iter().find(|mount| told && mount.id == stat.stx_mnt_id);
    match mount {
        Some(mount) => Ok(mount.kind),
        // A mount that this process does not see, as in a container.
        None => Ok(of_magic(rustix::fs::fstatfs(directory).map_err(failed)?.f_type).into()),
    }
}

/// The kinds that matter here, by `f_type` (linux/magic.h).
fn of_magic(magic: rustix::fs::FsWord) -> &'static str {
    match magic {
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x6969 => "nfs",
        0xff53_4d42 | 0xfe53_4d42 => "cifs",
        0x0102_1994 => "tmpfs",
        _ => "unknown",
    }
}

/// Whether nothing can be written on the file system, or by this mount of it.
pub fn read_only(directory: &File) -> Result<bool, Problem> {
    let stat =
        rustix::fs::fstatvfs(directory).map_err(|errno| Problem::failed("find a directory's file system", errno))?;
    Ok(stat.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// Whether files can share blocks, on a file system of which some versions can: tested on two unnamed files that leave
/// nothing behind. On a full file system the files are empty; if there is no space even for that, sharing is assumed,
/// because the repository must be attached to free space in it.
pub fn shares_blocks(directory: &File) -> Result<bool, Problem> {
    let tried = "test for reflink support";
    let nameless = || {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        rustix::fs::openat(directory, ".", flags, Mode::from_raw_mode(0o600)).map(File::from)
    };
    let (mut from, to) = match nameless().and_then(|from| Ok((from, nameless()?))) {
        Ok(both) => both,
        Err(Errno::OPNOTSUPP) => return Ok(false),
        Err(Errno::NOSPC | Errno::DQUOT) => return Ok(true),
        Err(errno) => return Err(Problem::failed(tried, errno)),
    };
    match from.write_all(&[1; TRIAL]) {
        Err(error) if !matches!(Errno::from_io_error(&error), Some(Errno::NOSPC | Errno::DQUOT)) => {
            return Err(Problem::failed(tried, error));
        }
        _ => {}
    }
    match rustix::fs::ioctl_ficlone(&to, &from) {
        Ok(()) | Err(Errno::NOSPC | Errno::DQUOT) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL) => Ok(false),
        Err(errno) => Err(Problem::failed(tried, errno)),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_parsed() {
        let line = r"36 35 98:0 /mnt1 /mnt\0402 rw,noatime shared:1 master:2 - ext3 /dev/root rw,errors=continue";
        let mount = Mount { id: 36, at: "/mnt 2".into(), kind: "ext3".into(), source: "/dev/root".into() };
        assert_eq!(parse(line), Some(mount));
        let plain = "90 1 0:50 / /srv rw,relatime - nfs4 server:/export rw,vers=4.2";
        assert_eq!(parse(plain).unwrap().source, "server:/export");
        for wrong in ["", "36 35", "36 35 98:0 / /mnt rw - ext4", "x 35 98:0 / /mnt rw - ext4 /dev/root"] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn octal_escapes_are_decoded() {
        assert_eq!(unescaped(r"a\040b\134c\011"), "a b\\c\t");
        assert_eq!(unescaped(r"\9\04"), r"\9\04");
    }

    #[test]
    fn the_root_file_system_is_found() {
        assert!(mount_at(Path::new("/")).unwrap().is_some());
        assert!(mount_at(Path::new("/proc/self")).unwrap().is_none());
        assert_eq!(kind(&File::open("/proc").unwrap()).unwrap(), "proc");
    }
}
