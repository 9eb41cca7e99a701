//! The files that a killed disk process leaves: its claim, its control socket, its statistics.
//!
//! Invariant: nothing of a living process is removed. The claim is held in the meantime, so that no process begins to
//! serve the disk; a socket with a listener stays, and so do statistics that another process writes, such as those of
//! another backend for the same disk.

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use control::Error;
use rustix::io::Errno;
use xen::Store;

use super::claim::{Claim, Places};
use super::device::{Device, text};
use super::statistics::Statistics;
use super::wait;
use crate::socket;

/// How long a socket that accepts connections may belong to a process that is gone: if it watched the socket through
/// io_uring, the kernel closes it some time after a kill.
const TO_CLOSE: Duration = Duration::from_secs(1);

/// The control socket according to xenstore; it must be read while the device has its nodes.
pub fn control_of(store: &mut dyn Store, device: &Device) -> Result<Option<PathBuf>, Error> {
    Ok(text(store, None, &format!("{}/tapline/control", device.backend()))?.map(PathBuf::from))
}

/// Removes the files of a process that no longer exists. A failure is only reported: a leftover means nothing, and is
/// replaced by the next process.
pub fn remove(places: &Places, device: &Device, control: Option<&Path>, mut tell: impl FnMut(&str)) {
    // If a process has the claim now, all files belong to it.
    let Ok(claim) = Claim::take(places, device) else { return };
    let usual = [places.control(device), places.nbd(device)];
    let named = control.into_iter().filter(|&named| !usual.iter().any(|usual| named == usual));
    for socket in named.chain(usual.iter().map(PathBuf::as_path)) {
        remove_socket(socket)
            .unwrap_or_else(|error| tell(&format!("the socket {} could not be removed: {error}", socket.display())));
    }
    let left = Statistics::of(&places.statistics, device.guest, device.vdev).remove_left();
    left.unwrap_or_else(|error| {
        tell(&format!("statistics in {} could not be removed: {error}", places.statistics.display()))
    });
    drop(claim);
}

/// Removes a socket without a listener: one that refuses connections.
fn remove_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {}
        _ => return Ok(()),
    }
    let until = Instant::now() + TO_CLOSE;
    loop {
        let mut connection = match socket::connect(path, Instant::now()) {
            Err(Errno::CONNREFUSED) => return fs::remove_file(path),
            // Its queue is full: there is a listener.
            Err(Errno::NOENT | Errno::AGAIN) => return Ok(()),
            connected => connected?,
        };
        let left = until.saturating_duration_since(Instant::now());
        let closed = wait::readable(&connection, left).map_err(io::Error::other)?
            && match connection.read(&mut [0]) {
                Ok(len) => len == 0,
                Err(error) => error.kind() == ErrorKind::ConnectionReset,
            };
        // A listener keeps the connection open, or says something.
        if !closed || left.is_zero() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::super::fake::machine;
    use super::*;

    struct Left {
        _directory: tempfile::TempDir,
        places: Places,
        device: Device,
        sockets: [PathBuf; 3],
        pid: PathBuf,
        statistics: [PathBuf; 2],
    }

    /// The files left by a killed process.
    fn left() -> Left {
        let directory = tempfile::tempdir().unwrap();
        let places = Places::below(directory.path());
        let device = machine().2;
        for place in [&places.run, &places.statistics] {
            fs::create_dir(place).unwrap();
        }
        let named = directory.path().join("named.sock");
        let sockets = [places.control(&device), named, places.nbd(&device)];
        for socket in &sockets {
            drop(UnixListener::bind(socket).unwrap());
        }
        let pid = places.run.join("xen-tapline-7-51728.pid");
        fs::write(&pid, "1\n").unwrap();
        let mut process = Command::new("true").spawn().unwrap();
        process.wait().unwrap();
        let statistics = ["vbd3-7-51728".to_owned(), format!("td3-{}", process.id())];
        let statistics = statistics.map(|directory| places.statistics.join(directory));
        for (directory, file) in statistics.iter().zip(["statistics", "vbd-7-51728"]) {
            fs::create_dir(directory).unwrap();
            fs::write(directory.join(file), [1; 112]).unwrap();
        }
        Left { _directory: directory, places, device, sockets, pid, statistics }
    }

    impl Left {
        fn remove(&self) {
            remove(&self.places, &self.device, Some(&self.sockets[1]), |said| panic!("{said}"));
        }

        fn all(&self) -> [&PathBuf; 6] {
            [&self.sockets[0], &self.sockets[1], &self.sockets[2], &self.pid, &self.statistics[0], &self.statistics[1]]
        }
    }

    #[test]
    fn the_files_of_a_killed_process_are_removed() {
        let left = left();
        left.remove();
        assert!(left.all().iter().all(|path| !path.exists()), "{:?}", left.all().map(|path| path.exists()));
        // Nor is it a fault that there is nothing.
        left.remove();
        assert!(left.all().iter().all(|path| !path.exists()));
    }

    #[test]
    fn the_files_of_a_serving_process_are_kept() {
        let left = left();
        let _claim = Claim::take(&left.places, &left.device).unwrap();
        left.remove();
        assert!(left.all().iter().all(|path| path.exists()));
    }

    #[test]
    fn files_of_another_backend_are_kept() {
        let left = left();
        fs::remove_file(&left.sockets[1]).unwrap();
        let _listener = UnixListener::bind(&left.sockets[1]).unwrap();
        let _statistics = Statistics::of(&left.places.statistics, left.device.guest, left.device.vdev)
            .make(std::process::id())
            .unwrap();
        left.remove();
        assert_eq!(left.all().map(|path| path.exists()), [false, true, false, false, true, false]);
        assert!(left.places.statistics.join(format!("td3-{}/vbd-7-51728", std::process::id())).exists());
    }

    #[test]
    fn only_sockets_are_removed_as_sockets() {
        let left = left();
        fs::remove_file(&left.sockets[1]).unwrap();
        fs::write(&left.sockets[1], "precious").unwrap();
        left.remove();
        assert!(left.sockets[1].exists());
    }

    #[test]
    fn a_socket_whose_listener_accepts_nothing_is_kept() {
        let left = left();
        fs::remove_file(&left.sockets[1]).unwrap();
        let listener = UnixListener::bind(&left.sockets[1]).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let mut waiting = Vec::new();
        while let Ok(connection) = socket::connect(&left.sockets[1], Instant::now()) {
            waiting.push(connection);
        }
        left.remove();
        assert!(left.sockets[1].exists());
    }
}
