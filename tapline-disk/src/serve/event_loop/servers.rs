//! NBD servers of the disk's images that are away, or back.
//!
//! It knows nothing about connections. Invariant: the control socket is served after each such change.

use transport::Server;

use super::EventLoop;

impl<S: Server> EventLoop<S> {
    /// Has the control socket notify its watchers if a server is away, or all are back.
    pub(super) fn look_at_servers(&mut self) {
        let away = self.engine.away().is_some();
        self.control_due |= std::mem::replace(&mut self.said_away, away) != away;
    }
}
