//! Removes layers from the chain of a disk that is reverted: no client may be connected, and nothing in flight.

use control::Kind;

use super::work::Work;
use crate::process::failure::Failure;
use crate::process::log::say;

/// Removes the layers above `depth` from the chain of a quiesced disk.
pub fn pop_to(depth: usize, work: &mut Work<'_>) -> Result<(), Failure> {
    // A client may have connected since the request.
    must_have_no_peers(work)?;
    must_have_no_requests(work)?;
    for layer in work.disk.pop_to(depth)? {
        if let Err(error) = work.engine.remove(layer.file) {
            say(format_args!("an unused file could not be closed: {error}"));
        }
    }
    Ok(())
}

/// Fails if a client is connected: a guest's caches would not match the reverted disk.
pub fn must_have_no_peers(work: &Work<'_>) -> Result<(), Failure> {
    match work.server.peers() {
        0 => Ok(()),
        1 => Err(connected("a guest or a client is connected".into())),
        peers => Err(connected(format!("{peers} clients are connected"))),
    }
}

/// Fails if requests of a disconnected client are pending: they belong to the current state of the disk, and would be
/// executed when requests are released again.
fn must_have_no_requests(work: &Work<'_>) -> Result<(), Failure> {
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
