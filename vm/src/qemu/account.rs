//! The user that QEMU runs as, and its access to a machine's files, which that user may not be able to open.
//!
//! It knows nothing about how the user was chosen. Invariant: QEMU has no capability, cannot gain any by executing
//! programs, and belongs only to the given groups; files are opened for it before it becomes that user, or copied where
//! it only accepts a path, and no other user can read them. It is started through programs that replace themselves with
//! the next one: doing the same in a forked child would require unsafe code.

use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use super::console::{CONSOLE, GUEST_PORT};
use super::hardware::{Boot, Console, ConsoleTo, Hardware};
use super::platform::{Dvd, Platform, Port};

/// The first descriptor that is not spoken for.
const FIRST: u8 = 3;

/// A user, who is no other program's if all is well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its number.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Other groups: that of /dev/kvm.
    pub groups: Vec<u32>,
}

/// A file that could not be prepared.
pub(super) struct NotReady {
    pub what: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

/// The hardware as passed to QEMU, and how to start QEMU.
#[derive(Debug)]
pub(super) struct Means {
    pub hardware: Hardware,
    /// Files to be open, in the order of their descriptors.
    opened: Vec<(Use, PathBuf)>,
    /// Files that are not needed when the guest runs.
    copies: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Read,
    Append,
}

impl Account {
    /// The command-line prefix that runs a program as this user.
    pub(super) fn words(&self) -> Vec<String> {
        let groups = match self.groups.iter().map(u32::to_string).collect::<Vec<_>>() {
            none if none.is_empty() => "--clear-groups".to_owned(),
            some => format!("--groups={}", some.join(",")),
        };
        let (user, group) = (format!("--reuid={}", self.uid), format!("--regid={}", self.gid));
        let none = ["--ambient-caps=-all", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"];
        let words = ["setpriv".to_owned(), user, group, groups].into_iter();
        words.chain(none.map(str::to_owned)).collect()
    }

    /// Gives it access to a directory: it may create files there, but not change those of others. Other users have no
    /// access.
    pub fn own(&self, directory: &Path) -> io::Result<()> {
        chown(directory, None, Some(self.gid))?;
        fs::set_permissions(directory, Permissions::from_mode(0o1770))
    }
}

impl Means {
    /// Makes the hardware's files accessible for the account, in the machine's directory where necessary.
    pub fn prepare(hardware: &Hardware, directory: &Path, account: &Account) -> Result<Means, NotReady> {
        let mut means = Means { hardware: hardware.clone(), opened: Vec::new(), copies: Vec::new() };
        if let Boot::Kernel { kernel, initrd, .. } = &hardware.boot {
            let (kernel, initrd) = (kernel.clone(), initrd.clone());
            let kernel_there = means.readable(kernel, "kernel", directory, account)?;
            let initrd_there = initrd.map(|path| means.readable(path, "initrd", directory, account)).transpose()?;
            if let Boot::Kernel { kernel, initrd, .. } = &mut means.hardware.boot {
                (*kernel, *initrd) = (kernel_there, initrd_there);
            }
        }
        means.hardware.console = match hardware.console.clone() {
            Some(Console { device, to: ConsoleTo::Log(path) }) => {
                Some(Console { device, to: ConsoleTo::Log(means.open(Use::Append, path)) })
            }
            Some(Console { device, to: ConsoleTo::Socket(path) }) => {
                Some(Console { device, to: ConsoleTo::Socket(socket(&path, CONSOLE, directory)?) })
            }
            None => None,
        };
        means.hardware.seed = hardware.seed.clone().map(|path| means.open(Use::Read, path));
        means.hardware.guest_port =
            hardware.guest_port.as_ref().map(|path| socket(path, GUEST_PORT, directory)).transpose()?;
        let Platform { parallel, hvm_serial, dvd, vnc, .. } = hardware.platform.clone();
        means.hardware.platform.parallel = means.port(parallel, "parallel", directory)?;
        means.hardware.platform.hvm_serial = means.port(hvm_serial, "serial", directory)?;
        if let Dvd::File(path) = dvd {
            means.hardware.platform.dvd = Dvd::File(means.open(Use::Read, path));
        }
        means.hardware.platform.vnc = vnc.map(|path| socket(&path, "vnc", directory)).transpose()?;
        Ok(means)
    }

    /// The command-line prefix that gives all of that to a program.
    pub fn words(&self) -> Vec<String> {
        if self.opened.is_empty() {
            return Vec::new();
        }
        let mut script = String::from("exec");
        for (number, (argument, (purpose, _))) in (FIRST..).zip((1..).zip(&self.opened)) {
            let operator = if *purpose == Use::Append { ">>" } else { "<" };
            script.push_str(&format!(" {number}{operator}\"${argument}\""));
        }
        script.push_str(&format!("; shift {}; exec \"$@\"", self.opened.len()));
        let paths = self.opened.iter().map(|(_, path)| path.to_string_lossy().into_owned());
        ["sh".to_owned(), "-c".to_owned(), script, "sh".to_owned()].into_iter().chain(paths).collect()
    }

    /// QEMU's options for the same.
    pub fn descriptors(&self) -> Vec<String> {
        let numbers = (FIRST..).zip(&self.opened);
        numbers.flat_map(|(number, _)| ["-add-fd".to_owned(), format!("fd={number},set={number}")]).collect()
    }

    /// The guest runs: removes what was only needed for the start.
    pub fn started(&self) {
        for copy in &self.copies {
            // It is in the machine's directory, and is at the latest removed with that.
            fs::remove_file(copy).unwrap_or_default();
        }
    }

    fn open(&mut self, purpose: Use, path: PathBuf) -> PathBuf {
        let number = (FIRST..).nth(self.opened.len()).unwrap_or(u8::MAX);
        self.opened.push((purpose, path));
        format!("/dev/fdset/{number}").into()
    }

    fn port(&mut self, port: Port, name: &str, directory: &Path) -> Result<Port, NotReady> {
        Ok(match port {
            Port::File(path) => Port::File(self.open(Use::Append, path)),
            Port::Unix(path) => Port::Unix(socket(&path, name, directory)?),
            other => other,
        })
    }

    /// A file, where everybody may read it; else a copy for the account. QEMU takes these by a path only.
    fn readable(
        &mut self,
        path: PathBuf,
        name: &str,
        directory: &Path,
        account: &Account,
    ) -> Result<PathBuf, NotReady> {
        if everybody_may(&path, 0o4) && directories_open_to_all(&path).is_ok() {
            return Ok(path);
        }
        let to = directory.join(name);
        let copy = || {
            let mut from = fs::File::open(&path)?;
            let mut copy = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&to)?;
            io::copy(&mut from, &mut copy)?;
            chown(&to, None, Some(account.gid))?;
            fs::set_permissions(&to, Permissions::from_mode(0o640))
        };
        self.copies.push(to.clone());
        copy().map_err(|source| NotReady { what: "copy", path: path.clone(), source })?;
        Ok(to)
    }
}

/// Whether all users have a right to the file.
fn everybody_may(path: &Path, right: u32) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.mode() & right == right)
}

/// Checks that all users may search the directories above a path; otherwise returns the inaccessible one.
pub(super) fn directories_open_to_all(path: &Path) -> Result<(), PathBuf> {
    // Directories that a link leads through count as well, and are the ones that matter.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let closed = path.ancestors().skip(1).find(|above| !above.as_os_str().is_empty() && !everybody_may(above, 0o1));
    closed.map_or(Ok(()), |closed| Err(closed.to_owned()))
}

/// Where QEMU listens instead of at `path`, which leads there: it may make nothing elsewhere.
fn socket(path: &Path, name: &str, directory: &Path) -> Result<PathBuf, NotReady> {
    let there = directory.join(name);
    let lead = || {
        match fs::symlink_metadata(path) {
            Ok(found) if found.file_type().is_socket() || found.is_symlink() => fs::remove_file(path)?,
            Ok(_) => return Err(io::Error::other("there is a file that is not a socket; remove it")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        symlink(&there, path)
    };
    match path == there {
        true => Ok(there),
        false => lead().map(|()| there.clone()).map_err(|source| NotReady {
            what: "create an access path to a socket at",
            path: path.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod test {
    use super::super::hardware::test::small;
    use super::*;

    fn own() -> Account {
        let gid = rustix::process::getegid().as_raw();
        Account { uid: rustix::process::geteuid().as_raw(), gid, groups: vec![7, 8] }
    }

    #[test]
    fn an_account_has_only_the_given_groups_and_no_capabilities() {
        let words = own().words().join(" ");
        assert!(words.contains("--groups=7,8") && words.contains("--bounding-set=-all --no-new-privs --"), "{words}");
        assert!(Account { groups: Vec::new(), ..own() }.words().contains(&"--clear-groups".to_owned()));
    }

    #[test]
    fn files_are_opened_with_permission_and_named_by_descriptors() {
        let room = tempfile::tempdir().unwrap();
        let (log, iso) = (room.path().join("a 'b\" $c.log"), room.path().join("c.iso"));
        fs::write(&iso, "iso").unwrap();
        let platform = Platform { hvm_serial: Port::File(log.clone()), dvd: Dvd::File(iso), ..Platform::default() };
        let hardware = Hardware { platform, boot: Boot::Firmware, ..small() };
        let means = Means::prepare(&hardware, room.path(), &own()).unwrap_or_else(|_| panic!());
        assert_eq!(means.hardware.platform.hvm_serial, Port::File("/dev/fdset/3".into()));
        assert_eq!(means.hardware.platform.dvd, Dvd::File("/dev/fdset/4".into()));
        assert_eq!(means.descriptors().join(" "), "-add-fd fd=3,set=3 -add-fd fd=4,set=4");
        let words = means.words();
        let (program, arguments) = words.split_first().unwrap();
        let mut command = std::process::Command::new(program);
        let said = command.args(arguments).args(["sh", "-c", "echo hello >&3; cat <&4"]).output().unwrap();
        assert_eq!((said.stdout.as_slice(), fs::read_to_string(log).unwrap().as_str()), (&b"iso"[..], "hello\n"));
    }

    #[test]
    fn a_private_kernel_is_copied_during_the_start() {
        let room = tempfile::tempdir().unwrap();
        let kernel = room.path().join("vmlinuz");
        fs::write(&kernel, "kernel").unwrap();
        fs::set_permissions(&kernel, Permissions::from_mode(0o600)).unwrap();
        let boot = Boot::Kernel { kernel, initrd: None, command_line: String::new() };
        let machine = room.path().join("machine");
        fs::create_dir(&machine).unwrap();
        let means = Means::prepare(&Hardware { boot, ..small() }, &machine, &own()).unwrap_or_else(|_| panic!());
        let Boot::Kernel { kernel, .. } = &means.hardware.boot else { panic!() };
        assert_eq!((kernel, fs::read_to_string(kernel).unwrap().as_str()), (&machine.join("kernel"), "kernel"));
        assert_eq!(fs::metadata(kernel).unwrap().mode() & 0o777, 0o640);
        means.started();
        assert!(!kernel.exists());
    }

    #[test]
    fn a_link_opens_no_directory() {
        let room = tempfile::tempdir().unwrap();
        let (closed, link) = (room.path().join("closed"), room.path().join("link"));
        fs::set_permissions(room.path(), Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(&closed).unwrap();
        fs::write(closed.join("kernel"), "kernel").unwrap();
        symlink(closed.join("kernel"), &link).unwrap();
        fs::set_permissions(&closed, Permissions::from_mode(0o755)).unwrap();
        assert_eq!(directories_open_to_all(&link), Ok(()));
        fs::set_permissions(&closed, Permissions::from_mode(0o700)).unwrap();
        assert_eq!(directories_open_to_all(&link), Err(fs::canonicalize(closed).unwrap()));
    }

    #[test]
    fn a_socket_is_created_by_qemu_and_linked_to_the_requested_path() {
        let room = tempfile::tempdir().unwrap();
        let (asked, there) = (room.path().join("asked"), room.path().join("vnc"));
        for _ in 0..2 {
            assert!(socket(&asked, "vnc", room.path()).is_ok_and(|found| found == there));
        }
        assert_eq!(fs::read_link(&asked).unwrap(), there);
        fs::write(room.path().join("file"), "precious").unwrap();
        assert!(socket(&room.path().join("file"), "vnc", room.path()).is_err());
    }
}
