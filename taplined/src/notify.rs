//! Notifications to systemd (sd_notify(3)), if it requested them.

use std::os::unix::net::UnixDatagram;

/// Reports that the daemon serves.
pub fn ready() {
    notify("READY=1");
}

/// Pings the watchdog.
pub fn alive() {
    notify("WATCHDOG=1");
}

/// Reports that the daemon is stopping.
pub fn stopping() {
    notify("STOPPING=1");
}

fn notify(state: &str) {
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
    // A name that starts with @ is in the abstract namespace.
    let to = match address.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(address)?,
    };
    socket.send_to_addr(state.as_bytes(), &to).map(drop)
}
