//! Asks for confirmation before something is lost, but only on a terminal.

use std::io::{self, IsTerminal, Write};

/// Options of verbs that destroy something.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Confirm {
    /// Do not ask for confirmation, even on a terminal
    #[arg(long, short)]
    yes: bool,
}

impl Confirm {
    /// Whether the object may be destroyed. Without a terminal there is no question.
    pub fn agreed(self, what: &str) -> io::Result<bool> {
        if self.yes || !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
            return Ok(true);
        }
        write!(io::stderr(), "{what}: really? [y/N] ")?;
        let mut answer = String::new();
        io::stdin().read_line(&mut answer)?;
        Ok(agrees(&answer))
    }
}

/// Whether the answer is yes; anything else counts as no.
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
