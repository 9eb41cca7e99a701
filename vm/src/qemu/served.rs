//! Checks whether a disk is served at a socket and accepts a new client, before QEMU tries.
//!
//! QEMU 7.2 with reconnect waits forever for a socket without a listener, and for a server that does not respond;
//! meanwhile the guest with all its processors and the monitor are blocked. So we connect first, and begin like any
//! frontend: VHOST_USER_GET_FEATURES (QEMU, docs/interop/vhost-user.rst). Invariant: it takes bounded time, and the
//! server is free again.

use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use thiserror::Error;

use crate::socket;

/// GET_FEATURES (1), version 1, no payload.
const QUESTION: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// The same with the bit of a reply, and eight bytes of features.
const ANSWER: [u8; 12] = [1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0];

/// No process serves there.
#[derive(Debug, Error)]
#[error("no disk is served at {}: {why}", path.display())]
pub struct NotServed {
    path: PathBuf,
    why: String,
}

/// Checks that a disk is served at `path` to the next client.
pub fn ask(path: &Path, patience: Duration) -> Result<(), NotServed> {
    converse(path, Instant::now() + patience).map_err(|why| NotServed { path: path.to_owned(), why })
}

fn converse(path: &Path, deadline: Instant) -> Result<(), String> {
    const BUSY: &str = "it does not respond; another VM may be using it";
    let mut stream = socket::connect(path, deadline).map_err(|error| match error {
        Errno::AGAIN => BUSY.to_owned(),
        error => std::io::Error::from(error).to_string(),
    })?;
    let told = |error: std::io::Error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => BUSY.to_owned(),
        _ => error.to_string(),
    };
    stream.set_nonblocking(false).and_then(|()| stream.write_all(&QUESTION)).map_err(told)?;
    let mut answer = Vec::new();
    while answer.len() < ANSWER.len() {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(told)?;
        let mut chunk = [0; 20];
        match stream.read(&mut chunk) {
            Ok(0) => return Err("it has closed the connection".to_owned()),
            Ok(len) => answer.extend_from_slice(chunk.get(..len).unwrap_or_default()),
            // A socket with a timeout is interrupted by any signal, also by one without a handler: signal(7).
            Err(error) if error.kind() == ErrorKind::Interrupted && Instant::now() < deadline => {}
            Err(error) => return Err(told(error)),
        }
    }
    if answer.starts_with(&ANSWER) {
        Ok(())
    } else {
        Err("the process listening there does not speak vhost-user".to_owned())
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    fn asked(answer: &'static [u8]) -> String {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = [0; 12];
            stream.read_exact(&mut question).unwrap();
            assert_eq!(question, QUESTION);
            stream.write_all(answer).unwrap();
        });
        let said = ask(&path, Duration::from_secs(20)).map_or_else(|error| error.to_string(), |()| "served".to_owned());
        server.join().unwrap();
        said
    }

    #[test]
    fn only_a_vhost_user_reply_counts() {
        assert_eq!(asked(&[1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0, 0]), "served");
        assert!(asked(b"HTTP/1.1 400 Bad Request\r\n").contains("does not speak vhost-user"));
        assert!(asked(&[1, 0]).contains("has closed the connection"));
    }

    #[test]
    fn a_missing_or_silent_server_is_reported_in_time() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("socket");
        let short = Duration::from_millis(100);
        let error = ask(&path, short).unwrap_err().to_string();
        assert!(error.contains("no disk is served at") && error.contains("No such file"), "{error}");
        let _listener = UnixListener::bind(&path).unwrap();
        let error = ask(&path, short).unwrap_err().to_string();
        assert!(error.contains("another VM may be using it"), "{error}");
    }

    /// For example a signal to a daemon, a VM that is frozen and resumed, or Ctrl-Z.
    #[test]
    fn a_signal_does_not_end_the_wait() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let signals = "for i in 1 2 3 4 5 6 7 8 9 10; do kill -STOP $PPID; kill -CONT $PPID; sleep 0.02; done";
        let mut sender = std::process::Command::new("sh").args(["-c", signals]).spawn().unwrap();
        while sender.try_wait().unwrap().is_none() {
            let error = ask(&path, Duration::from_millis(100)).unwrap_err().to_string();
            assert!(error.contains("another VM may be using it"), "{error}");
        }
    }
}
