//! Asks for confirmation before something is lost, as the disk program does.

use api::{Code, Problem};

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
        match self.confirm.agreed(what) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Problem::new(Code::Cancelled, "not confirmed: nothing was done")),
            Err(error) => Err(Problem::failed("read the answer", error)),
        }
    }
}
