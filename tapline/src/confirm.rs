//! Asks for confirmation before data is lost, as the disk program does.

use api::{Code, Problem};
use control::Kind;

/// Options of verbs that destroy something.
#[derive(Clone, Copy, Debug, clap::Args)]
#[group(skip)]
pub struct Confirm {
    #[command(flatten)]
    confirm: arguments::Confirm,
}

impl Confirm {
    /// Returns if the object may be destroyed.
    pub fn ask(self, what: &str) -> Result<(), Problem> {
        self.ask_or(what, None)
    }

    /// As `ask`; without a terminal the error also suggests the command `instead`.
    pub fn ask_or(self, what: &str, instead: Option<&str>) -> Result<(), Problem> {
        self.confirm.ask(what).map_err(|error| {
            let code = match error.kind {
                Kind::Invalid => Code::Invalid,
                Kind::Cancelled => Code::Cancelled,
                _ => Code::Failed,
            };
            let advice = error.advice.map(|advice| match instead {
                Some(instead) => format!("{advice}; {instead}"),
                None => advice,
            });
            Problem { advice, ..Problem::new(code, error.message) }
        })
    }
}
