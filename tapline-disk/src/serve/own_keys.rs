//! The keys under which the disk's single wait reports the served disk's own events, all in one place, so that no two
//! are equal.
//!
//! No server has so many connections or queues that its own keys collide with these. The largest are those of servers,
//! and one of the engine's lanes.

use transport::WatchKey;

/// What is waited for.
#[derive(Clone, Copy)]
enum Own {
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
    /// Of which there are many: the last.
    ControlClients,
}

const fn key(own: Own) -> WatchKey {
    WatchKey(u64::MAX - 64 - own as u64)
}

/// The wish that the disk ends.
pub const STOP: WatchKey = key(Own::Stop);
/// The wish that it is left to another process.
pub const LEAVE: WatchKey = key(Own::Leave);
/// The wish for statistics.
pub const REPORT: WatchKey = key(Own::Report);
/// A request that is held back may go.
pub const ADMISSION: WatchKey = key(Own::Admission);
/// The disk was not used for a while.
pub const QUIET: WatchKey = key(Own::Quiet);
/// Somebody connects to the control socket.
pub const CONTROL_LISTENER: WatchKey = key(Own::ControlListener);
/// An blocking_task is back.
pub const BLOCKING_TASK: WatchKey = key(Own::BlockingTask);
/// A merge has waited long enough.
pub const MERGE_TIMER: WatchKey = key(Own::MergeTimer);
/// The process that takes the place of this one says something, or has ended.
pub const SUCCESSOR: WatchKey = key(Own::Successor);
/// An upgrade has waited long enough.
pub const UPGRADE_TIMER: WatchKey = key(Own::UpgradeTimer);
/// The first client of the control socket; the others follow downwards.
const CONTROL_CLIENT: WatchKey = key(Own::ControlClients);

/// The client in this place.
pub fn of_client(place: usize) -> WatchKey {
    WatchKey(CONTROL_CLIENT.0.saturating_sub(u64::try_from(place).unwrap_or(u64::MAX)))
}

/// The place of the client with this key, if it is a client's.
pub fn client_of(key: WatchKey) -> Option<usize> {
    CONTROL_CLIENT.0.checked_sub(key.0).and_then(|place| usize::try_from(place).ok())
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
