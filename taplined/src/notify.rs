//! Notifications to systemd (sd_notify(3)), if it asked for them.

use std::os::unix::net::UnixDatagram;

/// The daemon serves.
pub fn ready() {
    say("READY=1");
}

/// The daemon can do its work.
pub fn alive() {
    say("WATCHDOG=1");
}

/// The daemon ends.
pub fn stopping() {
    say("STOPPING=1");
}

fn say(state: &str) {
    let Some(address) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&address, state) {
        tracing::warn!(%error, "could not send {state} to systemd");
    }
}

fn send(address: &std::ffi::OsStr, state: &str) -> std::io::Result<()> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::SocketAddr;
    let socket = UnixDatagram::unbound()?;
    // A name that begins with @ is in the abstract name space.
    let to = match address.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(address)?,
    };
    socket.send_to_addr(state.as_bytes(), &to).map(drop)
}
