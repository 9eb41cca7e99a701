//! The page of all commands (`docs/commands.md`), generated from their definitions.

use std::fmt::Write;

const HEAD: &str = "# Commands\n\nWhat each command does; its link leads to its manual page, which `man` shows too. \
                    This page is generated: `cargo\nxtask man`.\n\nAn image is `FORMAT:PATH`, with `raw`, `vhd` or \
                    `qcow2`, or `vmdk` or `vhdx` for an image that is only read. The\nformat is always named and \
                    never guessed, and a parent that is named inside an image is shown, never followed.\n";

/// The page: a table of the commands without verbs, and one of the verbs of each other command.
pub fn page<'a>(commands: impl Iterator<Item = &'a clap::Command>) -> String {
    let (nouns, alone): (Vec<_>, Vec<_>) = commands.partition(|command| command.has_subcommands());
    let mut page = HEAD.to_owned();
    let mut table = |heading: &str, of: &str, commands: &[&clap::Command]| {
        write!(page, "\n## {heading}\n\n{of}| command | what it does |\n|---|---|\n").unwrap_or_default();
        for command in commands.iter().filter(|command| !command.is_hide_set()) {
            let name = command.get_bin_name().unwrap_or_default();
            let file = name.replace(' ', "-");
            writeln!(page, "| [`{name}`](man/{file}.1) | {} |", about(command)).unwrap_or_default();
        }
    };
    for noun in nouns {
        let verbs: Vec<_> = noun.get_subcommands().collect();
        table(&format!("`{}`", noun.get_bin_name().unwrap_or_default()), &format!("{}.\n\n", about(noun)), &verbs);
    }
    table("Others", "", &alone);
    page
}

fn about(command: &clap::Command) -> String {
    command.get_about().map(|about| about.to_string().replace('|', "\\|").replace('\n', " ")).unwrap_or_default()
}
