//! A fault in a program: told, and the end of the process.
//!
//! It knows nothing of what the program does: that it says itself. Invariant: whichever thread panics, whatever becomes
//! of what is told, the process ends by abort(3) at once, also where the profile unwinds: nothing that it holds can be
//! trusted, and a drop on the way could write. Whoever has started it sees SIGABRT.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::Display;
use std::panic::PanicHookInfo;

/// A panic.
#[derive(Debug)]
pub struct Panic<'a>(&'a PanicHookInfo<'a>);

/// From now on a panic is told by `tell`, and ends the process. It may come while any lock is held: `tell` waits for
/// none.
pub fn abort_on_panic(tell: fn(&Panic<'_>)) {
    std::panic::set_hook(Box::new(move |panic| {
        tell(&Panic(panic));
        std::process::abort();
    }));
}

impl Panic<'_> {
    /// What there is to say of it, in a line and, where that is asked for, a backtrace. `doing`: what the program was
    /// at, and what comes of its end.
    pub fn during(&self, doing: impl Display) -> String {
        let place = self.0.location().map(|location| format!(", at {location}")).unwrap_or_default();
        let payload = self.0.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("it says nothing");
        let trace = Backtrace::capture();
        let trace = if trace.status() == BacktraceStatus::Captured { format!("\n{trace}") } else { String::new() };
        format!("PANIC, a fault in this program{place}: {text}; {doing}{trace}")
    }
}
