//! The keys of the served disk's own events in its single wait, all in one place, so that no two are equal.
//!
//! The keys of a server's connections and queues never reach these. The largest keys are those of servers,
//! and one of the engine's lanes.

use disk::size::{in_memory, on_disk};
use transport::WatchKey;

/// The disk's own events.
#[derive(Clone, Copy)]
enum OwnEvent {
    Stop,
    Leave,
    Report,
    Admission,
    Quiet,
    ControlListener,
    BlockingTask,
    MergeTimer,
    Successor,
    UpgradeTimer,
    /// The last, because there are many of them.
    ControlClients,
}

const fn key(event: OwnEvent) -> WatchKey {
    WatchKey(u64::MAX - 64 - event as u64)
}

/// A request to stop the disk.
pub const STOP: WatchKey = key(OwnEvent::Stop);
/// A request to leave the disk to another process.
pub const LEAVE: WatchKey = key(OwnEvent::Leave);
/// A request for statistics.
pub const REPORT: WatchKey = key(OwnEvent::Report);
/// Admission may release a request.
pub const ADMISSION: WatchKey = key(OwnEvent::Admission);
/// The idle timer has expired.
pub const QUIET: WatchKey = key(OwnEvent::Quiet);
/// A client connects to the control socket.
pub const CONTROL_LISTENER: WatchKey = key(OwnEvent::ControlListener);
/// A blocking task has ended.
pub const BLOCKING_TASK: WatchKey = key(OwnEvent::BlockingTask);
/// The merge timer has expired.
pub const MERGE_TIMER: WatchKey = key(OwnEvent::MergeTimer);
/// The successor of this process has sent a message, or exited.
pub const SUCCESSOR: WatchKey = key(OwnEvent::Successor);
/// The time limit of an upgrade has passed.
pub const UPGRADE_TIMER: WatchKey = key(OwnEvent::UpgradeTimer);
/// The first client of the control socket; the others have descending keys.
const CONTROL_CLIENT: WatchKey = key(OwnEvent::ControlClients);

/// Returns the key of the client with this index.
pub fn of_client(place: usize) -> WatchKey {
    WatchKey(CONTROL_CLIENT.0 - on_disk(place))
}

/// Returns the index of the client with this key, if it is a client's.
pub fn client_of(key: WatchKey) -> Option<usize> {
    CONTROL_CLIENT.0.checked_sub(key.0).map(in_memory)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_client_keys_map_to_clients() {
        assert!((0..16).all(|place| client_of(of_client(place)) == Some(place)));
        let others = [STOP, LEAVE, REPORT, ADMISSION, QUIET, CONTROL_LISTENER, BLOCKING_TASK, MERGE_TIMER, SUCCESSOR];
        assert!(others.into_iter().chain([UPGRADE_TIMER]).all(|key| client_of(key).is_none()));
    }
}
