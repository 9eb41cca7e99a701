//! Why an operation on a domain or its disk failed: what was tried on what, the cause, and what to do about it.

use std::error::Error;
use std::fmt;

use crate::syntax::in_full;

/// It was not done.
#[derive(Debug)]
pub struct NotDone {
    what: String,
    advice: Option<String>,
}

impl NotDone {
    /// `cannot {tried}: {why}`, followed by the causes of `why`.
    pub fn new(tried: impl fmt::Display, why: impl Into<Box<dyn Error + Send + Sync>>) -> NotDone {
        NotDone { what: format!("cannot {tried}: {}", in_full(&*why.into())), advice: None }
    }

    /// An error whose message already says what was tried and on what; its causes are added.
    pub fn said(error: impl Error) -> NotDone {
        NotDone { what: in_full(&error), advice: None }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> NotDone {
        self.advice = Some(advice.into());
        self
    }

    /// What was tried, on what, and why it failed.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The advice, if there is any.
    pub fn advice(&self) -> Option<&str> {
        self.advice.as_deref()
    }
}

impl Error for NotDone {}

impl fmt::Display for NotDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.advice {
            Some(advice) => write!(f, "\n  {advice}"),
            None => Ok(()),
        }
    }
}
