//! Confirmation before something is lost: by a question on a terminal, elsewhere by an option.

use std::io::{self, IsTerminal, Write};

use control::{Error, Kind};

/// Options of verbs that destroy something.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Confirm {
    /// Do not ask for confirmation; required without a terminal
    #[arg(long, short)]
    yes: bool,
}

impl Confirm {
    /// Succeeds if `what` is confirmed. Without a terminal to ask on only `--yes` confirms it: a command of a script
    /// or one run over ssh must not lose more by a habit than one typed at the host.
    pub fn ask(self, what: &str) -> Result<(), Error> {
        if self.yes {
            return Ok(());
        }
        if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
            return Err(without_a_terminal(what));
        }
        match answer(what) {
            Ok(answer) if agrees(&answer) => Ok(()),
            Ok(_) => Err(Error::new(Kind::Cancelled, "not confirmed: nothing was done")),
            Err(error) => Err(Error::failed("read the answer", &error)),
        }
    }
}

fn without_a_terminal(what: &str) -> Error {
    Error::new(Kind::Invalid, format!("{what}: not confirmed, as there is no terminal: nothing was done"))
        .advise("to confirm it, add --yes, which is required without a terminal")
}

fn answer(what: &str) -> io::Result<String> {
    write!(io::stderr(), "{what}: really? [y/N] ")?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(answer)
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

    #[test]
    fn without_a_terminal_the_error_names_what_would_be_lost_and_the_option() {
        let error = without_a_terminal("destroy disk \"web\"");
        assert_eq!(
            error.with_advice(),
            "destroy disk \"web\": not confirmed, as there is no terminal: nothing was done\n  \
             to confirm it, add --yes, which is required without a terminal"
        );
        assert!(Confirm { yes: true }.ask("destroy disk \"web\"").is_ok());
    }
}
