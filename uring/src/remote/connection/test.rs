//! Servers of one name, and what a connection does when they end it. The time is a parameter: nothing waits.

use std::io::{ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nbd::client::Client;

use super::super::socket::Target;
use super::Connection;

/// A socket in a directory of its own, which is removed with this.
struct Server {
    listener: UnixListener,
    directory: PathBuf,
}

impl Server {
    fn new(name: &str) -> Server {
        let directory = std::env::temp_dir().join(format!("tapline-connection-{}-{name}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let listener = UnixListener::bind(directory.join("s")).unwrap();
        listener.set_nonblocking(true).unwrap();
        Server { listener, directory }
    }

    fn target(&self) -> Target {
        Target::Unix(self.directory.join("s"))
    }

    /// Accepts the connection that was made, if there is one, and sends all of a negotiation.
    fn negotiate(&self) -> Option<UnixStream> {
        let mut stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            Err(error) => panic!("{error}"),
        };
        // An export of 4096 bytes with flush, of a server without structured replies.
        let reply = |option: u32, kind: u32, payload: &[u8]| {
            let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
            let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
            [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, payload].concat()
        };
        let info = [&0u16.to_be_bytes()[..], &4096u64.to_be_bytes(), &0b101u16.to_be_bytes()].concat();
        let greeting = [&b"NBDMAGICIHAVEOPT"[..], &3u16.to_be_bytes()].concat();
        let unsupported = reply(8, (1 << 31) + 1, b"");
        let bytes = [greeting, unsupported, reply(7, 3, &info), reply(7, 1, b"")].concat();
        stream.write_all(&bytes).unwrap();
        Some(stream)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}

fn connection(servers: &[&Server], now: Instant) -> Connection {
    let client = Client::new("", true).unwrap();
    let uri = "nbd://host/".parse().unwrap();
    Connection::new(client, uri, servers.iter().map(|server| server.target()).collect(), |_| {}, now)
}

#[test]
fn after_a_loss_only_the_server_that_was_negotiated_with_is_tried() {
    let (one, other) = (Server::new("one"), Server::new("other"));
    let mut now = Instant::now();
    let mut connection = connection(&[&one, &other], now);
    connection.turn(now, &mut Vec::new());
    for round in 0..5 {
        let stream = one.negotiate().unwrap_or_else(|| panic!("round {round}: not connected"));
        connection.turn(now, &mut Vec::new());
        assert!(connection.client.is_up());
        drop(stream);
        connection.turn(now, &mut Vec::new());
        assert!(!connection.client.is_up());
        now += Duration::from_secs(10);
        connection.turn(now, &mut Vec::new());
    }
    assert!(other.negotiate().is_none(), "the other server was connected to");
}
