//! Events of a server, kept until somebody looks.
//!
//! Knows nothing about what an event is, nor where it is logged. Invariant: a hostile peer can cause any number of
//! events, and still only [`Noted::ROOM`] of them are kept between two looks.

use std::error::Error;

/// Something worth a line in a log.
pub trait Noted {
    /// Events kept.
    const ROOM: usize;

    /// So many more of them happened than were kept.
    fn more(count: usize) -> Self;
}

/// Events not looked at yet.
pub struct Log<E> {
    events: Vec<E>,
    more: usize,
}

impl<E> Default for Log<E> {
    fn default() -> Log<E> {
        Log { events: Vec::new(), more: 0 }
    }
}

impl<E: Noted> Log<E> {
    /// Notes an event, or that there were too many.
    pub fn note(&mut self, event: E) {
        if self.events.len() < E::ROOM {
            self.events.push(event);
        } else {
            self.more = self.more.saturating_add(1);
        }
    }

    /// The events since the last look.
    pub fn take(&mut self) -> Vec<E> {
        let more = std::mem::take(&mut self.more);
        let mut events = std::mem::take(&mut self.events);
        if more > 0 {
            events.push(E::more(more));
        }
        events
    }
}

/// An error and what caused it, in one line.
pub fn in_full(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| Error::source(cause));
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}
