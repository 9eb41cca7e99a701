//! The paths of a served VBD: a directory with its sockets, and its log.
//!
//! It knows paths, modes and owners, but nothing about processes. Invariant: from the moment a socket exists, only
//! permitted users can reach it.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use api::{AbsolutePath, Code, Problem, Transport};
use uuid::Uuid;

use crate::config::Config;

/// Size of the log's tail, in bytes, that is searched for a line to quote: a message, its advice and a backtrace.
const LAST_LINES_MAX: u64 = 2048;

/// The paths of a served VBD.
#[derive(Clone, Debug)]
pub struct DiskPaths {
    directory: PathBuf,
    log: PathBuf,
}

/// Listening sockets of a disk.
#[derive(Debug)]
pub struct Sockets {
    /// For the guest's monitor or for clients; `None` for a Xen guest, which uses rings.
    pub transport: Option<OwnedFd>,
    /// For the daemon.
    pub control: OwnedFd,
}

/// The directory that contains those of all VBDs.
pub fn all(config: &Config) -> PathBuf {
    config.run_directory.join("vbd")
}

/// The directory of the disks' logs.
pub fn logs(config: &Config) -> PathBuf {
    config.log_directory.join("vbd")
}

impl DiskPaths {
    /// The paths of a VBD.
    pub fn of(config: &Config, vbd: Uuid) -> DiskPaths {
        let name = vbd.to_string();
        let log = logs(config).join(format!("{name}.log"));
        DiskPaths { directory: all(config).join(name), log }
    }

    /// The socket to which the guest's monitor or clients connect.
    pub fn transport(&self, transport: Transport) -> PathBuf {
        self.directory.join(match transport {
            Transport::Nbd => "nbd.sock",
            Transport::VhostUser | Transport::Blkif => "vhost.sock",
        })
    }

    /// The transport socket as the API shows it.
    pub fn shown(&self, transport: Transport) -> Result<AbsolutePath, Problem> {
        let path = self.transport(transport).to_string_lossy().into_owned();
        path.try_into().map_err(|why: String| Problem::new(Code::Invalid, format!("run-directory: {why}")))
    }

    /// The control socket.
    pub fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    /// The statistics page of the disk, which survives a killed or replaced process.
    pub fn page(&self) -> PathBuf {
        stats::of_daemon(&self.directory)
    }

    /// Opens the statistics page for the process that serves the disk. Call after [`DiskPaths::listen`].
    pub fn open_page(&self) -> io::Result<File> {
        File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(self.page())
    }

    /// Listens, replacing the sockets of an earlier process. Members of `group` may connect to the transport, and so
    /// may the user `guest`, which the VM's monitor runs as.
    pub fn listen(&self, transport: Transport, group: Option<u32>, guest: Option<u32>) -> Result<Sockets, Problem> {
        let listen = || {
            // No other user may connect before all modes are set.
            match DirBuilder::new().mode(0o700).create(&self.directory) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
            let at = (transport != Transport::Blkif).then(|| self.transport(transport));
            let transport = at.as_ref().map(|path| bind(path, group)).transpose()?;
            let sockets = Sockets { transport, control: bind(&self.control(), None)? };
            if group.is_some() {
                chown(&self.directory, None, group)?;
                fs::set_permissions(&self.directory, Permissions::from_mode(0o710))?;
            }
            if let (Some(path), Some(guest)) = (at, guest) {
                self.open_to(&path, guest)?;
            }
            Ok::<_, io::Error>(sockets)
        };
        listen().map_err(|error| {
            Problem::failed(format_args!("listen in {}", self.directory.display()), error)
                .advise("check that run-directory is writable and short (a socket path has at most 107 bytes)")
        })
    }

    /// Lets the user of a VM's monitor connect to the transport of a disk that is already served.
    pub fn let_in(&self, transport: Transport, guest: u32) -> Result<(), Problem> {
        let path = self.transport(transport);
        match self.open_to(&path, guest) {
            // It is being restarted, and will then find the VM.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => {
                done.map_err(|error| Problem::failed(format_args!("give a VM access to {}", path.display()), error))
            }
        }
    }

    /// Makes that user the socket's owner; others can search the directory but find only sockets of others.
    fn open_to(&self, path: &Path, guest: u32) -> io::Result<()> {
        chown(path, Some(guest), None)?;
        fs::set_permissions(&self.directory, Permissions::from_mode(0o711))
    }

    /// Removes the directory; not an error if it does not exist.
    pub fn remove(&self) -> Result<(), Problem> {
        match fs::remove_dir_all(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Problem::failed(format_args!("remove {}", self.directory.display()), error))
            }
            _ => Ok(()),
        }
    }

    /// Opens the log of the process. A plug (`fresh`) starts a new log and keeps the previous one; a restart appends.
    pub fn open_log(&self, fresh: bool) -> Result<File, Problem> {
        let open = || {
            if fresh {
                match fs::rename(&self.log, self.log_before()) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            File::options().create(true).append(true).open(&self.log)
        };
        open().map_err(|error| Problem::failed(format_args!("write the log {}", self.log.display()), error))
    }

    fn log_before(&self) -> PathBuf {
        self.log.with_extension("log.1")
    }

    /// The path of the log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// The length of the log in bytes; 0 if there is none.
    pub fn log_len(&self) -> u64 {
        fs::metadata(&self.log).map_or(0, |metadata| metadata.len())
    }

    /// The last panic that the disk process has logged beyond this length of the log. Other fatal errors are in its
    /// output ([`super::process::DiskProcess::last_word`]).
    pub fn last_panic_since(&self, len: u64) -> Option<String> {
        let read = || {
            let mut file = File::open(&self.log)?;
            let from = file.metadata()?.len().saturating_sub(LAST_LINES_MAX).max(len);
            file.seek(SeekFrom::Start(from))?;
            let mut bytes = Vec::new();
            file.take(LAST_LINES_MAX).read_to_end(&mut bytes)?;
            Ok::<_, io::Error>(String::from_utf8_lossy(&bytes).into_owned())
        };
        let (text, begin) = (read().ok()?, "tapline-disk: PANIC, ");
        text.lines().rev().find_map(|line| line.strip_prefix(begin)).map(|what| format!("panic, {what}"))
    }

    /// Removes the logs of a VBD that no longer exists.
    pub fn remove_logs(&self) -> Result<(), Problem> {
        for path in [self.log.clone(), self.log_before()] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Problem::failed(format_args!("remove {}", path.display()), error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Listens on a socket for its owner alone, or for a group as well.
fn bind(path: &Path, group: Option<u32>) -> io::Result<OwnedFd> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixListener::bind(path)?;
    chown(path, None, group)?;
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    Ok(socket.into())
}

#[cfg(test)]
mod test {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn place() -> (tempfile::TempDir, DiskPaths) {
        let room = tempfile::tempdir().unwrap();
        let run = room.path().to_owned();
        let config = Config { run_directory: run.join(""), log_directory: run.join("log"), ..Config::default() };
        fs::create_dir(all(&config)).unwrap();
        fs::create_dir_all(logs(&config)).unwrap();
        (room, DiskPaths::of(&config, Uuid::new_v4()))
    }

    #[test]
    fn sockets_of_a_dead_process_are_replaced() {
        let (_room, place) = place();
        drop(place.listen(Transport::VhostUser, None, None).unwrap());
        assert!(UnixStream::connect(place.control()).is_err());
        let _sockets = place.listen(Transport::VhostUser, None, None).unwrap();
        UnixStream::connect(place.control()).unwrap();
        UnixStream::connect(place.transport(Transport::VhostUser)).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&place.directory), mode(&place.control())), (0o700, 0o600));
        place.remove().unwrap();
        place.remove().unwrap();
    }

    #[test]
    fn a_group_may_use_the_transport_but_not_the_control_socket() {
        let (_room, place) = place();
        let group = rustix::process::getegid().as_raw();
        let _sockets = place.listen(Transport::Nbd, Some(group), None).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&place.transport(Transport::Nbd)), mode(&place.control())), (0o660, 0o600));
    }

    #[test]
    fn the_old_log_is_kept_and_only_a_panic_of_the_last_process_is_quoted() {
        use std::io::Write;
        let (_room, place) = place();
        assert_eq!((place.log_len(), place.last_panic_since(0)), (0, None));
        place.open_log(true).unwrap().write_all(b"tapline-disk: PANIC, before\ntapline-disk: serving\n").unwrap();
        let begun = place.log_len();
        assert_eq!(place.last_panic_since(begun), None);
        let panic = b"tapline-disk: PANIC, a fault\n  0: a frame\n";
        place.open_log(false).unwrap().write_all(panic).unwrap();
        assert_eq!(place.last_panic_since(begun).as_deref(), Some("panic, a fault"));
        place.open_log(true).unwrap().write_all(b"tapline-disk: client 1: client disconnected\n").unwrap();
        assert_eq!(place.last_panic_since(0), None, "it is no error");
        assert!(fs::read_to_string(place.log_before()).unwrap().contains("tapline-disk: serving\n"));
        place.remove_logs().unwrap();
        assert_eq!((place.log_len(), place.last_panic_since(0)), (0, None));
    }
}
