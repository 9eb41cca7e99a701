//! Reports a panic and ends the process.
//!
//! It knows nothing about what the program does: the program describes that itself. Invariant: whichever thread panics,
//! and whether or not the report succeeds, the process ends immediately with abort(3), even if the profile unwinds: its
//! state cannot be trusted, and a drop during unwinding could write. Its parent sees SIGABRT.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::Display;
use std::panic::PanicHookInfo;

/// A panic that is about to end the process.
#[derive(Debug)]
pub struct Panic<'a>(&'a PanicHookInfo<'a>);

/// From now on a panic is reported with `tell` and ends the process. It may happen while any lock is held, so `tell`
/// must not wait for one.
pub fn abort_on_panic(tell: fn(&Panic<'_>)) {
    std::panic::set_hook(Box::new(move |panic| {
        tell(&Panic(panic));
        std::process::abort();
    }));
}

impl Panic<'_> {
    /// The report, in a line and, if requested, a backtrace. `doing` describes what the program was doing, and the
    /// consequences of its end.
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
