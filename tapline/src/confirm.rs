//! «really?», before something is destroyed: only where somebody can answer.

use std::io::{self, IsTerminal};

use api::{Code, Problem};

use crate::session::say;

/// The options of a verb that destroys.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Confirm {
    /// Destroy without asking, also on a terminal
    #[arg(long, short)]
    yes: bool,
}

impl Confirm {
    /// Goes on if this may be destroyed. Scripts are not asked: they have nobody who could answer.
    pub fn ask(self, what: &str) -> Result<(), Problem> {
        if self.yes || !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
            return Ok(());
        }
        say(&format!("{what}: really? [y/N] "));
        let mut answer = String::new();
        let read = io::stdin().read_line(&mut answer);
        read.map_err(|error| Problem::failed("read the answer", error))?;
        if agrees(&answer) { Ok(()) } else { Err(Problem::new(Code::Cancelled, "nothing was destroyed")) }
    }
}

/// Everything but a plain yes is a no.
fn agrees(answer: &str) -> bool {
    matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_a_plain_yes_agrees() {
        assert!(agrees("y\n") && agrees(" Yes \n"));
        assert!(!agrees("") && !agrees("\n") && !agrees("n\n") && !agrees("yesterday\n"));
    }
}
