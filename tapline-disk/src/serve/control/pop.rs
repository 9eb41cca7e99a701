//! Layers that leave the chain of a disk when it is reverted: no client may be connected, and nothing in flight.

use control::Kind;

use super::work::Work;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The layers above `depth` leave the chain of a disk that stands still.
pub fn pop_to(depth: usize, work: &mut Work<'_>) -> Result<(), Failure> {
    // A client may have connected since the request.
    nobody_connected(work)?;
    nothing_asked(work)?;
    for layer in work.disk.pop_to(depth)? {
        if let Err(error) = work.engine.remove(layer.file) {
            say(format_args!("an unused file could not be closed: {error}"));
        }
    }
    Ok(())
}

/// What a guest has in its caches would not fit what it reads from now on.
pub fn nobody_connected(work: &Work<'_>) -> Result<(), Failure> {
    match work.server.peers() {
        0 => Ok(()),
        1 => Err(connected("a guest or a client is connected".into())),
        peers => Err(connected(format!("{peers} clients are connected"))),
    }
}

/// Requests of a disconnected client belong to the current state of the disk, and are carried out when requests are
/// released again.
fn nothing_asked(work: &Work<'_>) -> Result<(), Failure> {
    match work.disk.in_flight() {
        0 => Ok(()),
        1 => Err(connected("a request from a disconnected client has not completed yet".into())),
        count => Err(connected(format!("{count} requests from disconnected clients have not completed yet"))),
    }
}

fn connected(what: String) -> Failure {
    Failure::of(Kind::Connected, format!("cannot revert the disk: {what}"))
        .advise("shut the guest down or disconnect it, then retry")
}
