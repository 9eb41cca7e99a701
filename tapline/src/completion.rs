//! `tapline completion`: prints a shell's completion script. It completes the words of commands, not names of objects.

use api::Problem;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::Arguments;
use crate::session::print;

/// The shell to complete for.
#[derive(clap::Args)]
pub struct Completion {
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

impl Completion {
    /// Prints the script.
    pub fn run(&self) -> Result<(), Problem> {
        let shell: Shell = self.shell.parse().map_err(|error| Problem::failed("choose a shell", error))?;
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Arguments::command(), "tapline", &mut script);
        print(&String::from_utf8_lossy(&script))
    }
}
